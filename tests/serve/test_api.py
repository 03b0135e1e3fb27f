"""The HTTP API is the one of docs/reference: its routes, statuses of errors, refused fields, and fields of answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from blendserve import errors
from blendserve.serve.delivery import router as delivery
from blendserve.serve.responses import error_details, error_response
from tests.support.http import OWN, Client, Server, asked, bearer

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
CHAT = {"model": "tiny", "messages": asked(), "documents": OWN[:2], "max_tokens": 2}
TWO = {"passages": OWN[:2]}


def routes(openapi: dict[str, Any]) -> set[str]:
    """Method and path of each route that a server describes; parameters of paths are {}."""
    paths = openapi["paths"].items()
    found = {(method, path) for path, methods in paths for method in methods if method != "head"}
    return {f"{method.upper()} {re.sub(r'{[^}]*}', '{}', path)}" for method, path in found}


def documented(page: str) -> set[str]:
    """The same, of the table of routes on a page. A further path in a cell may be the last part alone."""
    found = set[str]()
    text = (REFERENCE / page).read_text("utf-8")
    for cell in re.findall(r"^\| (`(?:GET|POST|DELETE) /[^|]+) \|", text, re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", cell)
        method, path = first.split()
        parent = path.rpartition("/")[0]
        paths = [path, *(n if n.count("/") > 1 else f"{parent}/{n.strip('/')}" for n in others)]
        names = (re.sub(r"{[^}]*}|\b[A-Z]+\b", "{}", path.partition("?")[0]) for path in paths)
        found |= {f"{method} {name}" for name in names}
    return found


def test_the_routes_are_those_of_the_pages(server: Server) -> None:
    served = FastAPI()
    served.include_router(delivery)
    assert routes(server.get("/openapi.json").json()) == documented("http-api.md")
    assert routes(served.openapi()) == documented("delivery.md")


def test_errors_are_described_as_they_come(server: Server) -> None:
    """In OpenAI's form and in Anthropic's; tools that read the description have no other status for wrong bodies."""
    described = server.get("/openapi.json").json()
    jsonschema = pytest.importorskip("jsonschema")
    operations = {path: each["post"] for path, each in described["paths"].items() if "post" in each}
    assert {"/v1/chat/completions", "/v1/messages"} <= operations.keys()
    for path, operation in operations.items():
        refused = server.post(path, {"prompt": 7})
        assert 400 <= refused.status_code < 500
        assert "422" not in operation["responses"]
        form = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
        jsonschema.validate(refused.json(), {**form, "components": described["components"]})


STATUSES = re.findall(
    r"^\| `(\w+)` \|[^|]*\| (\d{3}) \|$", (REFERENCE / "errors.md").read_text("utf-8"), re.MULTILINE
)
ARGUMENTS = {"PromptTooLong": (9, 8, 7), "RateLimited": ("m", 7)}  # of others: a message


@pytest.mark.parametrize(("name", "status"), STATUSES)
def test_an_error_has_the_status_that_its_page_states(name: str, status: str) -> None:
    error = getattr(errors, name)(*ARGUMENTS.get(name, ("m",)))
    assert error_details(error)[0] == int(status)


def test_errors_say_in_headers_what_a_client_does_next() -> None:
    for error, header, value in (
        (errors.RateLimited("m", 7), "retry-after", "7"),
        (errors.NotAuthenticated("m"), "www-authenticate", "Bearer"),
        (errors.BodyTooSlow("m"), "connection", "close"),
        (errors.ShuttingDown("m"), "retry-after", "5"),
        (errors.StoreUnavailable("m"), "retry-after", "5"),
    ):
        assert error_response(error, {"path": "/v1/models"}).headers[header] == value


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": [{"role": "assistant", "content": "Hm."}]}, None),
        ({"messages": asked("  ")}, None),
        ({"messages": asked("a \ud800 b")}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "4"}]}, None),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"logit_bias": {"7": 101}}, "logit_bias.7"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 5}, None),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"chat_template_kwargs": {"a": 1}}, None),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, None),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"modalities": ["text", "audio"]}, "modalities.1"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"x_blendserve": {"ratio": 2}}, "x_blendserve.ratio"),
        ({"x_blendserve": {"method": "both"}}, "x_blendserve.method"),
        ({"x_blendserve": {"passages": []}}, None),
        ({"documents": [*OWN, {"title": "Only a title"}]}, f"documents.{len(OWN)}.text"),
        ({"documents": [{"text": "word " * 3000}]}, None),
    ],
)
def test_what_a_question_cannot_have_is_refused_by_field(
    client: Client, change: dict[str, Any], param: str | None
) -> None:
    """Plain chats are in test_plain.py."""
    # JSON has no way to write half a character but by its escape, which httpx would refuse to encode.
    reply = client.http.post(
        "/v1/chat/completions",
        content=json.dumps({**CHAT, **change}),
        headers={"Content-Type": "application/json", **bearer(client.key)},
    )
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_answers_have_the_fields_that_clients_read(client: Client) -> None:
    chat = client.post("/v1/chat/completions", {**CHAT, "foo": 1}).json()
    assert chat.keys() == {"id", "object", "created", "model", "choices", "usage", "x_blendserve"}
    assert chat["choices"][0].keys() == {"index", "message", "finish_reason", "logprobs"}
    assert chat["usage"].keys() == {
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
        "prompt_tokens_details",
    }
    assert chat["x_blendserve"].keys() == {"passages", "ignored", "report", "timings"}
    assert chat["x_blendserve"]["passages"][0].keys() == {"text", "title", "id", "doc_id", "score"}
    query = client.ask(passages=OWN[:2], max_tokens=2, explain=True)
    named = {"text", "finish_reason", "tokens", "passages", "citations", "report", "timings", "cached_tokens"}
    assert query.keys() == named | {"explanation"}
    assert query["explanation"].keys() == {"tokens", "states", "scores", "parts"}
    client.warm(OWN[:2])
    assert client.post("/v1/cache/lookup", TWO).json() == {"chunks": 2, "found": 2, "cached": [True, True]}
    assert client.post("/v1/cache/pin", TWO).json() == {"chunks": 2, "pinned": 2}
    (job,) = client.get("/v1/jobs").json()["data"]
    counts = {"total_documents", "documents", "chunks", "computed"}
    assert job.keys() == counts | {"id", "kind", "state", "error", "files"}
