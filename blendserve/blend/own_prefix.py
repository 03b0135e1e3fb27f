"""The KV of what every prompt begins with, kept in memory where a store on another machine has it: it is fetched once."""

from __future__ import annotations

import torch

from blendserve.core import ChunkKV
from blendserve.store.view import ChunkView, TensorView


class OwnPrefix:
    """Of one reader and one prefix, whatever the namespace: its tokens are the engine's own. Threads may share it."""

    def __init__(self) -> None:
        self.view: TensorView | None = None

    def keep(self, view: ChunkView) -> None:
        """A copy of it, unless there is one. Raises CorruptRecord, ChunkLost."""
        if self.view is None:
            keys, values = zip(*map(view.layer, range(view.n_layers)), strict=True)
            self.view = TensorView(ChunkKV(torch.stack(keys), torch.stack(values)))
