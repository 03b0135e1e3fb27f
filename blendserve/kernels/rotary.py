"""RoPE: a family's own function, and its form if kernels have that form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blendserve.kernels.types import Rope

OwnFunction = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class RotaryForm:
    """Pairs (x, y) of a head become (x cos - y sin, y cos + x sin)."""

    neighbours: bool  # pairs are dims (2i, 2i + 1), else (i, i + R / 2)
    step: int  # columns of cos from one pair's to the next's
    wide: bool  # computed in fp32 and rounded once, else after every step

    def rotated(self, x: Tensor, rope: Rope) -> Tensor:
        """x [heads, S, D] rotated as kernels do it, in torch."""
        width = rope.cos.shape[-1]
        half, out = width // 2, x.clone()
        halves = slice(half), slice(half, width)
        pairs = (slice(0, width, 2), slice(1, width, 2)) if self.neighbours else halves
        columns = slice(0, half * self.step, self.step)
        one, other, cos, sin = x[..., pairs[0]], x[..., pairs[1]], rope.cos[:, columns], rope.sin[:, columns]
        if self.wide:
            one, other = one.float(), other.float()
        out[..., pairs[0]] = (one * cos - other * sin).to(x.dtype)
        out[..., pairs[1]] = (other * cos + one * sin).to(x.dtype)
        return out


HALVES = RotaryForm(neighbours=False, step=1, wide=False)  # Llama and most others
FORMS = (
    HALVES,
    RotaryForm(neighbours=True, step=2, wide=True),  # Command R
    RotaryForm(neighbours=True, step=1, wide=False),  # GLM-4, Helium
)


class Rotary:
    """A model's rotation. `form` is None where kernels do not have its form."""

    def __init__(self, own: OwnFunction, form: RotaryForm | None) -> None:
        self.own, self.form = own, form

    def rotate(self, x: Tensor, rope: Rope) -> Tensor:
        """x [heads, S, D] rotated by the family's own function, in its own dtype; dims beyond R stay."""
        width = rope.cos.shape[-1]
        if width == x.shape[-1]:
            return self.own(x[None], x[None, :0], rope.cos[None], rope.sin[None])[0][0]
        if width == 0:
            return x
        return torch.cat([self.rotate(x[..., :width], rope), x[..., width:]], dim=-1)
