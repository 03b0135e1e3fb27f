"""What an operator reads: a line of JSON for each request and each bug, tied by ids, without texts and keys."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blendserve.blend.blender import Blender
from blendserve.serve.config import ServeConfig
from blendserve.serve.keys import KeyFile, Tenant
from blendserve.serve.logs import JsonLines
from tests.engine.helpers import PASSAGES, QUESTIONS, wait_for
from tests.serve.helpers import Server

ASK: dict[str, Any] = {"question": QUESTIONS[0], "passages": [{"text": PASSAGES[0].text}], "max_tokens": 2}
SECRET = "secret-value"


class Lines(logging.Handler):
    """What would be written to stderr."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self.text: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(self.format(record))

    def next(self, n: int) -> list[dict[str, Any]]:
        """The first n lines; one is written after its response."""
        wait_for(lambda: len(self.text) >= n)
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


class Shop:
    """A server with one key, and a client that sends it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.key = KeyFile(folder / "keys.json").create(Tenant("root", admin=True))
        self.server = Server(folder, ServeConfig(keys=folder / "keys.json", **settings))

    def ask(self, **changes: Any) -> Any:
        return self.server.post("/v1/rag/query", {**ASK, **changes}, self.key)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    yield made
    made.server.close()


def test_a_line_a_request_without_text_and_key(shop: Shop, lines: Lines) -> None:
    answer = shop.ask()
    shop.ask(**{"top_k": SECRET})
    good, bad = lines.next(2)
    assert good["request"] == answer.headers["X-Request-Id"] != bad["request"]
    assert (good["route"], good["status"], good["tenant"]) == ("POST /v1/rag/query", 200, "root")
    assert (bad["status"], bad["level"]) == (400, "info")
    for secret in (QUESTIONS[0], shop.key, SECRET, PASSAGES[0].text):
        assert secret not in "".join(lines.text)


def test_questions_are_logged_when_asked_for(tmp_path: Path, lines: Lines) -> None:
    shop = Shop(tmp_path, log_text=True)
    try:
        shop.ask()
        assert lines.next(1)[0]["text"] == QUESTIONS[0]
        assert PASSAGES[0].text not in "".join(lines.text)
    finally:
        shop.server.close()


def test_a_bug_is_one_500_with_the_id_of_its_traceback(
    shop: Shop, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(shop.server.engine.store, "stats", broken)  # outside of the scheduler
    monkeypatch.setattr(Blender, "run", broken)  # inside
    answers = [shop.server.get("/v1/cache/stats", shop.key), shop.ask()]
    for answer, (bug, access) in zip(answers, (lines.next(2), lines.next(4)[2:]), strict=True):
        assert answer.status_code == access["status"] == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "broken" not in answer.text
        assert answer.headers["X-Request-Id"] == bug["request"] == access["request"]
        assert (bug["level"], bug["message"]) == ("error", "a request failed")
        assert "RuntimeError: broken" in bug["trace"]
    streamed = shop.ask(stream=True)
    *_, last = (line for line in streamed.text.splitlines() if line)
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    bug, access = lines.next(6)[4:]
    assert bug["request"] == access["request"] == streamed.headers["X-Request-Id"]
    assert len(lines.text) == 6
