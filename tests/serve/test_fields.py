"""Every field of the official clients is done, refused by name, or without effect, as docs/reference/fields.md says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from scripts.fields_table import APIS, PAGE, Api, section
from tests.support.http import MODEL, Server, asked, serving

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": asked(), "max_tokens": 6},
    "/v1/completions": {"prompt": "Once upon", "max_tokens": 6},
    "/v1/responses": {"input": "Once upon", "max_output_tokens": 6},
    "/v1/embeddings": {"input": "Once upon"},
    "/v1/messages": {"messages": asked(), "max_tokens": 6},
}
CASES = {
    kind: [(api, field) for api in APIS for field in getattr(api, kind)] for kind in ("refused", "unused")
}


def name(value: Any) -> str:
    return value.path if isinstance(value, Api) else str(value)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("fields")) as made:
        yield made


def answer(server: Server, api: Api, **fields: Any) -> Any:
    """What a response says, without its ids and times."""
    model = {} if api.path == "/v1/embeddings" else {"model": f"{MODEL}:chat"}
    response = server.post(api.path, {**model, **BODIES[api.path], "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    found = response.json()
    if api.path == "/v1/responses":
        return [item["content"][0]["text"] for item in found["output"]]
    return found.get("choices") or found.get("data") or found["content"]


@pytest.mark.parametrize("api", APIS, ids=name)
def test_the_page_says_of_each_field_what_is_done_with_it(api: Api) -> None:
    pytest.importorskip(api.package)
    assert section(api) in PAGE.read_text(), "run python -m scripts.fields_table"


@pytest.mark.parametrize(("api", "field"), CASES["refused"], ids=name)
def test_a_refused_field_is_named(server: Server, api: Api, field: str) -> None:
    body = {"model": f"{MODEL}:chat", **BODIES[api.path], field: api.refused[field]}
    refused = server.post(api.path, body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error.get("param") or error["message"]).startswith(field)


@pytest.mark.parametrize("api", APIS, ids=name)
def test_fields_without_effect_have_none(server: Server, api: Api) -> None:
    """All at once, and each alone."""
    expected = answer(server, api)
    for fields in (dict(api.unused), *({field: value} for field, value in api.unused.items())):
        assert answer(server, api, **fields) == expected


@pytest.mark.parametrize("api", APIS, ids=name)
def test_a_field_has_one_status(api: Api) -> None:
    assert not api.refused.keys() & api.unused.keys()
    assert api.refused.keys() <= api.body.model_fields.keys()
