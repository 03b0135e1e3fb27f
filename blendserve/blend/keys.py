"""Keys of chunks: what the KV of a chunk depends on, but for the tokens of the chunk itself."""

from __future__ import annotations

from dataclasses import dataclass

from blendserve.core import TokenIds
from blendserve.store import ChunkKey, chunk_key


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """Token ids -> key, for one model, context and namespace."""

    fingerprint: str  # of the model
    dtype: str
    context: TokenIds  # which every chunk's KV is computed after
    namespace: str = ""

    def __call__(self, ids: TokenIds) -> ChunkKey:
        return chunk_key(self.fingerprint, self.context, ids, self.dtype, self.namespace)
