"""Many requests at once say what each says alone, share fairly, and leave no slot behind."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from blendserve.core import Passage
from blendserve.engine.engine import Engine
from blendserve.engine.fair_queue import FairQueue
from blendserve.engine.queued import Finished, Piece, QueuedRequest, Started
from blendserve.engine.scheduler import BACKGROUND_EVERY
from blendserve.engine.slots import Slots
from blendserve.errors import Busy, PromptTooLong, Stopping
from blendserve.models.forward import Row, append, append_each
from blendserve.models.kv_cache import KVCache
from tests.engine.helpers import CONTEXT, PASSAGES, QUESTIONS, Listener, engine, reader, wait_for
from tests.engine.scheduling import Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    made.scheduler.start()
    yield made
    made.scheduler.stop()


def alone(engine: Engine, question: str, passages: Sequence[Passage], **options: Any) -> tuple[Any, ...]:
    answer = engine.answer(question, list(passages), **options)
    return answer.token_ids, answer.text, answer.finish_reason, answer.report


def test_a_batch_says_what_each_request_says_alone(bench: Bench) -> None:
    rng = random.Random(0)
    asked = []
    for i in range(24):
        passages = rng.sample(PASSAGES, rng.randint(0, len(PASSAGES)))
        options: dict[str, Any] = {
            "method": ("blend", "full", "prefix", "reuse")[i % 4],
            "max_new_tokens": rng.randint(1, 16),
            "ratio": rng.choice([0.0, 0.15, 1.0]),
        }
        if i % 5 == 0:
            options |= {"temperature": 1.0, "seed": i}
        asked.append((rng.choice(QUESTIONS), passages, options))
    listeners = [bench.submit(q, p, tenant=str(i % 3), **o) for i, (q, p, o) in enumerate(asked)]
    for listener, (question, passages, options) in zip(listeners, asked, strict=True):
        answer = listener.answer()
        expected = alone(bench.engine, question, passages, **options)
        assert (answer.token_ids, answer.text, answer.finish_reason, answer.report) == expected
        assert answer.timings.ttft >= answer.timings.prefill > 0
    bench.wait_idle()


def test_a_step_of_many_rows_is_the_steps_of_each() -> None:
    adapter = reader().adapter
    bench = engine()
    caches, rows, expected = [], [], []
    for i, question in enumerate(QUESTIONS):
        prompt = bench.prompts.build(question, PASSAGES[: i + 1])
        done = [bench.blender.run(prompt, bench.config.blend, 1).prefilled.cache for _ in range(2)]
        expected.append(append(adapter, done[0], len(prompt), (100 + i,))[0])
        caches.append(done)
        rows.append(Row(done[1], len(prompt), 100 + i))
    logits = append_each(adapter, rows)
    assert float((logits - torch.stack(expected)).abs().max()) < 1e-4
    for one, many in caches:
        assert float((one.keys - many.keys).abs().max()) < 1e-4


def test_a_prefill_lets_running_answers_go_on(bench: Bench) -> None:
    """With a gap of 0, every layer of a prefill is preceded by a step: its bound, without a clock."""
    first = bench.submit(QUESTIONS[0], PASSAGES, max_new_tokens=200)
    while not isinstance(first.next(), Started):
        pass
    second = bench.submit(QUESTIONS[1], PASSAGES[::-1], method="full")
    while not isinstance(second.next(), Started):
        pass
    before = len([e for e in list(first.seen) + drain(first) if isinstance(e, Piece | Finished)])
    assert before >= reader().adapter.n_layers
    second.answer()


def drain(listener: Listener) -> list[Any]:
    """What has come so far."""
    events = []
    while not listener._events.empty():
        events.append(listener.next())
    return events


def test_a_cancelled_request_frees_its_slot(bench: Bench) -> None:
    started: list[QueuedRequest] = []
    for i in range(3):
        work, listener = bench.work(QUESTIONS[i], PASSAGES, max_new_tokens=400)
        bench.scheduler.submit(work)
        assert isinstance(listener.next(), Started)
        started.append(work)
    waiting, _ = bench.work(QUESTIONS[3], PASSAGES)
    bench.scheduler.submit(waiting)
    bench.scheduler.cancel(waiting)
    bench.scheduler.cancel(started[1])
    expected = alone(bench.engine, QUESTIONS[3], PASSAGES[:2])
    assert bench.submit(QUESTIONS[3], PASSAGES[:2]).answer().token_ids == expected[0]
    for work in started:
        bench.scheduler.cancel(work)
    bench.wait_idle()
    assert bench.slots.free == 3


def test_a_prefill_is_cancelled_between_two_layers(bench: Bench) -> None:
    pauses: list[int] = []
    work, listener = bench.work(QUESTIONS[0], PASSAGES, method="full")

    def prefix_kv() -> Any:
        bench.scheduler.cancel(work)
        return None

    work.prefix_kv = prefix_kv
    pause = work.blender._before_layer
    assert pause is not None

    def counted(l: int) -> None:
        pauses.append(l)
        pause(l)

    work.blender._before_layer = counted
    bench.scheduler.submit(work)
    wait_for(lambda: bool(pauses))
    bench.wait_idle()
    assert pauses == [0]
    assert drain(listener) == []


def test_a_full_queue_and_a_prompt_that_can_never_fit(bench: Bench) -> None:
    small = Bench(slots=1, queue=2)  # not started: nothing leaves the queue
    for _ in range(2):
        small.submit(QUESTIONS[0], PASSAGES)
    with pytest.raises(Busy, match="2 requests are waiting") as error:
        small.submit(QUESTIONS[0], PASSAGES)
    assert 1 <= error.value.retry_after <= 60
    n = len(bench.engine.prompts.build(QUESTIONS[0], PASSAGES))
    with pytest.raises(PromptTooLong, match=f"{n} tokens .* 1 too many for a context of {CONTEXT}"):
        bench.submit(QUESTIONS[0], PASSAGES, max_new_tokens=CONTEXT - n + 1)
    work, listener = bench.work(QUESTIONS[0], PASSAGES, max_new_tokens=CONTEXT - n)
    bench.scheduler.submit(work)
    assert isinstance(listener.next(), Started)
    bench.scheduler.cancel(work)


def test_tenants_take_turns() -> None:
    waiting = FairQueue[QueuedRequest]()
    bench = Bench()
    order = "aaaaabbc"
    for tenant in order:
        waiting.put(bench.work(QUESTIONS[0], (), tenant)[0])
    popped = []
    while work := waiting.pop():
        popped.append(work.tenant)
    assert "".join(popped) == "abcabaaa"


def test_one_tenants_requests_keep_their_order() -> None:
    waiting, bench = FairQueue[QueuedRequest](), Bench()
    works = [bench.work(QUESTIONS[i % 4], (), "ab"[i % 2])[0] for i in range(10)]
    for work in works:
        waiting.put(work)
    assert waiting.remove(works[4])
    assert not waiting.remove(works[4])
    popped = [one for _ in range(9) if (one := waiting.pop())]
    for tenant in "ab":
        assert [w for w in popped if w.tenant == tenant] == [
            w for w in works if w.tenant == tenant and w is not works[4]
        ]
    assert len(waiting) == 0


def test_a_slot_is_lent_once() -> None:
    slots = Slots(reader().adapter, 2, 8)
    a, b = slots.take(), slots.take()
    a.keys.fill_(1.0)
    b.keys.fill_(2.0)
    assert float(a.keys.max()) == 1.0
    with pytest.raises(IndexError):
        slots.take()
    slots.give_back(a)
    with pytest.raises(KeyError):
        slots.give_back(a)
    assert isinstance(slots.take(), KVCache)


def test_a_request_that_fails_fails_alone(bench: Bench) -> None:
    def broken() -> Any:
        raise RuntimeError("broken")

    good = bench.submit(QUESTIONS[0], PASSAGES)
    work, listener = bench.work(QUESTIONS[0], PASSAGES)
    work.prefix_kv = broken
    bench.scheduler.submit(work)
    with pytest.raises(RuntimeError, match="broken"):
        listener.answer()
    assert good.answer().token_ids == alone(bench.engine, QUESTIONS[0], PASSAGES)[0]
    bench.wait_idle()


def test_draining_takes_no_more_and_finishes_what_runs(bench: Bench) -> None:
    listener = bench.submit(QUESTIONS[0], PASSAGES, max_new_tokens=30)
    bench.scheduler.drain()
    assert not bench.scheduler.alive
    with pytest.raises(Stopping):
        bench.submit(QUESTIONS[0], PASSAGES)
    assert len(listener.answer().token_ids) == 30


def test_stopping_ends_all_that_still_runs_or_waits() -> None:
    bench = Bench(slots=3)
    bench.scheduler.start()
    listeners = [bench.submit(QUESTIONS[i % 4], PASSAGES[:2], max_new_tokens=600) for i in range(5)]
    for listener in listeners[:3]:
        assert isinstance(listener.next(), Started)
    bench.scheduler.stop()
    for listener in listeners:
        with pytest.raises(Stopping):
            listener.answer()
    assert bench.slots.free == 3


def test_background_tasks_are_done_while_requests_wait() -> None:
    bench = Bench(slots=1)
    asked = [bench.submit(QUESTIONS[0], PASSAGES[:1], max_new_tokens=1) for _ in range(3 * BACKGROUND_EVERY)]
    waiting: list[int] = []
    for _ in range(3):
        bench.scheduler.in_background(lambda: waiting.append(bench.scheduler.load[0]))
    bench.scheduler.start()
    for listener in asked:
        listener.answer()
    wait_for(lambda: len(waiting) == 3)
    bench.scheduler.stop()
    assert waiting == [2 * BACKGROUND_EVERY, BACKGROUND_EVERY, 0]
