"""The KV cache of one request: allocated once, written by the prefill, appended to by decoding, never copied.

keys, values  [L, K, T + new tokens, D], keys after RoPE at their true positions; of a pool [slots, L, K, tokens, D]

Fresh memory costs more than what is written to it: the system clears it page by page, which takes several times as long
as filling it. So the memory of the last cache that is not referred to any more is kept, one in a process.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blendserve.models.model import DecoderModel

ALIGNMENT = 64  # bytes
MAX_EXCESS = 4  # times what is asked for: more memory is not held for it
SPARE = 0.25  # of the bytes asked for; memory that is not touched costs nothing

Memory = NDArray[np.uint8]
_kept: deque[Memory] = deque(maxlen=1)


class KVCache:
    """Room for `capacity` tokens; position p of the prompt is in place p."""

    def __init__(self, model: DecoderModel, capacity: int) -> None:
        shape = (model.n_layers, model.n_kv_heads, capacity, model.head_dim)
        both = recycled_empty((2, *shape), model.dtype, model.device)
        self.keys, self.values = both[0], both[1]
        self.capacity = capacity

    @classmethod
    def over(cls, keys: Tensor, values: Tensor) -> KVCache:
        """A cache over existing memory: keys, values [L, K, capacity, D]."""
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


class CachePool:
    """One block of memory cut into `n` slots of `n_tokens`; a slot is one request's cache. For one thread."""

    def __init__(self, model: DecoderModel, n: int, n_tokens: int) -> None:
        shape = (n, model.n_layers, model.n_kv_heads, n_tokens, model.head_dim)
        self.keys = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.values = torch.empty_like(self.keys)
        self.caches = [KVCache.over(*pair) for pair in zip(self.keys, self.values, strict=True)]  # by slot
        self._free = self.caches[::-1]
        self.n, self.n_tokens = n, n_tokens

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def acquire(self) -> KVCache:
        """A slot as a cache; its former content is not read. Raises IndexError when none is free."""
        return self._free.pop()

    def release(self, cache: KVCache) -> None:
        """Free its slot. Raises ValueError for a slot that is free."""
        if cache in self._free:
            raise ValueError("this slot is free already")
        self._free.append(cache)


def recycled_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.empty; on a CPU in kept memory, if there is enough. It is kept again when the last view of it is gone."""
    if device.type != "cpu":  # torch keeps a GPU's memory itself
        return torch.empty(shape, dtype=dtype, device=device)
    n_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(0, dtype=np.uint8)
    with suppress(IndexError):
        memory = _kept.pop()
    if not n_bytes <= memory.size <= MAX_EXCESS * n_bytes:  # too small, or far too large
        raw = np.empty(int((1 + SPARE) * n_bytes) + ALIGNMENT, dtype=np.uint8)
        memory = raw[-raw.ctypes.data % ALIGNMENT :]
    view = memory[:n_bytes]
    weakref.finalize(view, _kept.append, memory).atexit = False
    return torch.from_numpy(view).view(dtype).view(shape)  # its storage refers to `view`
