"""The log: a line of JSON for each request and each bug, tied by request ids, without texts and keys."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blendserve.blend.blender import Blender
from blendserve.serve.middleware import JsonFormatter
from tests.support.engines import QUESTIONS
from tests.support.http import OWN, Client, Server, events, serving
from tests.support.waiting import eventually

ASK: dict[str, Any] = {"question": QUESTIONS[0], "passages": OWN[:1], "max_tokens": 2}
SECRET = "secret-value"
Lines = Callable[[int], list[dict[str, Any]]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    """The first n lines that the server would write to stderr; one is written after its response."""
    before = caplog.handler.formatter
    caplog.handler.setFormatter(JsonFormatter())
    caplog.set_level(logging.INFO, "blendserve.access")

    def first(n: int) -> list[dict[str, Any]]:
        eventually(lambda: caplog.text.count("\n") >= n)
        return [json.loads(line) for line in caplog.text.splitlines()[:n]]

    yield first
    caplog.handler.setFormatter(before)


def test_each_request_is_a_line_without_text_and_key(
    client: Client, lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    answer = client.post("/v1/rag/query", ASK)
    client.post("/v1/rag/query", {**ASK, "top_k": SECRET})
    good, bad = lines(2)
    assert good["request"] == answer.headers["X-Request-Id"] != bad["request"]
    assert (good["route"], good["status"], good["tenant"]) == ("POST /v1/rag/query", 200, client.namespace)
    assert (bad["status"], bad["level"]) == (400, "info")
    for secret in (QUESTIONS[0], client.key, SECRET, OWN[0]["text"]):
        assert secret not in caplog.text


def test_log_text_adds_the_question(tmp_path: Path, lines: Lines, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, log_text=True) as server:
        server.post("/v1/rag/query", ASK)
        assert lines(1)[0]["text"] == QUESTIONS[0]
        assert OWN[0]["text"] not in caplog.text


def test_a_bug_is_one_500_with_the_id_of_its_traceback(
    client: Client,
    server: Server,
    lines: Lines,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError(SECRET)

    with monkeypatch.context() as patch:
        patch.setattr(server.engine.store, "stats", broken)  # outside of the scheduler
        patch.setattr(Blender, "prefill", broken)  # inside
        answers = [client.get("/v1/cache/stats"), client.post("/v1/rag/query", ASK)]
        streamed = client.post("/v1/rag/query", {**ASK, "stream": True})
    assert [answer.status_code for answer in answers] == [500, 500]
    assert events(streamed.text.splitlines())[-1]["error"]["type"] == "server_error"
    said = lines(6)
    for answer, bug, access in zip([*answers, streamed], said[::2], said[1::2], strict=True):
        assert SECRET not in answer.text
        assert answer.headers["X-Request-Id"] == bug["request"] == access["request"]
        assert (bug["level"], access["status"]) == ("error", answer.status_code)
        assert f"RuntimeError: {SECRET}" in bug["trace"]
    assert len(caplog.records) == 6
