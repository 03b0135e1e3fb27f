"""Notices about a request: fields that the server ignores, and a question that looks like pasted passages."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from blendserve.serve.notices import MAX_CHARS, MAX_LOGGED, MAX_NAMES, Notices
from blendserve.serve.schemas import RagRequest
from tests.support.http import CHUNK_TOKENS, MODEL, OWN, Client, asked

CHAT = "/v1/chat/completions"
DOCUMENTS = [{"text": OWN[0]["text"]}]
LONG = "Who sat on the mat? " * CHUNK_TOKENS


def extras(client: Client, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": asked(), "max_tokens": 2, "documents": DOCUMENTS, **fields}
    answer = client.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["x_blendserve"]
    return found


def test_unknown_fields_are_named_by_path_but_labels_and_neutral_values_are_not(client: Client) -> None:
    found = extras(
        client,
        messages=asked(foo=1),
        documents=[*DOCUMENTS, {"text": "More.", "score": 0.5}],
        **{
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "tool_choice": "auto",
        },
        **{"x_blendserve": {"bar": 1, "method": "full"}, "stream_options": {"x": True}, "temprature": 2.0},
        **{"chat_template_kwargs": {"thinking": False}, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.2},
    )
    assert set(found["ignored"]) == {
        *("messages.0.foo", "x_blendserve.bar", "stream_options.x", "documents.1.score", "tools"),
        *("chat_template_kwargs", "top_k", "min_p", "repetition_penalty", "temprature"),
    }
    nothing: dict[str, Any] = {"refusal": None, "annotations": [], "tool_calls": None}
    assert "ignored" not in extras(
        client,
        messages=[*asked(name="ann"), {"role": "assistant", "content": "Hm.", **nothing}, *asked()],
        **{"user": "ann", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True},
        **{"service_tier": "auto", "tools": [], "functions": None, "top_k": -1, "min_p": 0},
        **{"repetition_penalty": 1.0, "n": 1, "logprobs": False, "frequency_penalty": 0},
        **{"response_format": {"type": "text"}, "modalities": ["text"]},
    )


def test_many_long_names_make_a_short_response_and_log(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {f"{i:04}{'x' * 20}": i for i in range(1000)} | {"y" * 1000: 1}
    with caplog.at_level(logging.WARNING):
        found = extras(client, **fields)
        last = extras(client, **{"y" * 1000: 1})
    assert (found["ignored"], found["ignored_total"]) == (list(fields)[:MAX_NAMES], len(fields))
    assert last["ignored"] == ["y" * MAX_CHARS]
    assert len(caplog.records) <= MAX_NAMES + 1
    assert all(len(record.getMessage()) < 3 * MAX_CHARS for record in caplog.records)


def test_a_long_query_gets_a_hint(client: Client) -> None:
    """Not a short one, nor a request with passages, even with none of them."""
    body = {"model": MODEL, "messages": asked(LONG), "max_tokens": 2}
    hint = extras(client, documents=None, messages=asked(LONG))["hint"]
    assert client.events(CHAT, body)[0]["x_blendserve"]["hint"] == hint
    none: dict[str, Any] = {"passages": []}
    for fields in ({"documents": None}, {"messages": asked(LONG)}):
        assert "hint" not in extras(client, **fields)
    assert "hint" not in extras(client, documents=None, messages=asked(LONG), x_blendserve=none)


def test_the_log_has_each_notice_once_and_not_endlessly(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices()
    for _ in range(2):
        passages = [{"text": "One.", "foo": 1}, {"text": "Two.", "foo": 1}]
        notices.ignored(RagRequest.model_validate({"question": "What?", "passages": passages}))
        notices.long_question(CHUNK_TOKENS + 1, CHUNK_TOKENS)
    assert len(caplog.records) == 2
    for i in range(MAX_LOGGED):
        notices.ignored(RagRequest.model_validate({"question": "What?", f"a{i}": 1, f"b{i}": 1}))
    assert len(caplog.records) == MAX_LOGGED
