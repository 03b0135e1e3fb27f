"""Continuous batching: one thread runs the model, and `step` decides anew each time what it does next.

    unit of work                 when
    layer of a background task   between prefills, once no request waits or BACKGROUND_EVERY of them were prefilled;
                                 throttled while requests are in flight
    layer of an idle task        while no request is in flight and no background task is left
    decoding step                after every prefill, within one `gap_s` after the last step, or when nothing else runs
    layer of a prefill           otherwise; of refining (blend/refine.py), which follows a prefill, likewise

Prefills and background tasks are generators that yield before every layer (`core.Steps`); `close()` cancels them.
Between two tokens of an answer lie at most `gap_s`, one layer and one step. Where a step takes long, the prefill runs
longer, as it keeps `prefill_share` of the time: the sooner prefills are done, the more requests share a step.

A long prefill is preempted by a request of another tenant that is expected to cost a fraction of its rest: one at a
time, and all together no more than its own cost, so it takes at most twice as long. While several tenants are active, the
last free slot is for a tenant without one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from blendserve.blend.blender import Prefilled
from blendserve.core import Steps
from blendserve.engine.fair_executor import BackgroundThrottle, FairQueue, RecentTenants, run_step
from blendserve.engine.generate import TokenSequence
from blendserve.engine.request import Completed, Failed, Observer, PrefillDone, require_room
from blendserve.errors import RateLimited, ShuttingDown
from blendserve.models.kv_cache import CachePool
from blendserve.models.loader import LoadedModel
from blendserve.models.runner import DecodeRunner

MAX_BACKGROUND = 1000  # tasks of one tenant; write-backs beyond that are dropped: they are an optimisation
# However many requests wait: else a server that misses chunks stays slow because it misses them.
BACKGROUND_EVERY = 8
PREEMPT_FACTOR = 4  # times: how much cheaper a request must be than the rest of the prefill that it preempts
DURATION_WEIGHT = 0.2  # of the last request in the running mean
NOW = -float("inf")

log = logging.getLogger(__name__)


class Scheduler:
    """Give it requests with `submit`; it calls their `emit`."""

    def __init__(
        self,
        model: LoadedModel,
        pool: CachePool,
        queue: int,
        gap_s: float,
        prefill_share: float,
        observer: Observer,
        throttle: BackgroundThrottle | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """throttle: of background tasks. clock: gives seconds; decides when running requests decode."""
        self._n_layers = model.decoder.n_layers
        self._pool = pool
        self._observer = observer
        self._runner = DecodeRunner(model.decoder, pool.keys, pool.values, caches=pool.caches)
        self._gap_s = gap_s
        self._prefill_steps = prefill_share / (1 - prefill_share)  # per decoding step
        self._waiting = FairQueue[TokenSequence]()
        self._queue = queue
        self._prefills: list[TokenSequence] = []  # at most two; the last one runs
        self._running: list[TokenSequence] = []
        self._background = FairQueue[Steps[None]]()
        self._task: Steps[None] | None = None  # the one that has begun
        self._idle = deque[Steps[None]]()  # the first one may have begun
        self._throttle = throttle or BackgroundThrottle()
        self._since_task = 0  # requests prefilled
        self._preparing: Counter[str] = Counter()  # by tenant: requests that are being prepared
        self._recent = RecentTenants(clock)
        self._clock = clock
        self._decode_at = NOW  # when running requests decode next, within prefills
        self._prefilled = False  # whether a layer of a prefill has run since the last decoding step
        self._request_s = 1.0  # running mean of a request's duration, for Retry-After
        self._wake = threading.Condition()
        self._draining = self._stopped = False
        self._thread = threading.Thread(target=self._loop, name="model", daemon=True)

    # From any thread

    def start(self) -> None:
        """Start the model's thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are accepted."""
        return self._thread.is_alive() and not self._draining

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything now."""
        if self._prefills or self._running or (len(self._waiting) and self._pool.free):
            return True
        has_task = bool(self._task or len(self._background)) and not self._rest_s
        return has_task or (bool(self._idle) and not self.in_flight)

    @property
    def load(self) -> tuple[int, int]:
        """Requests that wait, and slots in use."""
        return len(self._waiting), self._pool.n - self._pool.free

    @property
    def in_flight(self) -> bool:
        """Whether a request is prepared, waits, is prefilled or decodes: background work is throttled then."""
        return bool(self._preparing or len(self._waiting) or self._pool.free < self._pool.n)

    def has_other_tenants(self, tenant: str) -> bool:
        """Whether a request of another tenant is in flight."""
        with self._wake:
            others = {*self._preparing, *(other.tenant for other in self._with_slot())} - {tenant}
            return bool(others) or len(self._waiting) > self._waiting.of(tenant)

    def retry_after(self, tenant: str) -> int:
        """Seconds until a slot is expected to be free for one more request of this tenant, from 1 to 60."""
        return max(1, min(60, round((self._waiting.of(tenant) + 1) / self._pool.n * self._request_s)))

    def refuse_if_full(self, tenant: str, more: int) -> None:
        """Raises RateLimited or ShuttingDown if a tenant's request could not be queued behind `more` of its others."""
        with self._wake:
            if self._draining:
                raise ShuttingDown("the server is shutting down: ask another one")
            if self._waiting.of(tenant) + more >= self._queue:
                raise RateLimited(f"{self._queue} requests are waiting already", self.retry_after(tenant))

    @contextmanager
    def preparing(self, tenant: str) -> Iterator[None]:
        """Count a request as being prepared for `submit` while the block runs."""
        with self._wake:
            self._preparing[tenant] += 1
        try:
            yield
        finally:
            with self._wake:
                self._preparing -= Counter([tenant])  # without the tenants that have none left
                self._wake.notify_all()

    def submit(self, sequence: TokenSequence) -> None:
        """Queue a sequence. Raises PromptTooLong when it can never fit, RateLimited, ShuttingDown."""
        request = sequence.request
        require_room(len(request.prompt), self._pool.n_tokens, request.decode.answer_tokens)
        with self._wake:
            self.refuse_if_full(sequence.tenant, 0)
            sequence.hold()  # from here on, every end of a request releases it
            sequence.queued_at = self._clock()
            self._recent.add(sequence.tenant)
            self._waiting.put(sequence.tenant, sequence)
            self._wake.notify_all()

    def cancel(self, sequence: TokenSequence) -> None:
        """Drop it from the queue, or free its slot before the next layer or step. No more events are emitted."""
        with self._wake:
            sequence.is_cancelled = True
            self._waiting.remove(sequence.tenant, sequence)
            sequence.release()
            self._wake.notify_all()

    def submit_background(self, steps: Steps[None], tenant: str = "") -> bool:
        """Queue work for the store that no request waits for -> False when its tenant has too much already."""
        with self._wake:
            if self._background.of(tenant) >= MAX_BACKGROUND:
                return False
            self._background.put(tenant, steps)
            self._wake.notify_all()
            return True

    def submit_idle(self, steps: Steps[None]) -> None:
        """Queue work that runs while nothing else does, and is dropped when the scheduler stops."""
        with self._wake:
            self._idle.append(steps)
            self._wake.notify_all()

    def drain(self) -> None:
        """Refuse new requests; accepted ones are answered."""
        self._draining = True

    def stop(self, finish_s: float = 0.0) -> None:
        """End the thread; accepted requests fail. Idempotent.

        finish_s: limit of waiting for requests and background tasks, such as the write-backs of answered requests.
        """
        with self._wake:
            self._draining = True
            if self._thread.is_alive():
                self._wake.wait_for(lambda: not self._accepted_work, finish_s)
            self._stopped = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        else:
            self._fail_all()

    # On the model's thread

    def step(self) -> None:
        """One unit of work. Without `start`, the caller's thread is the model's."""
        for sequence in [s for s in self._with_slot() if s.is_cancelled]:
            self._end(sequence)
        if task := self._due_task():
            self._advance_task(task)
        elif self._running and self._prefilled and self._clock() >= self._decode_at:
            self._decode()
        elif prefill := self._current_prefill():
            self._advance(prefill)
        elif self._running:
            self._decode()
        elif self._idle and not self.in_flight and run_step(self._idle[0]):
            self._idle.popleft()

    def _loop(self) -> None:
        while self._wait():
            try:
                self.step()
            except Exception:  # a bug in one step must not end the server
                log.exception("a scheduling step failed")
        self._fail_all()

    @property
    def _accepted_work(self) -> bool:
        return any((self._prefills, self._running, len(self._waiting), self._task, len(self._background)))

    def _wait(self) -> bool:
        """Sleep until there is something to do -> False when there will not be."""
        with self._wake:
            if self._draining and not self._accepted_work:
                self._wake.notify_all()  # `stop` waits for this
            while not (self._stopped or self.has_work):
                self._wake.wait(self._rest_s or None)
            return not self._stopped

    def _fail_all(self) -> None:
        if self._task:
            log.info("a background task was cancelled by the shutdown")
            self._task.close()
            self._task = None
        while self._idle:
            self._idle.popleft().close()
        with self._wake:
            waiting = list(iter(self._waiting.pop, None))
        for sequence in [*self._prefills[::-1], *self._running, *waiting]:
            self._end(sequence, ShuttingDown("the server has shut down before the answer was complete"))

    # Background tasks

    @property
    def _rest_s(self) -> float:
        """Seconds until a background task may go on."""
        return self._throttle.rest_s if self.in_flight else 0.0

    def _due_task(self) -> Steps[None] | None:
        if self._prefills or self._rest_s:
            return None
        with self._wake:
            if self._task is None and (not len(self._waiting) or self._since_task >= BACKGROUND_EVERY):
                self._task = self._background.pop()
                self._since_task = 0
        return self._task

    def _advance_task(self, task: Steps[None]) -> None:
        with self._throttle.charged(lambda: self.in_flight):
            self._task = None if run_step(task) else task

    # Prefill

    def _current_prefill(self) -> TokenSequence | None:
        """The top of a stack of at most two: a much cheaper request of another tenant preempts a long prefill."""
        if len(self._prefills) < 2:
            with self._wake:
                sequence = self._waiting.pop(self._may_start)
            if sequence:
                self._start(sequence)
        return self._prefills[-1] if self._prefills else None

    def _may_start(self, sequence: TokenSequence) -> bool:
        return self._may_have_slot(sequence) and (not self._prefills or self._preempts(sequence))

    def _may_have_slot(self, sequence: TokenSequence) -> bool:
        """The last one is for tenants who have none, while several are active."""
        has_others = self.has_other_tenants(sequence.tenant) or self._recent.has_others(sequence.tenant)
        if self._pool.free != 1 or self._pool.n == 1 or not has_others:
            return self._pool.free > 0
        return all(other.tenant != sequence.tenant for other in self._with_slot())

    def _preempts(self, sequence: TokenSequence) -> bool:
        """Whether it may go before the rest of the pass that runs."""
        long = self._prefills[0]
        cost = sequence.cost
        rest = long.cost * (1 - long.layer % self._n_layers / self._n_layers)
        is_cheap = PREEMPT_FACTOR * cost <= rest and long.preempted_cost + cost <= long.cost
        return is_cheap and long.tenant != sequence.tenant

    def _with_slot(self) -> list[TokenSequence]:
        return self._running + self._prefills

    def _start(self, sequence: TokenSequence) -> None:
        if self._prefills:
            self._prefills[0].preempted_cost += sequence.cost
        sequence.cache = self._pool.acquire()
        self._prefills.append(sequence)
        self._since_task += 1
        sequence.request.clock.seconds["queue"] = waited_s = self._clock() - sequence.queued_at
        self._observer.dequeued(sequence.request.blend.method, waited_s)

    def _advance(self, sequence: TokenSequence) -> None:
        """One layer of a prefill, or of refining; after the prefill, the first token."""
        try:
            sequence.advance()
        except StopIteration as end:
            if sequence.prefilled is None:
                with self._wake:
                    sequence.release()
                self._emit(sequence, end.value)
            if sequence.must_refine:
                sequence.steps = sequence.refine()
            elif sequence in self._prefills:  # it has not ended
                self._prefills.remove(sequence)
                self._running.append(sequence)
        except Exception as error:  # of this request alone
            self._end(sequence, error)
        self._prefilled = True
        if not self._prefills:
            self._decode_at = NOW

    # Decode

    def _decode(self) -> None:
        """A token for every running request, or more where a draft was right."""
        began = self._clock()
        batch = list(self._running)
        self._observer.step(len(batch))
        try:
            room = self._runner.draft_room(len(batch))
            logits = self._runner.decode([(self._slot(s), *s.next_tokens(room)) for s in batch])
        except Exception as error:  # memory, a device: no answer can go on
            for sequence in batch:
                self._end(sequence, error)
        else:
            for sequence, rows in zip(batch, logits, strict=True):
                self._emit(sequence, rows)
        now = self._clock()
        self._decode_at = now + max(self._gap_s, self._prefill_steps * (now - began))
        self._prefilled = False

    def _slot(self, sequence: TokenSequence) -> int:
        assert sequence.cache
        return self._pool.caches.index(sequence.cache)

    def _emit(self, sequence: TokenSequence, done: Prefilled | Tensor) -> None:
        """Emit the tokens that follow a prefill, or the logits [n, V] of a step."""
        is_first = isinstance(done, Prefilled)
        try:
            if isinstance(done, Prefilled):
                self._observer.prefilled(done.report, sequence.request.clock.seconds)
                sequence.emit(PrefillDone(done.n_cached, done.n_blended, done.report, done.logprobs))
            for delta in sequence.start(done) if isinstance(done, Prefilled) else sequence.append(done):
                sequence.emit(delta)
            if sequence.answer:
                sequence.emit(Completed(sequence.answer))
        except Exception as error:  # of this request alone
            self._end(sequence, error)
            return
        assert sequence.prefilled
        elapsed_s = sequence.ttft if is_first else sequence.gap_s
        for _ in range(sequence.n_new):
            self._observer.token(sequence.prefilled.report.method, elapsed_s, is_first)
        if sequence.answer:
            self._request_s += DURATION_WEIGHT * (sequence.request.clock.elapsed() - self._request_s)
            self._end(sequence)

    def _end(self, sequence: TokenSequence, error: Exception | None = None) -> None:
        """Free its slot and the KV that is kept for it, and tell its caller of the error."""
        try:
            sequence.steps.close()
        except Exception:  # the rest is freed all the same
            log.exception("a prefill could not be cancelled cleanly")
        for sequences in (self._prefills, self._running):
            if sequence in sequences:
                sequences.remove(sequence)
        if sequence.cache:
            self._pool.release(sequence.cache)
        with self._wake:  # its caller may cancel it now
            sequence.release()
        if error and not sequence.is_cancelled:
            sequence.emit(Failed(error))
