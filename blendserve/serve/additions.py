"""Documents of a job on their way into an index: saved in batches, and whatever is embedded when the job ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from blendserve.core import Passage
from blendserve.engine.documents import Documents
from blendserve.retrieve.contents import Change

T = TypeVar("T")


class Additions:
    """The documents of one job. Used by the event loop."""

    def __init__(self, documents: Documents) -> None:
        self.passages = list[Passage]()  # that the index did not have before
        self.n_saved = 0  # documents
        self._documents, self._pending = documents, list[Change]()

    async def add(self, change: Change) -> None:
        """Add an embedded document; a batch of them is saved. Raises as `save`."""
        self._pending.append(change)
        if self._documents.index.fills_batch(self._pending):
            await self.save()

    async def save(self) -> None:
        """Save the documents that wait for it. Raises VectorIndexError, StoreError.

        On a thread of its own: writing a large index takes a second, in which questions are answered.
        """
        changes, self._pending = self._pending, []
        if changes:
            await uncancelled(asyncio.to_thread(self._commit, changes))

    def _commit(self, changes: list[Change]) -> None:
        self.passages += self._documents.commit(*changes).passages
        self.n_saved += len(changes)


async def uncancelled(work: Awaitable[T]) -> T:
    """Await work to its end; a cancellation in between is raised afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
