"""A stream without events sends comments, which the official client skips."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from blendserve.serve.config import ServeConfig
from tests.engine.helpers import PASSAGES, QUESTIONS
from tests.serve.helpers import Server, hold

EXTRA: dict[str, Any] = {
    "documents": [{"text": p.text} for p in PASSAGES],
    "x_blendserve": {"method": "full"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("pings"), ServeConfig(ping_s=0.02))
    yield made
    made.close()


class Tapped(httpx.SyncByteStream):
    """A response's bytes; `pinged` is set when the second ping has come."""

    def __init__(self, inner: httpx.SyncByteStream, pinged: threading.Event) -> None:
        self._inner, self._pinged = inner, pinged

    def __iter__(self) -> Iterator[bytes]:
        seen = b""
        for part in self._inner:
            seen += part
            if seen.count(b": ping\n\n") >= 2:
                self._pinged.set()
            yield part

    def close(self) -> None:
        self._inner.close()


class Tap(httpx.HTTPTransport):
    def __init__(self, pinged: threading.Event) -> None:
        super().__init__()
        self._pinged = pinged

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = super().handle_request(request)
        assert isinstance(answer.stream, httpx.SyncByteStream)
        answer.stream = Tapped(answer.stream, self._pinged)
        return answer


def test_a_waiting_stream_pings_and_then_says_the_same(server: Server) -> None:
    asked: list[Any] = [{"role": "user", "content": QUESTIONS[0]}]
    whole = server.client().chat.completions.create(model="tiny", messages=asked, extra_body=EXTRA)
    pinged = threading.Event()
    hold(server.service.scheduler, pinged)  # no prefill before two pings have come
    with httpx.Client(transport=Tap(pinged), timeout=300) as http:
        same: Any = http  # newer clients declare httpx2's class, and also take this one
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=same)
        chunks = list(
            client.chat.completions.create(model="tiny", messages=asked, stream=True, extra_body=EXTRA)
        )
    assert pinged.is_set()
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content


def test_a_client_that_goes_while_its_stream_pings_frees_its_place(server: Server) -> None:
    let_go = threading.Event()
    hold(server.service.scheduler, let_go)
    asking = {"question": QUESTIONS[0], "passages": EXTRA["documents"], "stream": True, "max_tokens": 700}
    with server.http.stream("POST", "/v1/rag/query", json=asking) as stream:
        assert any(line == ": ping" for line in stream.iter_lines())
    let_go.set()
    done = server.post("/v1/rag/query", {**asking, "stream": False, "max_tokens": 2})
    assert done.status_code == 200
