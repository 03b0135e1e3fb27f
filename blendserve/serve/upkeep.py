"""What the model's thread does for the store beside requests: missed chunks, and documents that were added."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial

from blendserve.blend.blender import Blender
from blendserve.core import TokenIds
from blendserve.errors import Stopping, StoreError
from blendserve.serve.scheduler import Cancelled, Scheduler
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
            key = blender.key(
                ids
            )  # of the prefix, (): like a chunk without tokens, of which there are no others
            if key not in self._planned and self._scheduler.chore(partial(self._remember, blender, ids, key)):
                self._planned.add(key)

    def precompute(
        self, blender: Blender, chunks: Sequence[TokenIds], done: Callable[[int], None]
    ) -> Future[None]:
        """Compute, store and pin chunks that are not there yet; `done(n)` after each."""
        future: Future[None] = Future()
        left = list(chunks)

        def end(error: Exception | None = None) -> None:
            with suppress(InvalidStateError):  # cancelled meanwhile
                future.set_exception(error) if error else future.set_result(None)

        def plan() -> None:
            if not self._scheduler.chore(next_chunk):
                end(StoreError("the server has too much to do: warm the cache again later"))

        def next_chunk() -> None:
            if future.cancelled():
                return
            try:
                if left:
                    blender.precompute([left.pop(0)])
                    done(len(chunks) - len(left))
            except Cancelled:
                end(Stopping("the server has shut down before all was computed: warm the cache again"))
            except Exception as error:
                end(error)
            else:
                plan() if left else end()

        plan()
        return future

    def _remember(self, blender: Blender, ids: TokenIds, key: ChunkKey) -> None:
        self._planned.discard(key)
        try:
            blender.remember([ids])
        except StoreError as error:
            log.warning("a missing chunk was not stored: %s", error)
