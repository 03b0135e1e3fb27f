"""Continuous batching: one thread runs the model, and `step` decides anew each time what it does next.

    unit of work                 when
    layer of a background task   between prefills, once no request waits or BACKGROUND_EVERY of them were prefilled;
                                 throttled while requests are in flight
    decoding step                after every prefill, within one `gap_s` after the last step, or when nothing else runs
    layer of a prefill           otherwise

Prefills and background tasks are generators that yield before every layer (`core.Steps`), so either is cancelled by
`close()`. Between two tokens of an answer lie at most `gap_s`, one layer and one step. Where a step takes long, the
prefill runs longer, too, as it keeps `prefill_share` of the time: steps for few requests are the most expensive ones,
and the sooner prefills are done, the more requests step together.

A long prefill is preempted by a request of another tenant that is expected to cost a fraction of the rest of it: one at
a time, and all of them together no more than the long one's own cost, so it takes at most twice as long. Once several
tenants have come, the last free slot is for those who have none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from blendserve.core import Steps
from blendserve.engine.fair_executor import BackgroundThrottle, FairQueue
from blendserve.engine.generation import Generation
from blendserve.engine.prefill import Prefill
from blendserve.engine.queued import (
    BackgroundTask,
    Failed,
    Finished,
    Observer,
    Piece,
    Prefilling,
    QueuedRequest,
    Running,
    Started,
)
from blendserve.engine.slots import Slots
from blendserve.engine.steps import BatchDecoder
from blendserve.errors import BlendserveError, Busy, Stopping
from blendserve.models.loader import Reader
from blendserve.models.native import Row

MAX_BACKGROUND = 1000  # tasks of one tenant; write-backs beyond that are dropped: they are an optimisation
# However many requests wait: else a server that misses chunks stays slow because it misses them.
BACKGROUND_EVERY = 8

log = logging.getLogger(__name__)


class Scheduler:
    """Give it requests with `submit`; it calls their `emit`."""

    def __init__(
        self,
        reader: Reader,
        slots: Slots,
        queue: int,
        gap_s: float,
        prefill_share: float,
        observer: Observer,
        throttle: BackgroundThrottle | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """throttle: of background tasks. clock: gives seconds; decides when running requests decode."""
        self._n_layers, self._slots, self._observer = reader.adapter.n_layers, slots, observer
        self._reader, self._decoder = reader, BatchDecoder(reader.adapter, slots)
        self._gap_s, self._prefill_steps = gap_s, prefill_share / (1 - prefill_share)  # per decoding step
        self._waiting, self._queue = FairQueue[QueuedRequest](), queue
        self._prefills: list[Prefilling] = []  # at most two; the last one runs
        self._running: list[Running] = []
        self._background = FairQueue[BackgroundTask]()
        self._task: BackgroundTask | None = None  # the one that has begun
        self._throttle = throttle or BackgroundThrottle()
        self._since_task = 0  # requests prefilled
        self._preparing: Counter[str] = Counter()  # by tenant: requests that are on their way here
        self._tenants: set[str] = set()  # the first two
        self._clock = clock
        self._decode_at = -float("inf")  # when running requests decode next, within prefills
        self._prefilled = False  # whether a layer of a prefill has run since the last decoding step
        self._request_s = 1.0  # recent mean duration of a request: what Retry-After is made of
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
        if self._prefills or self._running or (len(self._waiting) and self._slots.free):
            return True
        return bool(self._task or len(self._background)) and not self._rest_s

    @property
    def load(self) -> tuple[int, int]:
        """Requests that wait, and slots in use."""
        return len(self._waiting), self._slots.n - self._slots.free

    def refuse_if_full(self, tenant: str, more: int) -> None:
        """Raises Busy or Stopping when a tenant's request could not be queued behind `more` of its others.

        To be asked before any work for it.
        """
        with self._wake:
            if self._draining:
                raise Stopping("the server is shutting down: ask another one")
            if self._waiting.of(tenant) + more >= self._queue:
                raise Busy(f"{self._queue} requests are waiting already", self.retry_after(tenant))

    def retry_after(self, tenant: str) -> int:
        """Seconds until a slot is expected to be free for one more request of this tenant, from 1 to 60."""
        waves = (self._waiting.of(tenant) + 1) / self._slots.n
        return max(1, min(60, round(waves * self._request_s)))

    @property
    def in_flight(self) -> bool:
        """Whether a request is prepared, waits, is prefilled or decodes: background work is throttled then."""
        return bool(self._preparing or len(self._waiting) or self._slots.free < self._slots.n)

    def has_other_tenants(self, tenant: str) -> bool:
        """Whether a request of another tenant is in flight."""
        with self._wake:
            return (
                any(other != tenant for other in self._preparing)
                or len(self._waiting) > self._waiting.of(tenant)
                or any(other.tenant != tenant for other in self._with_slot())
            )

    @contextmanager
    def preparing(self, tenant: str) -> Iterator[None]:
        """While a request is made ready for `submit`."""
        with self._wake:
            self._preparing[tenant] += 1
        try:
            yield
        finally:
            with self._wake:
                self._preparing[tenant] -= 1
                if not self._preparing[tenant]:
                    del self._preparing[tenant]
                self._wake.notify()

    def submit(self, request: QueuedRequest) -> None:
        """Queue a request. Raises PromptTooLong when it can never fit, Busy, Stopping."""
        try:
            request.plan.require_room(self._slots.tokens)
            with self._wake:
                self.refuse_if_full(request.tenant, 0)
                if len(self._tenants) < 2:
                    self._tenants.add(request.tenant)
                self._waiting.put(request)
                self._wake.notify()
        except BlendserveError:
            request.release()
            raise

    def cancel(self, request: QueuedRequest) -> None:
        """Drop it from the queue, or free its slot before the next layer or step. No more events are emitted."""
        with self._wake:
            request.cancelled = True
            self._waiting.remove(request)
            request.release()
            self._wake.notify()

    def submit_background(self, steps: Steps[None], tenant: str = "") -> bool:
        """Queue a background task -> False when its tenant has too many already."""
        with self._wake:
            if self._background.of(tenant) >= MAX_BACKGROUND:
                return False
            self._background.put(BackgroundTask(tenant, steps))
            self._wake.notify()
            return True

    def drain(self) -> None:
        """Refuse new requests; accepted ones are answered."""
        self._draining = True

    def stop(self) -> None:
        """End the thread; accepted requests fail. Idempotent."""
        with self._wake:
            self._draining = self._stopped = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        else:
            self._fail_all()

    # On the model's thread

    def step(self) -> None:
        """One unit of work. Without `start`, the caller's thread is the model's."""
        self._drop_cancelled()
        if task := self._due_task():
            self._advance_task(task)
        elif self._running and self._prefilled and self._clock() >= self._decode_at:
            self._decode()
        elif prefill := self._current_prefill():
            self._advance(prefill)
        elif self._running:
            self._decode()

    def _loop(self) -> None:
        while self._wait():
            try:
                self.step()
            except Exception:  # a bug in one step must not end the server
                log.exception("a scheduling step failed")
        self._fail_all()

    def _wait(self) -> bool:
        """Sleep until there is something to do -> False when there will not be."""
        with self._wake:
            while not (self._stopped or self.has_work):
                self._wake.wait(self._rest_s or None)
            return not self._stopped

    def _fail_all(self) -> None:
        if self._task:
            log.info("a background task was left undone, as the server stops")
            self._task.steps.close()
            self._task = None
        for prefill in self._prefills[::-1]:
            self._end_prefill(prefill, Stopping("the server has shut down before the answer began"))
        for running in list(self._running):
            self._end(running, Stopping("the server has shut down before the answer was complete"))
        with self._wake:
            waiting = list(iter(self._waiting.pop, None))
        for request in waiting:
            request.release()
            self._fail(request, Stopping("the server has shut down before the question's turn came"))

    def _drop_cancelled(self) -> None:
        for prefill in [p for p in self._prefills if p.request.cancelled]:
            self._end_prefill(prefill)
        for running in [r for r in self._running if r.request.cancelled]:
            self._end(running)

    # Background tasks

    @property
    def _rest_s(self) -> float:
        """Seconds until a background task may go on."""
        return self._throttle.rest_s if self.in_flight else 0.0

    def _due_task(self) -> BackgroundTask | None:
        if self._prefills or self._rest_s:
            return None
        with self._wake:
            if self._task is None and (not len(self._waiting) or self._since_task >= BACKGROUND_EVERY):
                self._task = self._background.pop()
                self._since_task = 0
        return self._task

    def _advance_task(self, task: BackgroundTask) -> None:
        self._throttle.begin()
        try:
            next(task.steps)
        except StopIteration:
            self._task = None
        except Exception as error:
            self._task = None
            if not isinstance(error, BlendserveError):
                raise
            log.warning("a background task failed: %s", error)
        finally:
            self._throttle.charge(self.in_flight)

    # Prefill

    def _current_prefill(self) -> Prefilling | None:
        """The top of a stack of at most two: a much cheaper request of another tenant preempts a long prefill."""
        if len(self._prefills) < 2:
            with self._wake:
                request = self._waiting.pop(self._may_start)
            if request:
                self._start(request)
        return self._prefills[-1] if self._prefills else None

    def _may_start(self, request: QueuedRequest) -> bool:
        preempts = all(prefill.is_preempted_by(request, self._n_layers) for prefill in self._prefills)
        return preempts and self._may_have_slot(request)

    def _may_have_slot(self, request: QueuedRequest) -> bool:
        """The last one is for tenants who have none, once there are several."""
        if self._slots.free != 1 or self._slots.n == 1 or len(self._tenants) < 2:
            return self._slots.free > 0
        return all(other.tenant != request.tenant for other in self._with_slot())

    def _with_slot(self) -> list[QueuedRequest]:
        return [running.request for running in self._running] + [p.request for p in self._prefills]

    def _start(self, request: QueuedRequest) -> None:
        if self._prefills:
            self._prefills[0].preempted_cost += request.cost
        cache = self._slots.take()
        self._prefills.append(Prefilling(request, cache, request.prefill(cache)))
        self._since_task += 1
        request.plan.clock.seconds["queue"] = waited = request.queued.elapsed()
        self._observer.dequeued(request.plan.blend.method, waited)

    def _advance(self, prefill: Prefilling) -> None:
        """One layer; after the last one, the first token."""
        try:
            next(prefill.steps)
            prefill.layer += 1
        except StopIteration as end:
            self._prefills.remove(prefill)
            prefill.request.release()
            self._emit_first(prefill, end.value)
        except Exception as error:  # of this request alone
            self._end_prefill(prefill, error)
        self._prefilled = True
        if not self._prefills:
            self._decode_at = -float("inf")

    def _emit_first(self, prefill: Prefilling, done: Prefill) -> None:
        request, plan, reader = prefill.request, prefill.request.plan, self._reader
        generation = Generation(plan, done.report, done.explanation, reader.tokenizer, reader.end_tokens)
        running = Running(request, prefill.cache, generation)
        self._running.append(running)
        try:
            if request.missed and done.missing:
                request.missed(done.missing, done.computed)
            self._observer.prefilled(done.report, plan.clock.seconds["load"])
            request.emit(Started(done.cached, done.report, done.explanation))
        except Exception as error:  # of this request alone
            self._end(running, error)
        else:
            self._emit(running, done.logits, is_first=True)

    def _end_prefill(self, prefill: Prefilling, error: Exception | None = None) -> None:
        prefill.steps.close()
        self._prefills.remove(prefill)
        self._slots.give_back(prefill.cache)
        prefill.request.release()
        if error:
            self._fail(prefill.request, error)

    # Decode

    def _decode(self) -> None:
        """One token for every running request."""
        began, batch = self._clock(), list(self._running)
        self._observer.step(len(batch))
        try:
            logits = self._decoder.step([Row(r.cache, *r.generation.last) for r in batch])
        except Exception as error:  # memory, a device: nobody's answer can go on
            for running in batch:
                self._end(running, error)
        else:
            for running, row in zip(batch, logits, strict=True):
                self._emit(running, row)
        now = self._clock()
        self._decode_at = now + max(self._gap_s, self._prefill_steps * (now - began))
        self._prefilled = False

    def _emit(self, running: Running, logits: Tensor, is_first: bool = False) -> None:
        """Add a token to an answer; its slot is free as soon as it has its last one."""
        generation, request = running.generation, running.request
        try:
            if text := generation.take(logits):
                request.emit(Piece(text))
            if generation.answer:
                request.emit(Finished(generation.answer))
        except Exception as error:  # of this request alone
            self._end(running, error)
            return
        elapsed_s = generation.ttft if is_first else generation.gap
        self._observer.token(generation.report.method, elapsed_s, is_first)
        if generation.answer:
            self._request_s += 0.2 * (generation.plan.clock.elapsed() - self._request_s)
            self._end(running)

    def _end(self, running: Running, error: Exception | None = None) -> None:
        """The slot is free from here on."""
        self._running.remove(running)
        self._slots.give_back(running.cache)
        if error:
            self._fail(running.request, error)

    def _fail(self, request: QueuedRequest, error: Exception) -> None:
        if not request.cancelled:
            request.emit(Failed(error))
