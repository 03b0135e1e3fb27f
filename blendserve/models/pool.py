"""Memory of a request's KV cache, kept for the next request.

Fresh memory costs more than what is written to it: the system clears it page by page, which takes several times as long
as filling it. So the memory of the last cache that nobody refers to any more is kept, one in a process.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNED = 64  # bytes
FAR = 4  # times what is asked for: too much to hold for it
SPARE = 0.25  # of the bytes asked for; memory that nobody touches costs nothing

Memory = NDArray[np.uint8]
_kept: deque[Memory] = deque(maxlen=1)


def pooled_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.empty; on a CPU in kept memory, if there is enough. It is kept again when the last view of it is gone."""
    if device.type != "cpu":  # torch keeps a GPU's memory itself
        return torch.empty(shape, dtype=dtype, device=device)
    n_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = _memory(n_bytes)
    lent = memory[:n_bytes]
    weakref.finalize(lent, _kept.append, memory).atexit = False
    return torch.from_numpy(lent).view(dtype).view(shape)  # its storage refers to `lent`


def _memory(n_bytes: int) -> Memory:
    """At least as much, aligned: what is kept, unless it is too small or far too large."""
    with suppress(IndexError):
        memory = _kept.pop()
        if n_bytes <= memory.size <= FAR * n_bytes:
            return memory
    raw = np.empty(int((1 + SPARE) * n_bytes) + ALIGNED, dtype=np.uint8)
    return raw[-raw.ctypes.data % ALIGNED :]
