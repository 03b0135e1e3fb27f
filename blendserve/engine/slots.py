"""The KV of all running requests: one block of memory, allocated at the start, cut into slots.

keys, values  [slots, L, K, slot_tokens, D]; a slot is one request's cache from its prefill to its last token
"""

from __future__ import annotations

import torch

from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel


class Slots:
    """Lends caches. Used by the model's thread alone."""

    def __init__(self, adapter: DecoderModel, n: int, tokens: int) -> None:
        shape = (n, adapter.n_layers, adapter.n_kv_heads, tokens, adapter.head_dim)
        self.keys = torch.empty(shape, dtype=adapter.dtype, device=adapter.device)
        self.values = torch.empty_like(self.keys)
        self._free = list(range(n - 1, -1, -1))
        self._lent: dict[int, int] = {}  # id of a cache -> its slot
        self.n, self.tokens = n, tokens

    @property
    def free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def take(self) -> KVCache:
        """A slot as a cache; what it holds from before is not read. Raises IndexError when none is free."""
        slot = self._free.pop()
        cache = KVCache.over(self.keys[slot], self.values[slot])
        self._lent[id(cache)] = slot
        return cache

    def number(self, cache: KVCache) -> int:
        """Which slot this is. Raises KeyError for a cache that is not lent."""
        return self._lent[id(cache)]

    def give_back(self, cache: KVCache) -> None:
        """Raises KeyError for a cache that is not lent: a slot is never free twice."""
        self._free.append(self._lent.pop(id(cache)))
