"""KV as rows of numbers, numbers as symbols, and the context that a token's symbols are coded in."""

from __future__ import annotations

import numpy as np
from torch import Tensor, cat

from blendserve.core import ChunkKV
from blendserve.kernels.coding import CONTEXTS

ROUND_UP = 0.4  # added before cutting off: a symbol of 1 costs bits, and most numbers are near 0
UNKNOWN = CONTEXTS - 1  # the context of layer 1, below which no symbols are
# Between contexts: a token's symbols, in sixteenths of the mean token's.
RATIOS = np.array([6, 9, 12, 15, 18, 23, 32])


def flat(kv: ChunkKV) -> Tensor:
    """[L, C, W] in fp32: keys head after head, then values."""
    both = cat((kv.keys, kv.values), dim=1).detach().cpu().float()  # [L, 2 K, C, D]
    return both.transpose(1, 2).flatten(2).nan_to_num(0.0, 0.0, 0.0)


def quantised(along: np.ndarray, step: float) -> np.ndarray:
    """Numbers of fp32 -> symbols of int8. By numpy: in the thread that writes, torch's would wait for each other."""
    whole = np.floor(np.abs(along) / np.float32(step) + np.float32(ROUND_UP))
    found: np.ndarray = np.copysign(whole, along).clip(-128, 127).astype(np.int8)
    return found


def contexts(symbols: np.ndarray | None, n_tokens: int) -> np.ndarray:
    """How large each token's symbols of the layer below were, beside the chunk's mean token -> [C] of uint8."""
    if symbols is None:
        return np.full(n_tokens, UNKNOWN, np.uint8)
    sizes = np.abs(symbols).view(np.uint8).astype(np.float32)  # of -128 as well; sums of integers, exact
    sums = (sizes @ np.ones(sizes.shape[1], np.float32)).astype(np.int64)
    ratios = 16 * sums * len(sums) // max(1, int(sums.sum()))
    found: np.ndarray = np.searchsorted(RATIOS, ratios, side="right").astype(np.uint8)
    return found
