"""The log: a line of JSON for each request and each bug, tied by request ids, without texts and keys."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blendserve.blend.blender import Blender
from blendserve.serve.logs import JsonLines
from tests.support.http import OWN, QUESTIONS, Server, TenantClient, serving
from tests.support.waiting import eventually

ASK: dict[str, Any] = {"question": QUESTIONS[0], "passages": OWN[:1], "max_tokens": 2}
SECRET = "secret-value"


class Lines(logging.Handler):
    """What the server would write to stderr."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self.text: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(self.format(record))

    def next(self, n: int) -> list[dict[str, Any]]:
        """The first n lines; one is written after its response."""
        eventually(lambda: len(self.text) >= n)
        return [json.loads(line) for line in self.text[:n]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    root, access, handler = logging.getLogger(), logging.getLogger("blendserve.access"), Lines()
    before = access.level
    root.addHandler(handler)
    access.setLevel(logging.INFO)
    yield handler
    access.setLevel(before)
    root.removeHandler(handler)


def test_each_request_is_a_line_without_text_and_key(client: TenantClient, lines: Lines) -> None:
    answer = client.post("/v1/rag/query", ASK)
    client.post("/v1/rag/query", {**ASK, "top_k": SECRET})
    good, bad = lines.next(2)
    assert good["request"] == answer.headers["X-Request-Id"] != bad["request"]
    assert (good["route"], good["status"], good["tenant"]) == ("POST /v1/rag/query", 200, client.namespace)
    assert (bad["status"], bad["level"]) == (400, "info")
    for secret in (QUESTIONS[0], client.key, SECRET, OWN[0]["text"]):
        assert secret not in "".join(lines.text)


def test_log_text_adds_the_question(tmp_path: Path, lines: Lines) -> None:
    with serving(tmp_path, log_text=True) as server:
        server.post("/v1/rag/query", ASK)
        assert lines.next(1)[0]["text"] == QUESTIONS[0]
        assert OWN[0]["text"] not in "".join(lines.text)


def test_a_bug_is_one_500_with_the_id_of_its_traceback(
    server: Server, client: TenantClient, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError(SECRET)

    with monkeypatch.context() as patch:
        patch.setattr(server.engine.store, "stats", broken)  # outside of the scheduler
        patch.setattr(Blender, "run", broken)  # inside
        answers = [client.get("/v1/cache/stats"), client.post("/v1/rag/query", ASK)]
        streamed = client.post("/v1/rag/query", {**ASK, "stream": True})
    for answer, (bug, access) in zip(answers, (lines.next(2), lines.next(4)[2:]), strict=True):
        assert answer.status_code == access["status"] == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert SECRET not in answer.text
        assert answer.headers["X-Request-Id"] == bug["request"] == access["request"]
        assert bug["level"] == "error"
        assert f"RuntimeError: {SECRET}" in bug["trace"]
    *_, last = (line for line in streamed.text.splitlines() if line)
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    bug, access = lines.next(6)[4:]
    assert bug["request"] == access["request"] == streamed.headers["X-Request-Id"]
    assert len(lines.text) == 6
