"""The activation of an MLP's gate: a family's own function, and whether it is SiLU, which kernels have."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Activation:
    """A model's activation."""

    def __init__(self, own: Callable[[Tensor], Tensor], is_silu: bool) -> None:
        self.own, self.is_silu = own, is_silu
