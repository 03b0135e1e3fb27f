"""Norms of rows, and the forms of RMS norms that kernels have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormForm:
    """x / sqrt(mean(x^2) + eps) in fp32, times (weight + offset)."""

    rounds_first: bool  # the normed row is rounded to the dtype before it is weighted, else the product is
    offset: float = 0.0

    def normed(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [S, E] normed as kernels do it, in torch."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        scale = weight.float() + self.offset if self.offset else weight
        return wide.to(x.dtype) * scale if self.rounds_first else (wide * scale).to(x.dtype)


RMS = NormForm(rounds_first=True)  # Llama and most others
LATE_RMS = NormForm(rounds_first=False)  # Helium, OLMo 2
GEMMA_RMS = NormForm(rounds_first=False, offset=1.0)
FORMS = RMS, LATE_RMS, GEMMA_RMS


@dataclass(frozen=True, slots=True)
class Norm:
    """A model's norm of rows. `form` is None where kernels do not have its form."""

    own: Callable[[Tensor], Tensor]
    weight: Tensor | None = None  # [E]
    eps: float = 0.0
    form: NormForm | None = None


def is_fused(x: Tensor, add: Tensor | None, norm: Norm) -> bool:
    """Whether torch has one kernel for the norm of these rows."""
    return x.device.type == "cuda" and norm.form is RMS


def fused_add_norm(x: Tensor, add: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """ops.add_norm: three kernel launches where the plain form takes ten."""
    assert norm.weight is not None
    total = x if add is None else x + add
    return total, F.rms_norm(total, total.shape[-1:], eps=norm.eps) * norm.weight
