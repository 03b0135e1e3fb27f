"""The scheduler on a manual clock: any history of requests, faults and background tasks keeps its promises.

The model is real. On the clock, a layer of a prefill or task takes LAYER_S, a decoding step `decode_s`, all else nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from blendserve.blend.blender import Prefilled
from blendserve.core import Steps, run
from blendserve.engine.fair_executor import ACTIVE_S, BackgroundThrottle
from blendserve.engine.generate import TokenSequence, prefill
from blendserve.engine.request import Completed, Event, Failed, Observer, PrefillDone
from blendserve.engine.scheduler import Scheduler
from blendserve.errors import PromptTooLong, RateLimited, ShuttingDown, StoreFull
from blendserve.fetch.fetcher import KVFetcher
from blendserve.models.kv_cache import CachePool
from blendserve.timing import Clock
from tests.support.blending import PREFIX, tiny_blender
from tests.support.engines import seen
from tests.support.scheduler_requests import (
    ANY,
    LAYER_S,
    QUESTION,
    REFINING,
    SHARED_BYTES,
    SLOT_TOKENS,
    TENANTS,
    Question,
    Sent,
    WatchedSequence,
    alone,
    filled_store,
    model,
)
from tests.support.waiting import ManualClock


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler without a thread; its promises are asserted at every event. Examples call `opened` and the rules."""

    requests = Bundle("requests")

    @initialize(
        slots=st.integers(1, 4),
        queue=st.sampled_from([2, 20]),
        gap_s=st.sampled_from([0.0, 2.5]),
        prefill_share=st.sampled_from([0.0, 0.5, 0.75]),
        decode_s=st.sampled_from([0.5, 2.0]),
        background_share=st.sampled_from([0.2, 1.0]),
    )
    def open(
        self,
        slots: int = 2,
        queue: int = 100,
        gap_s: float = 0.0,
        prefill_share: float = 0.0,
        decode_s: float = 1.0,
        background_share: float = 0.5,
    ) -> None:
        self.clock, self.decode_s, self.gap_s, self.share = ManualClock(), decode_s, gap_s, prefill_share
        self.slots, self.queue = CachePool(model().decoder, slots, SLOT_TOKENS), queue
        throttle = BackgroundThrottle(background_share, self.clock)
        self.fetcher = KVFetcher(filled_store())
        self.fetcher.copies.shared.cap_bytes = SHARED_BYTES
        self.arm(None)
        self.blender = tiny_blender(decoder=model().decoder, fetcher=self.fetcher)
        run(self.blender.prefixes.get("", PREFIX))
        observer = Mock(Observer)
        observer.step = self.decode
        self.scheduler = Scheduler(
            model(), self.slots, queue, gap_s, prefill_share, observer, throttle, self.clock
        )
        self.sent: list[Sent] = []
        self.cancelled: set[Sent] = set()  # since the last step, while they had a slot
        self.admitted: list[Sent] = []
        self.last_sent: dict[str, float] = {}  # by tenant: when its last request came
        self.last_turn: dict[str, int] = {}  # by tenant: the number of its last admission
        self.turn = self.tasks = self.idle_tasks = 0
        self.timeline: list[float] = []  # within a prefill: seconds of a layer, or less 0 of a decoding step
        self.since_decode = 0.0  # seconds of prefill while requests run
        self.batch, self.failing = list[Sent](), list[Sent]()  # of a step; not told yet that it failed
        self.closed, self.stopped, self.log = False, False, list[str]()

    # What happens to it

    @rule(
        target=requests,
        question=QUESTION,
        tenant=st.sampled_from(TENANTS),
        cost=st.sampled_from([1.0, 4.0, 16.0]),
        cancel_at=st.none() | st.integers(0, REFINING + 3),
    )
    def submit(
        self, question: Question = ANY, tenant: str = "a", cost: float = 8.0, cancel_at: int | None = None
    ) -> Any:
        """Submit a request, which may rightly be refused."""
        sent = Sent(tenant, question, cost, cancel_at, self.turn)
        plan = question.prepared(Clock(now=self.clock))
        options: dict[str, Any] = {"tenant": tenant, "cost": cost, "emit": partial(self.receive, sent)}
        options["prefetch"] = self.blender.prefetch(plan.prompt, plan.blend)
        sent.request = WatchedSequence(plan, model(), partial(self.prefill, sent), **options)
        sent.request.watch = partial(self.refining, sent)
        over, full = plan.tokens - SLOT_TOKENS, len(self.waiting(tenant)) == self.queue
        refusal = (
            PromptTooLong if over > 0 else ShuttingDown if self.closed else RateLimited if full else None
        )
        if refusal:
            with pytest.raises(refusal) as error:
                self.scheduler.submit(sent.request)
            assert getattr(error.value, "over", over) == over
            return multiple()
        self.scheduler.submit(sent.request)
        self.last_sent[tenant] = self.clock()
        self.sent.append(sent)
        return sent

    @rule(sent=requests)
    def cancel(self, sent: Sent) -> None:
        if sent.state in ("prefills", "runs"):
            self.cancelled.add(sent)
        sent.state = "ended"
        self.scheduler.cancel(sent.request)

    @rule(error=st.builds(RuntimeError))
    def arm(self, error: Exception | None) -> None:
        """The next forward raises the error, of a prefill or of a decoding step."""
        faulty: Any = model().decoder
        self.fault = faulty.fault = error

    @rule(layers=st.integers(0, 3), tenant=st.sampled_from(TENANTS), error=st.none() | st.builds(StoreFull))
    def in_background(self, layers: int = 1, tenant: str = "", error: Exception | None = None) -> None:
        def task() -> Steps[None]:
            self.tasks -= 1
            for _ in range(layers):
                yield
                self.log.append("layer")
                self.clock.advance(LAYER_S)
            if error:
                raise error

        assert self.scheduler.submit_background(task(), tenant)
        self.tasks += 1

    @rule(layers=st.integers(0, 3), error=st.none() | st.builds(StoreFull))
    def when_idle(self, layers: int = 1, error: Exception | None = None) -> None:
        def task() -> Steps[None]:
            for _ in range(layers):
                assert not self.scheduler.in_flight
                assert not self.tasks
                self.log.append("idle")
                self.clock.advance(LAYER_S)
                yield
            self.idle_tasks -= 1
            if error:
                raise error

        if not self.stopped:
            self.scheduler.submit_idle(task())
            self.idle_tasks += 1

    @rule(seconds=st.sampled_from([0.5, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(n=st.integers(1, 4))
    def step(self, n: int = 1) -> None:
        for _ in range(0 if self.stopped else n):
            cancelled = set(self.cancelled)
            self.scheduler.step()
            self.cancelled -= cancelled
            assert not self.failing
            self.check()

    def step_until(self, is_reached: Callable[[], bool]) -> None:
        for _ in range(200 + 50 * len(self.sent)):
            if is_reached():
                return
            self.step()
        raise AssertionError("it makes no progress")

    def run(self) -> None:
        """Step until nothing is left."""
        self.step_until(lambda: not self.scheduler.has_work)
        assert self.tasks == self.idle_tasks == 0
        assert not self.scheduler.in_flight

    @rule(stops=st.sampled_from([False, False, True]))
    def drain(self, stops: bool = False) -> None:
        """Take no more requests; requests in the scheduler go on, unless it stops."""
        self.closed = True
        self.scheduler.drain()
        if stops:
            self.stopped = True
            self.scheduler.stop()
            self.cancelled.clear()
            self.check()

    def teardown(self) -> None:
        if hasattr(self, "scheduler") and not self.stopped:
            self.run()
            self.drain(stops=True)

    # What the scheduler does

    def waiting(self, tenant: str) -> list[Sent]:
        return [s for s in self.sent if s.state == "waits" and s.tenant == tenant]

    @property
    def active(self) -> set[str]:
        """Tenants whose requests wait or run, or came within the last minute."""
        in_flight = {s.tenant for s in self.sent if s.state != "ended"}
        return in_flight | {t for t, at in self.last_sent.items() if self.clock() - at <= ACTIVE_S}

    def having(self) -> list[Sent]:
        """Requests with a slot."""
        return [s for s in self.sent if s.state in ("prefills", "runs") or s in self.cancelled]

    def prefill(self, sent: Sent, sequence: TokenSequence) -> Steps[Prefilled]:
        """A request's prefill, with the clock's seconds for each layer."""
        self.admit(sent)
        return (yield from self.layers(sent, prefill(sequence, self.blender), 0))

    def refining(self, sent: Sent, steps: Steps[Prefilled]) -> Steps[Prefilled]:
        """What follows a request's first token."""

        def watched() -> Steps[Prefilled]:
            done = yield from self.layers(sent, steps, REFINING)
            sent.state = "runs"
            return done

        assert (sent.question.refine, sent.question.method, sent.state) == (1.0, "blend", "runs")
        self.log.append("refine")
        sent.state = "prefills"
        return watched()

    def layers(self, sent: Sent, steps: Steps[Prefilled], first: int) -> Steps[Prefilled]:
        """Steps with the clock's seconds for each layer. first: the number of the first one."""
        done: list[Prefilled] = []

        def collect() -> Steps[None]:
            done.append((yield from steps))

        with closing(collect()) as collected:
            for l, _ in enumerate(collected, first):
                if sent.cancel_at == l:
                    self.cancel(sent)
                yield
                self.layer(sent)
        return done[0]

    @property
    def prefilling(self) -> list[Sent]:
        """Prefills and refinings that have begun; the last one runs."""
        return [s for s in self.admitted if s.state == "prefills"]

    def admit(self, sent: Sent) -> None:
        """A request has a slot, and its prefill begins."""
        self.log.append("prefill")
        assert sent is self.waiting(sent.tenant)[0], "first come, first served within a tenant"
        is_last = self.slots.free == 0 and self.slots.n > 1
        having = {s.tenant for s in self.having()} if is_last and self.active - {sent.tenant} else set()
        assert sent.tenant not in having - {s.tenant for s in self.cancelled}, "it is for tenants without one"
        if self.prefilling:
            (paused,) = self.prefilling
            paused.preempted_cost += sent.cost
            assert paused.tenant != sent.tenant
            assert sent.cost <= paused.cost / 4
            assert paused.preempted_cost <= paused.cost, "a long prefill takes at most twice as long"
        else:
            self.timeline = []
            before = self.last_turn.get(sent.tenant, -1)
            for tenant in {s.tenant for s in self.sent} - having:
                passed_over = [s for s in self.waiting(tenant)[:1] if s.turn <= before]
                assert not passed_over or self.last_turn.get(tenant, -1) >= before, "tenants take turns"
        self.last_turn[sent.tenant] = self.turn
        self.turn += 1
        sent.state = "prefills"
        self.admitted.append(sent)

    def layer(self, sent: Sent) -> None:
        """A layer of a prefill begins."""
        assert (self.prefilling[-1], sent.state) == (sent, "prefills")
        at_most = max(self.gap_s, self.share / (1 - self.share) * self.decode_s) + LAYER_S
        assert self.since_decode <= at_most, "running requests decode within a prefill"
        running = any(s.state == "runs" for s in self.sent)
        self.since_decode = self.since_decode + LAYER_S if running else 0.0
        self.clock.advance(LAYER_S)
        self.timeline.append(LAYER_S)

    def decode(self, batch: int) -> None:
        """A decoding step begins."""
        self.log.append("decode")
        self.batch = [s for s in self.sent if s.state == "runs"]
        assert batch == len(self.batch) > 0
        self.since_decode = 0.0
        self.clock.advance(self.decode_s)
        if self.prefilling:
            self.timeline.append(-self.decode_s)
            last = self.timeline[-50:]
            prefilling = sum(s for s in last if s > 0)
            decoding = prefilling - sum(last) - self.decode_s  # the first step may follow another prefill
            assert prefilling >= self.share * (prefilling + decoding) - 1e-6, "prefill has its share"

    def receive(self, sent: Sent, event: Event) -> None:
        assert sent.state != "ended"
        if isinstance(event, PrefillDone):
            sent.state = "runs"
        elif isinstance(event, Completed):
            sent.state = "ended"
            assert seen(event.answer) == seen(alone(sent.question))
        elif isinstance(event, Failed):  # a prefill fails alone, a decoding step for all of its requests
            assert isinstance(event.error, ShuttingDown) if self.stopped else event.error is self.fault
            if sent.state == "runs" and not self.stopped:
                self.failing = [s for s in self.batch if s.state == "runs" and s is not sent]
            sent.state = "ended"

    @invariant()
    def check(self) -> None:
        """What holds between any two steps."""
        waiting, having = [s for s in self.sent if s.state == "waits"], self.having()
        assert self.scheduler.load == (len(waiting), len(having))
        assert self.slots.n - self.slots.free == len(having)
        in_flight = {s.tenant for s in (*waiting, *having)}
        assert self.scheduler.in_flight == bool(in_flight)
        for tenant in TENANTS:
            assert self.scheduler.has_other_tenants(tenant) == bool(in_flight - {tenant})
        assert self.fetcher.copies.shared.n_bytes <= (SHARED_BYTES if in_flight else 0)


def opened(**options: Any) -> SchedulerMachine:
    machine = SchedulerMachine()
    machine.open(**options)
    return machine
