"""What the model's thread does for the store beside requests: missed chunks, and documents that were added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial

from blendserve.blend.blender import Blender
from blendserve.core import TokenIds
from blendserve.engine.scheduler import Cancelled, Scheduler
from blendserve.errors import Stopping, StoreError
from blendserve.store import ChunkKey


class BackgroundTasks:
    """Makes tasks, one for each chunk, so that a request never waits for more than one."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._planned: set[ChunkKey] = set()  # write-backs that are not done yet

    def remember(self, blender: Blender, tenant: str, absent: Sequence[TokenIds]) -> None:
        """Store chunks that a request found missing or damaged; once, if several did. On the model's thread."""
        for ids in absent:
            key = blender.key(ids)  # the prefix is (), as no chunk is
            task = partial(self._remember, blender, ids, key)
            if key not in self._planned and self._scheduler.in_background(task, tenant, len(ids)):
                self._planned.add(key)

    def precompute(
        self, blender: Blender, chunks: Sequence[TokenIds], done: Callable[[int], None], tenant: str = ""
    ) -> Future[None]:
        """Compute, store and pin chunks that are not there yet; `done(n)` after each, which plans the next one."""
        future: Future[None] = Future()

        def plan(n: int) -> None:
            if n == len(chunks):
                end()
            elif not self._scheduler.in_background(partial(compute, n), tenant, len(chunks[n])):
                end(StoreError("the server has too much to do: warm the cache again later"))

        def compute(n: int) -> None:
            if future.cancelled():
                return
            try:
                blender.precompute([chunks[n]])
            except Cancelled:
                end(Stopping("the server has shut down before all was computed: warm the cache again"))
            except Exception as error:
                end(error)
            else:
                done(n + 1)
                plan(n + 1)

        def end(error: Exception | None = None) -> None:
            with suppress(InvalidStateError):  # cancelled meanwhile
                future.set_exception(error) if error else future.set_result(None)

        plan(0)
        return future

    def _remember(self, blender: Blender, ids: TokenIds, key: ChunkKey) -> None:
        try:
            blender.remember([ids])
        finally:  # not before: a request that goes before the rest of this may miss the same chunk
            self._planned.discard(key)
