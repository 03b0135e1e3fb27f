"""KV as rows of numbers, and numbers as symbols."""

from __future__ import annotations

import numpy as np
from torch import Tensor, cat

from blendserve.core import ChunkKV
from blendserve.kernels.coding import ONE

BIT = 0.11  # squared steps of error that a bit has to take away: about what a finer step would (research/decisions.md)


def flat(kv: ChunkKV) -> Tensor:
    """[L, C, W] in fp32: keys head after head, then values."""
    both = cat((kv.keys, kv.values), dim=1).detach().cpu().float()  # [L, 2 K, C, D]
    return both.transpose(1, 2).flatten(2).nan_to_num(0.0, 0.0, 0.0)


def quantised(along: np.ndarray, step: float, means: np.ndarray) -> np.ndarray:
    """Numbers [C, N] of fp32 -> symbols of int8. means: how large an axis' symbols are [N], 12 bits behind the point.

    Of the two symbols around a number it gets the larger one where the error that this takes away is worth the bits that
    it costs: those of a geometric distribution of that mean, and a sign's for a symbol of 1. By numpy: in the thread that
    writes, torch's would wait for each other.
    """
    bits = np.log2(1 + ONE / np.maximum(means, 4).astype(np.float32))
    steps = np.abs(along) / np.float32(step)
    whole = np.floor(steps)
    up = steps - whole > np.float32(0.5) + np.float32(BIT / 2) * (bits + (whole == 0))
    found: np.ndarray = np.copysign(whole + up, along).clip(-128, 127).astype(np.int8)
    return found
