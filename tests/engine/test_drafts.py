"""Drafts by prompt lookup: found as by brute force, and the same answers with, without and with wrong ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import Answer
from blendserve.engine.drafts import LONG, RETRY, SHORT, Drafter
from blendserve.engine.request import Event, Finished, Request, TextDelta
from blendserve.kernels.cpu.decode_step import MAX_ROWS
from blendserve.models.kv_cache import KVCache
from blendserve.models.runner import Runner
from tests.support.engines import PASSAGES, QUESTIONS, submit, toy_batch, toy_engine, toy_reader

NEW = 40
CACHE = KVCache(toy_reader().adapter, 8)
needs_native = pytest.mark.skipif(
    Runner.over(toy_reader().adapter, CACHE, 0, NEW).draft_room(1) == 0,
    reason="no native step here: no drafts",
)
OPTIONS: list[dict[str, Any]] = [
    {},
    *({"temperature": 0.7, "seed": seed} for seed in range(6)),
    *({"temperature": 1.3, "top_p": 0.8, "seed": seed} for seed in range(3)),
]


@given(
    ids=st.lists(st.integers(0, 3), min_size=0, max_size=60), cut=st.integers(0, 60), room=st.integers(1, 9)
)
def test_a_draft_is_what_followed_the_last_tokens_before(ids: list[int], cut: int, room: int) -> None:
    drafter = Drafter(ids[:cut])
    for token in ids[cut:]:
        drafter.push(token)
    expected: list[int] = []
    for n in (2, 3):  # the longer one counts
        ends = [i for i in range(n, len(ids)) if ids[i - n : i] == ids[-n:]]
        if ends:
            expected = ids[ends[-1] :][: min(room, SHORT)]
    assert drafter.draft(room) == expected


def test_drafts_are_longer_while_they_are_right_and_rare_while_they_are_wrong() -> None:
    drafter = Drafter(range(50))
    drafter.push(0)
    drafter.push(1)
    assert drafter.draft(LONG) == [2, 3, 4]
    for _ in range(9):
        drafter.judge(SHORT, SHORT)
    assert len(drafter.draft(LONG)) == LONG
    for _ in range(30):
        drafter.judge(LONG, 0)
    assert [len(drafter.draft(LONG)) for _ in range(2 * RETRY)] == 2 * [*[0] * (RETRY - 1), SHORT]


def answer(passages: int = 3, question: int = 0, **options: Any) -> Answer:
    return toy_engine().answer(QUESTIONS[question], PASSAGES[:passages], max_new_tokens=NEW, **options)


def check_equal(one: Answer, other: Answer) -> None:
    assert one.token_ids == other.token_ids
    assert (one.text, one.finish_reason) == (other.text, other.finish_reason)


@needs_native
@pytest.mark.parametrize("question", range(len(QUESTIONS)))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_answers_are_the_same_with_and_without_drafts(options: dict[str, Any], question: int) -> None:
    plain = answer(question=question, drafts=False, **options)
    check_equal(answer(question=question, **options), plain)
    assert plain.timings.tokens_per_pass == 1.0
    stop = plain.text[7:10]
    check_equal(
        answer(question=question, stop=(stop,), **options),
        answer(question=question, stop=(stop,), drafts=False, **options),
    )


@needs_native
def test_an_answer_that_repeats_itself_takes_fewer_passes() -> None:
    assert max(answer(question=i).timings.tokens_per_pass for i in range(len(QUESTIONS))) > 1.5


Draft = Callable[[list[int], int], list[int]]  # the answer from here on, room -> a draft


def draft_by(monkeypatch: pytest.MonkeyPatch, whole: Answer, made: Draft) -> None:
    """Have drafts made from the answer that is known in advance."""
    done = len(whole.token_ids)
    pushed: list[int] = []
    monkeypatch.setattr(Drafter, "__init__", lambda self, ids: pushed.clear())
    monkeypatch.setattr(Drafter, "push", lambda self, token: pushed.append(token))
    monkeypatch.setattr(Drafter, "judge", lambda self, drafted, right: None)
    ids = [*whole.token_ids, *[0] * done]
    monkeypatch.setattr(Drafter, "draft", lambda self, room: made(ids[1 + len(pushed) :], room)[:room])


@needs_native
@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_wrong_drafts_are_rejected_and_right_ones_kept(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, dice = answer(drafts=False, **options), random.Random(0)

    def wrong(rest: list[int], room: int) -> list[int]:
        return [(token + 1) % 1000 for token in rest[:room]]

    def mixed(rest: list[int], room: int) -> list[int]:
        n = dice.randint(0, room)
        return rest[:n] + wrong(rest[n:], room - n)

    draft_by(monkeypatch, whole, wrong)
    got = answer(**options)
    check_equal(got, whole)
    assert got.timings.tokens_per_pass == 1.0
    draft_by(monkeypatch, whole, lambda rest, room: rest)
    got, n = answer(**options), len(whole.token_ids) - (whole.finish_reason == "length")
    check_equal(got, whole)
    assert got.timings.tokens_per_pass == n / -(-n // MAX_ROWS)
    draft_by(monkeypatch, whole, mixed)
    check_equal(answer(**options), whole)


@needs_native
def test_requests_that_run_together_get_the_answers_that_each_gets_alone() -> None:
    engine = toy_engine()
    batch = toy_batch(engine)
    asked = [(i % len(QUESTIONS), options) for i, options in enumerate(OPTIONS)]
    listeners = [
        submit(batch, QUESTIONS[i], PASSAGES[:3], max_new_tokens=NEW, **options) for i, options in asked
    ]
    plan = engine.plan(Request(QUESTIONS[1], PASSAGES[:2], decode={"max_new_tokens": NEW}))
    events: list[Event] = []
    left = batch.sequence(plan, events.append, "")
    batch.scheduler.submit(left)
    while batch.scheduler.has_work:
        batch.scheduler.step()
        if any(isinstance(event, TextDelta) for event in events):
            batch.scheduler.cancel(left)
    for (i, options), listener in zip(asked, listeners, strict=True):
        check_equal(listener.answer(), answer(question=i, drafts=False, **options))
    assert not any(isinstance(event, Finished) for event in events)
