"""Continuous batching: one thread runs the model, and at every step decides anew who runs.

    step:   a waiting request gets a free slot and is prefilled
            when none waits, or after every BACKGROUND_EVERY requests, a background task is done
            then all running requests make one token together

A prefill does not stop the running ones: it pauses before every layer (models/forward.py), and when it has run for
`gap_s` since the last step, a step is made there. So between two tokens of an answer lie at most `gap_s`, one layer and
one step. Where a step takes long, the prefill runs longer, too, as it keeps `prefill_share` of the time: steps for few
requests are the most expensive ones, and the sooner prefills are done, the more requests step together.

Nor does a long prefill stop short ones: where it pauses, a request of another tenant is prefilled, if that is expected
to take a fraction (passes.py) of what is left. One at a time, one deep, and all of them together no more than the long
one's own cost: it takes at most twice as long. Once several tenants have come, the last free slot is for those who have
none.

A background task stands back for all requests before every layer (standby.py): those that wait are prefilled, those that
run take steps, and one that is being planned elsewhere has the cores for itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from blendserve.engine.fair_queue import FairQueue
from blendserve.engine.generation import Generation
from blendserve.engine.passes import Pass, Running, Task
from blendserve.engine.prefill import prefill
from blendserve.engine.queued import Failed, Finished, Observer, Piece, QueuedRequest, Started
from blendserve.engine.slots import Slots
from blendserve.engine.standby import LOOK, Standby
from blendserve.engine.steps import BatchDecoder
from blendserve.errors import BlendserveError, Busy, Stopping
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import Reader
from blendserve.models.native import Row

MAX_BACKGROUND = 1000  # tasks of one tenant; write-backs beyond that are dropped: they are an optimisation
# However many requests wait: else a server that misses chunks stays slow because it misses them.
BACKGROUND_EVERY = 8

log = logging.getLogger(__name__)


class Cancelled(Exception):
    """Raised out of a prefill whose request nobody waits for any more."""


class Scheduler:
    """Give it requests with `submit`; it calls their `emit`. Their blenders must call `pause` before each layer."""

    def __init__(
        self,
        reader: Reader,
        slots: Slots,
        queue: int,
        gap_s: float,
        prefill_share: float,
        observer: Observer,
        standby: Standby | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """standby: of background tasks. clock: gives seconds; decides when running requests decode."""
        self._reader, self._slots, self._observer = reader, slots, observer
        self._decoder = BatchDecoder(reader.adapter, slots)
        self._gap_s, self._patience = gap_s, prefill_share / (1 - prefill_share)  # the latter in steps
        self._waiting, self._queue = FairQueue[QueuedRequest](), queue
        self._background: FairQueue[Task] = FairQueue()
        self._since_background = 0  # requests prefilled
        self._standby = standby or Standby()
        self._planned: Counter[str] = Counter()  # by tenant: requests that are on their way here
        self._running: list[Running] = []
        self._passes: list[Pass] = []  # the last one runs, the one before it pauses
        self._tenants: set[str] = set()  # the first two
        self._clock = clock
        self._decoded_at, self._decode_s = clock(), 0.0  # the end of the last decoding step, its duration
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
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._draining

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything now."""
        return bool(self._running or len(self._background) or (len(self._waiting) and self._slots.free))

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
        """Whether a request is planned, waits, is prefilled or decodes: what nobody waits for stands back then."""
        return bool(self._planned or len(self._waiting) or self._slots.free < self._slots.n)

    def others_in_flight(self, tenant: str) -> bool:
        """Whether one of another tenant is."""
        with self._wake:
            having = [r.request for r in self._running] + [p.request for p in self._passes if p.request]
            return (
                any(other != tenant for other in self._planned)
                or len(self._waiting) > self._waiting.of(tenant)
                or any(other.tenant != tenant for other in having)
            )

    @contextmanager
    def planning(self, tenant: str) -> Iterator[None]:
        """While a request is made ready for `submit`."""
        with self._wake:
            self._planned[tenant] += 1
        try:
            yield
        finally:
            with self._wake:
                self._planned[tenant] -= 1
                if not self._planned[tenant]:
                    del self._planned[tenant]
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
        """Nobody wants it any more: it is dropped from the queue, or frees its slot before the next layer or step."""
        with self._wake:
            request.cancelled = True
            self._waiting.remove(request)
            request.release()
            self._wake.notify()

    def in_background(self, task: Callable[[], None], tenant: str = "") -> bool:
        """Something small for the model's thread to do by the way -> False when a tenant has too much of it already."""
        with self._wake:
            if self._background.of(tenant) >= MAX_BACKGROUND:
                return False
            self._background.put(Task(tenant, task))
            self._wake.notify()
            return True

    def drain(self) -> None:
        """Take no new requests; those that are here go on."""
        with self._wake:
            self._draining = True

    def stop(self) -> None:
        """End the thread; requests that run or wait fail. Idempotent."""
        with self._wake:
            self._draining = self._stopped = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        else:
            self._fail_all()

    # On the model's thread

    def step(self) -> None:
        """One iteration: admit a request, run a background task if one is due, decode a token of each running request.

        The thread of `start` calls this while there is work. Without `start`, the caller's thread is the model's.
        """
        if request := self._next(lambda _: True):
            self._admit(request)
        self._do_task()
        self._decode()

    def _loop(self) -> None:
        while self._wait():
            try:
                self.step()
            except Exception:  # a bug in one step must not end the server
                log.exception("a scheduling step failed")
        self._fail_all()

    def _fail_all(self) -> None:
        for running in list(self._running):
            self._drop(running, Stopping("the server has shut down before the answer was complete"))
        with self._wake:
            waiting = list(iter(self._waiting.pop, None))
        for request in waiting:
            request.release()
            self._fail(request, Stopping("the server has shut down before the question's turn came"))

    def _wait(self) -> bool:
        """Sleep until there is something to do -> False when there will not be."""
        with self._wake:
            while not (self._stopped or self.has_work):
                self._wake.wait()
            return not self._stopped

    def _next(self, wanted: Callable[[QueuedRequest], bool]) -> QueuedRequest | None:
        """The next request that may have a slot and is wanted now."""
        with self._wake:
            return self._waiting.pop(lambda r: self._may_have_slot(r) and wanted(r))

    def _may_have_slot(self, request: QueuedRequest) -> bool:
        """The last one is for tenants who have none, once there are several."""
        if self._slots.free != 1 or self._slots.n == 1 or len(self._tenants) < 2:
            return self._slots.free > 0
        having = [r.request for r in self._running] + [p.request for p in self._passes if p.request]
        return all(other.tenant != request.tenant for other in having)

    def _do_task(self) -> None:
        """The next background task, if it is its turn."""
        with self._wake:
            if len(self._waiting) and self._since_background < BACKGROUND_EVERY:
                return
            task = self._background.pop()
        if task is None:
            return
        self._since_background = 0
        self._passes.append(Pass())
        self._standby.begin()
        try:
            task.run()
        except Cancelled:
            log.info("a background task was left undone, as the server stops")
        except BlendserveError as error:
            log.warning("a background task failed: %s", error)
        finally:
            self._passes.pop()
            self._standby.worked(self.in_flight)  # storing, too

    def _admit(self, request: QueuedRequest) -> None:
        """Put a request into a slot and say its first token."""
        cache = self._slots.take()
        self._passes.append(Pass(request))
        self._since_background += 1
        request.plan.clock.seconds["queue"] = waited = request.queued.elapsed()
        self._observer.dequeued(request.plan.blend.method, waited)
        try:
            generation, logits = self._prefill(request, cache)
        except Cancelled:
            self._slots.give_back(cache)
            self._fail(request, Stopping("the server has shut down before the answer began"))
        except Exception as error:  # of this request alone
            self._slots.give_back(cache)
            self._fail(request, error)
        else:
            self._take(Running(request, cache, generation), logits)
        finally:
            self._passes.pop()
            request.release()

    def _prefill(self, request: QueuedRequest, cache: KVCache) -> tuple[Generation, Tensor]:
        plan, reader = request.plan, self._reader
        done = prefill(plan, request.blender, cache, request.prefix_kv)
        if request.missed and done.missing:
            request.missed(done.missing, done.computed)
        self._observer.prefilled(done.report, plan.clock.seconds["load"])
        request.emit(Started(done.cached, done.report, done.explanation))
        made = Generation(plan, done.report, done.explanation, reader.tokenizer, reader.end_tokens)
        return made, done.logits

    def pause(self, l: int) -> None:
        """The before-layer hook of every pass but a decoding step: long passes take turns with what others wait for."""
        self._refuse_cancelled()
        if self._passes and self._passes[-1].request is None:
            self._stand_back()
        else:
            self._let_go_on(l)
        self._refuse_cancelled()

    def _let_go_on(self, l: int) -> None:
        """Within a prefill: a step of what runs, and a request that is much shorter."""
        if self._clock() - self._decoded_at >= max(self._gap_s, self._patience * self._decode_s):
            self._decode()
        prefills = [p for p in self._passes if p.request]
        if len(prefills) == 1 and len(self._waiting):
            done = l / self._reader.adapter.n_layers
            if request := self._next(lambda request: prefills[0].lends(request, done)):
                prefills[0].lent += request.cost
                self._admit(request)

    def _stand_back(self) -> None:
        """Within a background task: all requests, for as long as its last layer is to be rested for."""
        self._standby.worked(self.in_flight)
        while self._standby.rest > 0 and self.in_flight and not self._stopped:
            if request := self._next(lambda _: True):
                self._admit(request)
            elif self._running:
                self._decode()
            else:
                with self._wake:
                    if not len(self._waiting):
                        self._wake.wait(min(self._standby.rest, LOOK))
            self._standby.rested()

    def _refuse_cancelled(self) -> None:
        """Raises Cancelled for the pass that runs."""
        request = self._passes[-1].request if self._passes else None
        if self._stopped or (request and request.cancelled):
            raise Cancelled

    def _decode(self) -> None:
        """One token for every running request."""
        for running in [r for r in self._running if r.request.cancelled]:
            self._leave(running)
        if batch := list(self._running):
            began = self._clock()
            self._decode_batch(batch)
            self._decode_s = self._clock() - began
        self._decoded_at = self._clock()

    def _decode_batch(self, batch: list[Running]) -> None:
        self._observer.step(len(batch))
        try:
            logits = self._decoder.step([Row(r.cache, *r.generation.last) for r in batch])
        except Exception as error:  # memory, a device: nobody's answer can go on
            for running in batch:
                self._drop(running, error)
            return
        for running, row in zip(batch, logits, strict=True):
            self._take(running, row)

    def _take(self, running: Running, logits: Tensor) -> None:
        """Add a token to an answer; its slot is free as soon as it has its last one."""
        first, generation, emit = running not in self._running, running.generation, running.request.emit
        try:
            if text := generation.take(logits):
                emit(Piece(text))
            if generation.answer:
                emit(Finished(generation.answer))
        except Exception as error:  # of this request alone
            self._drop(running, error)
            return
        seconds = generation.ttft if first else generation.gap
        self._observer.token(generation.report.method, seconds, first)
        if generation.answer:
            self._request_s += 0.2 * (generation.plan.clock.elapsed() - self._request_s)
            self._leave(running)
        elif first:
            self._running.append(running)

    def _leave(self, running: Running) -> None:
        """The slot is free from here on."""
        if running in self._running:
            self._running.remove(running)
        self._slots.give_back(running.cache)

    def _drop(self, running: Running, error: Exception) -> None:
        self._leave(running)
        self._fail(running.request, error)

    def _fail(self, request: QueuedRequest, error: Exception) -> None:
        """End a request, unless it was cancelled."""
        if not request.cancelled:
            request.emit(Failed(error))
