"""Requests to POST /v1/messages, and the message that a client puts together from a stream."""

from __future__ import annotations

import json
from typing import Any

from tests.support.engines import QUESTIONS
from tests.support.http import MODEL, Client, asked

URL, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "get_weather", "description": "Tells the weather.", "input_schema": SCHEMA}
FUNCTION = {"name": "get_weather", "description": "Tells the weather.", "parameters": SCHEMA}
SCRIPT = (  # what the scripted model writes
    "Let me look",
    " it up.\n",
    '<tool_call>\n{"name": "get_weather", ',
    '"arguments": {"city": ',
    '"Paris"}}\n</tool_call>',
)
SAID, INPUT = "Let me look it up.", {"city": "Paris"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": INPUT}


def body(content: Any = QUESTIONS[0], **fields: Any) -> dict[str, Any]:
    """A request."""
    return {"model": MODEL, "max_tokens": 8, "messages": asked(content), **fields}


def stream(server: Client, request: dict[str, Any]) -> list[dict[str, Any]]:
    """The events, each named by its type."""
    response = server.post(URL, {**request, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from a stream."""
    first, *others = events
    assert (first["type"], others[-1]) == ("message_start", {"type": "message_stop"})
    message: dict[str, Any] = first["message"]
    written, is_open = "", False
    for event in others[:-1]:
        if event["type"] == "content_block_start":
            assert (event["index"], is_open) == (len(message["content"]), False)
            assert not event["content_block"].get("input")  # comes as deltas
            message["content"].append(event["content_block"])
            written, is_open = "", True
        elif event["type"] == "content_block_delta":
            assert (event["index"], is_open) == (len(message["content"]) - 1, True)
            delta, block = event["delta"], message["content"][-1]
            if (kind := delta["type"].removesuffix("_delta")) in ("text", "thinking"):
                assert delta[kind]
                block[kind] += delta[kind]
            elif kind == "citations":
                block[kind] = [*block.get(kind, ()), delta["citation"]]
            else:
                written += delta["partial_json"]
                block["input"] = json.loads(written)
        elif event["type"] == "content_block_stop":
            assert (event["index"], is_open) == (len(message["content"]) - 1, True)
            is_open = False
        else:
            assert (event["type"], is_open) == ("message_delta", False)
            message |= event["delta"]
            message["usage"] |= event["usage"]
            message["x_blendserve"] |= event["x_blendserve"]
    return message


def same(message: dict[str, Any]) -> dict[str, Any]:
    """All but ids and timings."""
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {k: v for k, v in message.items() if k not in ("id", "x_blendserve")} | {"content": content}
