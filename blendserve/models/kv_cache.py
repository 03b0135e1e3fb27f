"""The KV cache of one request: preallocated once, written by blending, appended to by decode, never copied.

keys, values  [L, K, T + new tokens, D], keys after RoPE at their true positions
"""

from __future__ import annotations

from torch import Tensor

from blendserve.models.model import DecoderModel
from blendserve.models.pool import pooled_empty


class KVCache:
    """Room for `capacity` tokens; position p of the prompt lives in slot p."""

    def __init__(self, adapter: DecoderModel, capacity: int) -> None:
        shape = (adapter.n_layers, adapter.n_kv_heads, capacity, adapter.head_dim)
        both = pooled_empty((2, *shape), adapter.dtype, adapter.device)
        self.keys, self.values = both[0], both[1]
        self.capacity = capacity

    @classmethod
    def over(cls, keys: Tensor, values: Tensor) -> KVCache:
        """A cache in memory that is there already: keys, values [L, K, capacity, D]."""
        cache = cls.__new__(cls)
        cache.keys, cache.values, cache.capacity = keys, values, int(keys.shape[2])
        return cache

    def write(self, l: int, at: Tensor | slice, keys: Tensor, values: Tensor) -> None:
        """Put rotated keys and values [K, S, D] of layer l at these positions."""
        self.keys[l][:, at] = keys
        self.values[l][:, at] = values

    @property
    def n_bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()
