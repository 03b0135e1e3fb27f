"""A silent stream sends comments, which OpenAI's client skips."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from blendserve.config import ServeConfig
from tests.support.http import MODEL, OWN, Server, asked, events, serving

ASKED: dict[str, Any] = {"model": MODEL, "messages": asked(), "documents": OWN, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, engine = tmp_path_factory.mktemp("pings"), {"blend": {"method": "full"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServeConfig, "ping_s", 0.02)
        with serving(folder, engine=engine) as made:
            yield made


def test_a_waiting_stream_pings_and_then_says_the_same(server: Server) -> None:
    whole = server.ask(passages=OWN)["text"]
    lines: list[str] = []
    with server.busy() as release, server.http.stream("POST", "/v1/chat/completions", json=ASKED) as response:
        for line in response.iter_lines():
            lines.append(line)
            if lines.count(": ping") == 2:  # no prefill before two pings
                release.set()
    assert lines.count(": ping") >= 2
    deltas = [event["choices"][0]["delta"] for event in events(lines)]
    assert "".join(delta.get("content", "") for delta in deltas) == whole

    content, headers = "\n".join(lines) + "\n", {"Content-Type": "text/event-stream"}
    replay = httpx.MockTransport(lambda _: httpx.Response(200, content=content, headers=headers))
    http: Any = httpx.Client(transport=replay)  # newer clients declare another class, and accept this one
    client: Any = openai.OpenAI(base_url="http://replay/v1", api_key="none", http_client=http)
    chunks = client.chat.completions.create(model=MODEL, messages=asked(), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_a_client_that_disconnects_from_a_pinging_stream_frees_its_place(server: Server) -> None:
    with (
        server.busy(),
        server.http.stream("POST", "/v1/chat/completions", json={**ASKED, "max_tokens": 700}) as stream,
    ):
        assert any(line == ": ping" for line in stream.iter_lines())
    server.ask(passages=OWN, max_tokens=2)
    assert server.is_idle
