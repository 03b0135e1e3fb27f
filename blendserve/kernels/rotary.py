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
        cos = rope.cos
        sin = rope.sin
        if width == 0:
            return x
        half = width // 2
        turned = x[..., :width]
        if self.neighbours:
            one, other = (
                part.float() if self.wide else part for part in (turned[..., ::2], turned[..., 1::2])
            )
            cos, sin = (x[:, : half * self.step : self.step] for x in (cos, sin))
            turned = torch.stack((one * cos - other * sin, other * cos + one * sin), dim=-1).flatten(-2)
        else:
            turned = turned * cos + torch.cat((-turned[..., half:], turned[..., :half]), dim=-1) * sin
        turned = turned.to(x.dtype)
        return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


HALVES = Rotary(neighbours=False, step=1, wide=False)  # Llama and most others
INTERLEAVED = Rotary(neighbours=True, step=1, wide=False)  # GLM-4, Helium
WIDE_INTERLEAVED = Rotary(neighbours=True, step=2, wide=True)  # Command R
FORMS = (HALVES, WIDE_INTERLEAVED, INTERLEAVED)
