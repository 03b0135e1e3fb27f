"""An answer to an OpenAI or Anthropic client may fill what its prompt leaves of the context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from blendserve.engine.request import Request
from tests.support.engines import PASSAGES, QUESTIONS, toy_engine
from tests.support.http import MODEL, Server, asked, serving

ROOM = 160  # tokens of prompt and answer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options: dict[str, Any] = {"engine": {"decode": {"max_new_tokens": None}}, "slot_tokens": ROOM}
    with serving(tmp_path_factory.mktemp("length"), has_index=False, **options) as made:
        yield made


@pytest.mark.parametrize(
    "limit", [{}, {"max_tokens": -1}, {"max_tokens": 10**30}, {"max_completion_tokens": -1}]
)
def test_an_answer_fills_the_context(server: Server, limit: dict[str, int]) -> None:
    done = server.post("/v1/chat/completions", {"model": MODEL, "messages": asked(), **limit}).json()
    assert done["usage"]["total_tokens"] == ROOM
    assert done["choices"][0]["finish_reason"] == "length"


def test_it_does_in_anthropics_api(server: Server) -> None:
    body = {"model": MODEL, "messages": asked(), "max_tokens": 10**9}
    done = server.post("/v1/messages", body).json()
    counts = ("input_tokens", "cache_read_input_tokens", "output_tokens")
    assert sum(done["usage"][name] for name in counts) == ROOM
    assert done["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("cap", "asked_for", "n"), [(None, None, 40), (9, None, 9), (9, 50, 9), (90, 50, 40), (None, 3, 3)]
)
def test_the_servers_cap_and_the_requests_limit_both_hold(
    cap: int | None, asked_for: int | None, n: int
) -> None:
    engine = toy_engine(decode={"max_new_tokens": cap})
    request = Request(QUESTIONS[0], PASSAGES, decode={"max_new_tokens": asked_for}, may_fill=True)
    room = len(engine.prompts.build(QUESTIONS[0], PASSAGES)) + 40
    assert engine.prepare(request, room=room).decode.max_new_tokens == n


def test_retrieved_passages_leave_room_for_an_answer() -> None:
    """Those of a request without a limit, too: an answer of one token would help nobody."""
    engine = toy_engine(decode={"max_new_tokens": None})
    room = len(engine.prompts.build(QUESTIONS[0], PASSAGES)) + 8
    request = Request(QUESTIONS[0], may_fill=True)
    prepared = engine.prepare(request, lambda *_: PASSAGES, room=room)
    assert 0 < len(prepared.passages) < len(PASSAGES)
    assert prepared.decode.answer_tokens >= 64
