"""The format of codec `predict`'s segments, read symbol by symbol, and its numbers in float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from blendserve.store.codecs.predict.rans import LayerMap, RansModel


def unpacked(segment: memoryview, contexts: np.ndarray, means: np.ndarray, model: RansModel) -> Tensor:
    """16 states, the number of escapes, escapes, words of 16 bits -> symbols [C, N]."""
    states = [int.from_bytes(segment[4 * i : 4 * i + 4], "little") for i in range(16)]
    at, n = 64, 0
    while True:
        n |= (segment[at] & 127) << 7 * (at - 64)
        at += 1
        if segment[at - 1] < 128:
            break
    escapes = iter([byte - 256 * (byte > 127) for byte in segment[at : at + n]])
    words = iter([segment[i] + 256 * segment[i + 1] for i in range(at + n, len(segment), 2)])
    out, running = torch.zeros(len(contexts), len(means), dtype=torch.int8), [int(m) for m in means]
    for t, context in enumerate(contexts.tolist()):
        for j, mean in enumerate(running):
            octave = max(mean, 4).bit_length() - 1  # four sizes an octave
            size = min(63, 4 * (octave - 2) + (max(mean, 4) * 4 >> octave) - 4)
            widths = model.width[model.classes[size, context]].tolist()
            symbol, start, state = 0, 0, states[j % 16]
            while start + widths[symbol] <= state % 4096:
                start, symbol = start + widths[symbol], symbol + 1
            state = widths[symbol] * (state >> 12) + state % 4096 - start
            states[j % 16] = state << 16 | next(words) if state < 1 << 16 else state
            value = next(escapes) if symbol == 31 else (symbol + 1) // 2 * (1 if symbol % 2 else -1)
            out[t, j], running[j] = value, mean + (((abs(value) << 12) - mean) >> 5)
    assert next(words, None) is next(escapes, None) is None
    return out


def dequantized(below: Tensor, symbols: Tensor | None, layer: LayerMap, dim: int) -> tuple[Tensor, Tensor]:
    """Codes of the layer below and symbols -> heads [W / D, C, D] and codes before rounding [C, W]."""
    numbers = below.double() @ layer.map.double() * layer.map_scale.double() + layer.mean.double()
    if symbols is not None:
        numbers += symbols.double() @ layer.residual.double() * layer.residual_scale.double()
    codes = (numbers * layer.code_scale + layer.code_zero).clamp(-128, 127)
    return numbers.view(len(below), layer.width // dim, dim).transpose(0, 1), codes
