"""What the model's thread does for the store beside requests: missed chunks, and documents that were added."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Literal

from blendserve.blend.blender import NOTHING, Blender
from blendserve.core import ChunkKV, Steps, TokenIds
from blendserve.engine.scheduler import Scheduler
from blendserve.errors import Stopping, StoreError
from blendserve.store import ChunkKey


class BackgroundTasks:
    """Makes tasks, one for each chunk, so that a request never waits for more than one."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._planned: set[ChunkKey] = set()  # write-backs that are not done yet

    def write_back(
        self,
        blender: Blender,
        tenant: str,
        absent: Sequence[TokenIds],
        computed: Mapping[TokenIds, ChunkKV] = NOTHING,
    ) -> None:
        """Store chunks that a request found missing or damaged; once, if several did. On the model's thread.

        computed: the KV of those that need not be computed again.
        """
        for ids in absent:
            key = blender.key(ids)  # the prefix is (), as no chunk is
            have = {ids: computed[ids]} if ids in computed else NOTHING
            steps = self._write_back(blender, ids, key, have)
            if key not in self._planned and self._scheduler.submit_background(steps, tenant):
                self._planned.add(key)

    def precompute(
        self, blender: Blender, chunks: Sequence[TokenIds], done: Callable[[int], None], tenant: str = ""
    ) -> Future[None]:
        """Compute, store and pin chunks that are not there yet; `done(n)` after each, which plans the next one.

        What another process on the store is computing comes last, and is computed here if it is not there by then: the
        model's thread waits for nobody.
        """
        future: Future[None] = Future()
        todo: deque[tuple[TokenIds, Literal["leave", "ignore"]]] = deque((ids, "leave") for ids in chunks)

        def plan() -> None:
            if not todo:
                end()
            elif not self._scheduler.submit_background(compute(), tenant):
                end(StoreError("the server has too much to do: warm the cache again later"))

        def compute() -> Steps[None]:
            if future.cancelled():
                return
            ids, others = todo.popleft()
            try:
                left = yield from blender.precompute_one(ids, others)
            except GeneratorExit:
                end(Stopping("the server has shut down before all was computed: warm the cache again"))
                raise
            except Exception as error:
                end(error)
            else:
                if left:
                    todo.append((ids, "ignore"))
                done(len(chunks) - len(todo))
                plan()

        def end(error: Exception | None = None) -> None:
            with suppress(InvalidStateError):  # cancelled meanwhile
                future.set_exception(error) if error else future.set_result(None)

        plan()
        return future

    def _write_back(
        self, blender: Blender, ids: TokenIds, key: ChunkKey, computed: Mapping[TokenIds, ChunkKV]
    ) -> Steps[None]:
        try:
            yield from blender.write_back([ids], computed)
        finally:  # not before: a request that goes before the rest of this may miss the same chunk
            self._planned.discard(key)
