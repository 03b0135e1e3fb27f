"""What the model's thread does for the store beside requests: missed chunks, and documents that were added."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial

from blendserve.blend.blender import Blender
from blendserve.core import TokenIds
from blendserve.engine.scheduler import Cancelled, Scheduler
from blendserve.errors import Stopping, StoreError
from blendserve.store import ChunkKey

log = logging.getLogger(__name__)


class Upkeep:
    """Makes chores, one for each chunk, so that a request never waits for more than one."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._planned: set[ChunkKey] = set()  # write-backs that are not done yet

    def remember(self, blender: Blender, absent: Sequence[TokenIds]) -> None:
        """Store chunks that a request found missing or damaged; once, if several did. On the model's thread."""
        for ids in absent:
            key = blender.key(ids)  # the prefix is (), as no chunk is
            if key not in self._planned and self._scheduler.chore(partial(self._remember, blender, ids, key)):
                self._planned.add(key)

    def precompute(
        self, blender: Blender, chunks: Sequence[TokenIds], done: Callable[[int], None]
    ) -> Future[None]:
        """Compute, store and pin chunks that are not there yet; `done(n)` after each."""
        job = _Precompute(self._scheduler, blender, chunks, done)
        job.plan()
        return job.future

    def _remember(self, blender: Blender, ids: TokenIds, key: ChunkKey) -> None:
        self._planned.discard(key)
        try:
            blender.remember([ids])
        except StoreError as error:
            log.warning("a missing chunk was not stored: %s", error)


class _Precompute:
    """Chunks on their way into the store: each is a chore, which plans the next one."""

    def __init__(
        self, scheduler: Scheduler, blender: Blender, chunks: Sequence[TokenIds], done: Callable[[int], None]
    ) -> None:
        self._scheduler, self._blender, self._chunks, self._done = scheduler, blender, chunks, done
        self._next = 0
        self.future: Future[None] = Future()

    def plan(self) -> None:
        """Queue the next chunk, or end."""
        if self._next == len(self._chunks):
            self._end()
        elif not self._scheduler.chore(self._compute):
            self._end(StoreError("the server has too much to do: warm the cache again later"))

    def _compute(self) -> None:
        if self.future.cancelled():
            return
        try:
            self._blender.precompute([self._chunks[self._next]])
        except Cancelled:
            self._end(Stopping("the server has shut down before all was computed: warm the cache again"))
        except Exception as error:
            self._end(error)
        else:
            self._next += 1
            self._done(self._next)
            self.plan()

    def _end(self, error: Exception | None = None) -> None:
        with suppress(InvalidStateError):  # cancelled meanwhile
            self.future.set_exception(error) if error else self.future.set_result(None)
