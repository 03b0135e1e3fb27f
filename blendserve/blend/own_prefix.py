"""The KV of what every prompt begins with, kept in memory where a store on another machine has it: it is fetched once."""

from __future__ import annotations

import torch

from blendserve.core import ChunkKV
from blendserve.store.base import ChunkView
from blendserve.store.memory import MemoryChunk


class OwnPrefix:
    """Of one reader and one prefix, whatever the namespace: its tokens are the engine's own. Threads may share it."""

    def __init__(self) -> None:
        self.view: MemoryChunk | None = None

    def keep(self, view: ChunkView) -> None:
        """A copy of it, unless there is one. Raises CorruptRecord, ChunkLost."""
        if self.view is None:
            keys, values = zip(*map(view.layer, range(view.n_layers)), strict=True)
            self.view = MemoryChunk(ChunkKV(torch.stack(keys), torch.stack(values)))
