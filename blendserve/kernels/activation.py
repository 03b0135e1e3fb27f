"""What a family's MLP does to its gate: its own function, and whether it is the one that kernels know."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Activation:
    """A reader's activation."""

    def __init__(self, own: Callable[[Tensor], Tensor], is_silu: bool) -> None:
        self.own, self.is_silu = own, is_silu
