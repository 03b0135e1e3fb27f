"""Requests of clients that send more fields than the server has, and questions that contain their passages."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from blendserve.serve.config import ServeConfig
from blendserve.serve.notices import MAX_CHARS, MAX_LOGGED, MAX_NAMES, Notices
from blendserve.serve.schema import RagRequest
from tests.engine.helpers import PASSAGES, QUESTIONS
from tests.serve.helpers import Server

MODEL = "tiny"
CHUNK_TOKENS = 32
OWN = [{"text": PASSAGES[0].text}]
LONG = "Who sat on the mat? " * CHUNK_TOKENS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("notices")
    made = Server(folder, ServeConfig(), retrieve={"chunk_tokens": CHUNK_TOKENS})
    yield made
    made.close()


def asked(text: str = QUESTIONS[0], **fields: Any) -> list[Any]:
    return [{"role": "user", "content": text, **fields}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": asked(), "max_tokens": 2, "documents": OWN, **fields}


def extras(server: Server, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/chat/completions", body(**fields))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["x_blendserve"]
    return found


def test_unknown_fields_are_named_by_path(server: Server) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    done = server.client().chat.completions.create(
        model=MODEL,
        messages=asked(foo=1),
        max_tokens=2,
        tools=tools,
        tool_choice="auto",
        extra_body={
            "x_blendserve": {"bar": 1, "method": "full"},
            "stream_options": {"x": True},
            "documents": [*OWN, {"text": "More.", "score": 0.5}],
            "chat_template_kwargs": {"thinking": False},
            "top_k": 40,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
        },
    )
    assert set(done.model_extra["x_blendserve"]["ignored"]) == {  # type: ignore[index]
        *("messages.0.foo", "x_blendserve.bar", "stream_options.x", "documents.1.score", "tools"),
        *("chat_template_kwargs", "top_k", "min_p", "repetition_penalty"),
    }


def test_a_stream_names_them_in_its_first_chunk(server: Server) -> None:
    first, *others = server.client().chat.completions.create(
        model=MODEL, messages=asked(), max_tokens=2, stream=True, extra_body={"documents": OWN, "foo": 1}
    )
    assert first.model_extra["x_blendserve"]["ignored"] == ["foo"]  # type: ignore[index]
    assert all("ignored" not in (c.model_extra or {}).get("x_blendserve", {}) for c in others)


def test_labels_and_neutral_values_are_not_named(server: Server) -> None:
    said: dict[str, Any] = {
        "role": "assistant",
        "content": "Hm.",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
    }
    found = extras(
        server,
        messages=[*asked(name="ann"), said, *asked()],
        user="ann",
        metadata={"a": "b"},
        store=False,
        parallel_tool_calls=True,
        service_tier="auto",
        tools=[],
        functions=None,
        top_k=-1,
        min_p=0,
        repetition_penalty=1.0,
        n=1,
        logprobs=False,
        frequency_penalty=0,
        response_format={"type": "text"},
        modalities=["text"],
    )
    assert "ignored" not in found


def test_a_misspelt_field_changes_nothing(server: Server) -> None:
    text = [
        server.post("/v1/chat/completions", body(x_blendserve={"method": "full"}, **more)).json()["choices"]
        for more in ({}, {"temprature": 2.0})
    ]
    assert text[0] == text[1]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"model": MODEL, "prompt": "What?", "documents": OWN, "max_tokens": 2}),
        ("/v1/rag/query", {"question": "What?", "passages": OWN, "max_tokens": 2}),
        ("/v1/documents", {"documents": [{"text": "New.", "id": "new"}], "collection": "a"}),
        *((f"/v1/cache/{name}", {"passages": OWN}) for name in ("warm", "pin", "unpin", "lookup", "delete")),
        ("/v1/cache/fetch", {"passages": OWN}),
    ],
)
def test_every_route_names_them(server: Server, path: str, fields: dict[str, Any]) -> None:
    known = server.post(path, fields)
    assert known.is_success
    assert "ignored" not in known.json().get("x_blendserve", {})
    assert server.post(path, {**fields, "foo": 1}).json()["x_blendserve"]["ignored"] == ["foo"]


def test_a_streamed_query_names_them_with_the_passages(server: Server) -> None:
    asking = {"question": "What?", "passages": OWN, "max_tokens": 2, "stream": True, "foo": 1}
    first = server.post("/v1/rag/query", asking).text.split("\n\n")[0]
    assert json.loads(first.removeprefix("data: "))["x_blendserve"] == {"ignored": ["foo"]}


def test_many_long_names_make_a_short_response(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    fields = {f"{i:04}{'x' * 100}": i for i in range(5000)}
    with caplog.at_level(logging.WARNING):
        found = extras(server, **fields)
    assert found["ignored"] == [name[:MAX_CHARS] for name in list(fields)[:MAX_NAMES]]
    assert found["ignored_total"] == len(fields)
    assert len(caplog.records) <= MAX_NAMES
    assert all(len(record.getMessage()) < 3 * MAX_CHARS for record in caplog.records)


def test_half_a_character_in_a_name(server: Server) -> None:
    sent = json.dumps(body(**{"\ud800": 1})).encode()
    answer = server.http.post(
        "/v1/chat/completions", content=sent, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400  # no response could name it


def test_the_log_has_each_name_once_and_not_endlessly(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            passages = [{"text": "One.", "foo": 1}, {"text": "Two.", "foo": 1}]
            notices.ignored(RagRequest.model_validate({"question": "What?", "passages": passages}))
        assert len(caplog.records) == 1
        assert "passages.*.foo" in caplog.text
        for i in range(MAX_LOGGED):
            notices.ignored(RagRequest.model_validate({"question": "What?", f"a{i}": 1, f"b{i}": 1}))
    assert len(caplog.records) == MAX_LOGGED


def test_a_long_question_gets_a_hint(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    retrieving: dict[str, Any] = {"documents": None, "messages": asked(LONG)}
    with caplog.at_level(logging.WARNING):
        hints = [extras(server, **retrieving)["hint"] for _ in range(2)]
    assert "prompt.separator" in hints[0]
    assert [record.getMessage() for record in caplog.records] == [hints[0]]
    first, *_ = server.post("/v1/chat/completions", body(**retrieving, stream=True)).text.split("\n\n")
    assert json.loads(first.removeprefix("data: "))["x_blendserve"]["hint"] == hints[0]


def test_a_short_question_and_one_with_documents_get_none(server: Server) -> None:
    assert "hint" not in extras(server, documents=None)
    assert "hint" not in extras(server, messages=asked(LONG))
    none: dict[str, Any] = {"passages": []}
    assert "hint" not in extras(server, documents=None, messages=asked(LONG), x_blendserve=none)
