"""Continuous batching: one thread runs the model, and at every step decides anew who runs.

    turn:   a waiting request gets a free slot and is prefilled
            when none waits, or after every CHORE_EVERY requests, a chore is done
            then all running requests make one token together

A prefill does not stop the running ones: it pauses before every layer (turns.py), and when it has run for `gap_s` since
the last step, a step is made there. So between two tokens of an answer lie at most `gap_s`, one layer and one step.
Where a step takes long, the prefill runs longer, too, as it keeps `prefill_share` of the time: steps for few requests
are the most expensive ones, and the sooner prefills are done, the more requests step together.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Set

from torch import Tensor

from blendserve.blend.cache import KVCache
from blendserve.engine.fair_queue import Waiting
from blendserve.engine.queued import Failed, Started, Work
from blendserve.engine.shared_loads import SharedLoads
from blendserve.engine.slots import Slots
from blendserve.engine.steps import Together
from blendserve.engine.turns import PausingAdapter
from blendserve.errors import BlendserveError, Busy, InputError, Stopping
from blendserve.models.loader import Reader
from blendserve.serve.metrics import Metrics
from blendserve.serve.writing import Writing
from blendserve.store import ChunkKey
from blendserve.timing import Clock

MAX_CHORES = 1000  # write-backs beyond that are dropped: they are an optimisation
CHORE_EVERY = (
    8  # requests, however many wait: else a server that misses chunks stays slow because it misses them
)

Chore = Callable[[], None]

log = logging.getLogger(__name__)


class Cancelled(Exception):
    """Raised out of a prefill whose request nobody waits for any more."""


class Scheduler:
    """Give it work with `submit`; it calls `work.emit`. Its blenders must use `adapter`."""

    def __init__(
        self,
        reader: Reader,
        slots: Slots,
        queue: int,
        gap_s: float,
        prefill_share: float,
        metrics: Metrics,
        shared: SharedLoads | None = None,
    ) -> None:
        self.adapter = PausingAdapter(reader.adapter, self._pause)
        self._reader, self._slots, self._metrics = reader, slots, metrics
        self._together = Together(reader.adapter, slots)
        self._gap_s, self._patience = gap_s, prefill_share / (1 - prefill_share)  # the latter in steps
        self._shared = shared
        self._waiting, self._queue = Waiting(), queue
        self._chores: deque[Chore] = deque()
        self._since_chore = 0  # requests prefilled
        self._running: list[Writing] = []
        self._prefilling: Work | None = None
        self._since_step, self._step_s = Clock(), 0.0  # since the last one's end; how long it took
        self._request_s = 1.0  # of a request, lately: what Retry-After is made of
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
    def load(self) -> tuple[int, int]:
        """Requests that wait, and slots in use."""
        return len(self._waiting), self._slots.n - self._slots.free

    def refuse_if_full(self, more: int) -> None:
        """Raises Busy or Stopping when a request could not be queued behind `more` others: before any work for it."""
        with self._wake:
            self._refuse_if_full(more)

    def submit(self, work: Work) -> None:
        """Queue a request. Raises InputError when it can never fit, Busy, Stopping."""
        if work.tokens > self._slots.tokens:
            raise InputError(
                f"the request needs {work.tokens} tokens of prompt and answer, and no slot has more than "
                f"{self._slots.tokens}: use fewer passages (top_k), shorter ones, or fewer new tokens"
            )
        with self._wake:
            self._refuse_if_full(0)
            self._waiting.put(work)
            self._wake.notify()

    def cancel(self, work: Work) -> None:
        """Nobody wants it any more: it is dropped from the queue, or frees its slot before the next layer or step."""
        with self._wake:
            work.cancelled = True
            self._waiting.remove(work)
            self._wake.notify()

    def chore(self, chore: Chore) -> bool:
        """Something small for the model's thread to do by the way -> False when it has too much to do already."""
        with self._wake:
            if len(self._chores) >= MAX_CHORES:
                return False
            self._chores.append(chore)
            self._wake.notify()
            return True

    def drain(self) -> None:
        """Take no new requests; those that are here go on."""
        with self._wake:
            self._draining = True

    def stop(self) -> None:
        """End the thread; what still runs fails. Idempotent."""
        with self._wake:
            self._draining = self._stopped = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _refuse_if_full(self, more: int) -> None:
        if self._draining:
            raise Stopping("the server is shutting down: ask another one")
        if len(self._waiting) + more >= self._queue:
            raise Busy(f"{self._queue} requests are waiting already", self._retry_after())

    def _retry_after(self) -> int:
        waves = (len(self._waiting) + 1) / self._slots.n
        return max(1, min(60, round(waves * self._request_s)))

    # On the model's thread

    def _loop(self) -> None:
        while self._wait():
            try:
                self._turn()
            except Exception:  # a bug in one turn must not end the server
                log.exception("a scheduling turn failed")
        for writing in list(self._running):
            self._drop(writing, Stopping("the server has shut down before the answer was complete"))
        for work in self._waiting.all():
            work.emit(Failed(Stopping("the server has shut down before the question's turn came")))

    def _wait(self) -> bool:
        """Sleep until there is something to do -> False when there will not be."""
        with self._wake:
            while not (self._stopped or self._running or self._chores or self._startable()):
                self._wake.wait()
            return not self._stopped

    def _startable(self) -> bool:
        return bool(len(self._waiting) and self._slots.free)

    def _turn(self) -> None:
        with self._wake:
            work = self._waiting.pop() if self._slots.free else None
            later = {key for other in self._waiting.all() for key in other.keys} if work else set()
        if work:
            self._expect(work.keys, later)
            self._prefill(work)
            self._expect(frozenset(), later)
            self._since_chore += 1
        if chore := self._next_chore():
            self._do(chore)
        self._step()

    def _expect(self, now: Set[ChunkKey], later: Set[ChunkKey]) -> None:
        if self._shared:
            self._shared.expect(now, later)

    def _next_chore(self) -> Chore | None:
        with self._wake:
            if not self._chores or (len(self._waiting) and self._since_chore < CHORE_EVERY):
                return None
            self._since_chore = 0
            return self._chores.popleft()

    def _do(self, chore: Chore) -> None:
        try:
            chore()
        except Cancelled:
            log.info("a chore was left undone, as the server stops")
        except BlendserveError as error:
            log.warning("a chore failed: %s", error)

    def _prefill(self, work: Work) -> None:
        """Put a request into a slot and say its first token."""
        cache = self._slots.take()
        self._prefilling = work
        self._metrics.dequeued(work)
        try:
            writing, logits = self._blend(work, cache)
        except Cancelled:
            self._slots.give_back(cache)
            if not work.cancelled:
                work.emit(Failed(Stopping("the server has shut down before the answer began")))
        except Exception as error:  # of this request alone
            self._slots.give_back(cache)
            work.emit(Failed(error))
        else:
            self._take(writing, logits)
        finally:
            self._prefilling = None

    def _blend(self, work: Work, cache: KVCache) -> tuple[Writing, Tensor]:
        with work.clock.stage("prefill"):
            front = work.front() if work.front else None
            kv = front.kv if front else None
            done = work.blender.run(
                work.prompt, work.blend, work.decode.max_new_tokens, work.clock, cache, kv
            )
        report = done.report
        cached = report.tokens_exact + report.tokens_reused
        if front and report.method != "full":
            cached = max(0, cached - len(work.prompt.prefix) + front.reused)  # 0: the store could not be read
        if work.missed and done.absent:
            work.missed(done.absent)
        self._metrics.prefilled(report, work.clock)
        work.emit(Started(report, cached))
        return Writing(
            work, cache, report, self._reader.tokenizer, self._reader.end_tokens
        ), done.prefilled.logits

    def _pause(self) -> None:
        """Called before every layer of whatever is not a decoding step."""
        if self._stopped or (self._prefilling and self._prefilling.cancelled):
            raise Cancelled
        if self._since_step.elapsed() >= max(self._gap_s, self._patience * self._step_s):
            self._step()

    def _step(self) -> None:
        """One token for every running request."""
        for writing in [w for w in self._running if w.work.cancelled]:
            self._leave(writing)
        if batch := list(self._running):
            clock = Clock()
            self._step_of(batch)
            self._step_s = clock.elapsed()
        self._since_step = Clock()

    def _step_of(self, batch: list[Writing]) -> None:
        self._metrics.step(len(batch))
        try:
            logits = self._together.step([writing.row for writing in batch])
        except Exception as error:  # memory, a device: nobody's answer can go on
            for writing in batch:
                self._drop(writing, error)
            return
        for writing, row in zip(batch, logits, strict=True):
            self._take(writing, row)

    def _take(self, writing: Writing, logits: Tensor) -> None:
        """Add a token to an answer; its slot is free as soon as it has its last one."""
        first = writing not in self._running
        try:
            goes_on = writing.take(logits)
        except Exception as error:  # of this request alone
            self._drop(writing, error)
            return
        self._metrics.token(writing, first)
        if goes_on and first:
            self._running.append(writing)
        elif not goes_on:
            self._request_s += 0.2 * (writing.work.clock.elapsed() - self._request_s)
            self._leave(writing)

    def _leave(self, writing: Writing) -> None:
        """The slot is free from here on."""
        if writing in self._running:
            self._running.remove(writing)
        self._slots.give_back(writing.cache)

    def _drop(self, writing: Writing, error: Exception) -> None:
        self._leave(writing)
        writing.work.emit(Failed(error))
