"""RoPE in the forms that model families have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blendserve.kernels.types import Rope


@dataclass(frozen=True, slots=True)
class Rotary:
    """Pairs (x, y) of a head become (x cos - y sin, y cos + x sin)."""

    neighbours: bool  # pairs are dims (2i, 2i + 1), else (i, i + R / 2)
    step: int  # columns of cos from one pair's to the next's
    wide: bool  # computed in fp32 and rounded once, else after every step

    def rotate(self, x: Tensor, rope: Rope) -> Tensor:
        """x [heads, S, D] rotated in its own dtype; dims beyond R stay."""
        width = rope.cos.shape[-1]
        if width == 0:
            return x
        half = width // 2
        if not self.neighbours and not self.wide:  # half of the launches on a GPU
            turned = x[..., :width]
            swapped = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
            turned = (turned * rope.cos + swapped * rope.sin).to(x.dtype)
            return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)
        out, halves = x.clone(), (slice(half), slice(half, width))
        pairs = (slice(0, width, 2), slice(1, width, 2)) if self.neighbours else halves
        columns = slice(0, half * self.step, self.step)
        one, other, cos, sin = x[..., pairs[0]], x[..., pairs[1]], rope.cos[:, columns], rope.sin[:, columns]
        if self.wide:
            one, other = one.float(), other.float()
        out[..., pairs[0]] = (one * cos - other * sin).to(x.dtype)
        out[..., pairs[1]] = (other * cos + one * sin).to(x.dtype)
        return out


HALVES = Rotary(neighbours=False, step=1, wide=False)  # Llama and most others
INTERLEAVED = Rotary(neighbours=True, step=1, wide=False)  # GLM-4, Helium
WIDE_INTERLEAVED = Rotary(neighbours=True, step=2, wide=True)  # Command R
FORMS = (HALVES, WIDE_INTERLEAVED, INTERLEAVED)
