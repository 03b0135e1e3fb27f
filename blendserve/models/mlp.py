"""The MLP of a layer as matmuls with a gated activation between them, where it is no more than that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blendserve.kernels.activation import Activation
from blendserve.kernels.ops import gated_activation
from blendserve.models.linear_layers import call_linear, is_hooked

ROWS = 4  # that a module is tried with


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up in one matrix or in two."""

    def __init__(
        self, module: nn.Module, inner: Sequence[nn.Linear], down: nn.Linear, own: Activation
    ) -> None:
        self._module, self._inner, self.down, self._activation = module, inner, down, own

    @property
    def inner_weights(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weight [I, E] and bias of gate and of up."""
        if len(self._inner) == 2:
            return [(part.weight, part.bias) for part in self._inner]
        both = self._inner[0]
        biases = (None, None) if both.bias is None else both.bias.chunk(2)
        return list(zip(both.weight.chunk(2), biases, strict=True))

    def __call__(self, x: Tensor) -> Tensor:
        """x [S, E] -> [S, E]"""
        if is_hooked(self._module):
            out: Tensor = self._module(x)
            return out
        gate, up = _split([call_linear(part, x) for part in self._inner])
        return call_linear(self.down, gated_activation(gate, up, self._activation))


class GatedMLPs:
    """Finds out which MLPs of a model are such: modules of one class compute alike, and the first of each is tried."""

    def __init__(self) -> None:
        self._right: dict[type, bool] = {}

    def of(self, module: Any) -> GatedMLP | None:
        """The module by its parts; None where it has others, does anything else with them, or would gain nothing."""
        names = ("gate_proj", "up_proj") if hasattr(module, "gate_proj") else ("gate_up_proj",)
        parts: list[Any] = [getattr(module, name, None) for name in (*names, "down_proj")]
        own = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
        if own is None or not all(
            type(part) is nn.Linear and part.weight.device.type == "cpu" for part in parts
        ):
            return None
        *inner, down = parts
        kind = type(module)
        if kind not in self._right:
            self._right[kind] = _is_right(module, inner, down, own)
        return GatedMLP(module, inner, down, Activation(own, is_silu=True)) if self._right[kind] else None


@torch.inference_mode()
def _is_right(
    module: nn.Module, inner: Sequence[nn.Linear], down: nn.Linear, own: Callable[[Tensor], Tensor]
) -> bool:
    """Whether every bit is equal to what the parts give, and the activation is the one that kernels know."""
    x = torch.randn(ROWS, inner[0].weight.shape[1], generator=torch.Generator().manual_seed(0))
    x = x.to(down.weight.dtype)
    gate, up = _split([F.linear(x, part.weight, part.bias) for part in inner])
    wanted = F.linear(own(gate) * up, down.weight, down.bias)
    return torch.equal(module(x), wanted) and Activation.of(own, down.weight).is_silu


def _split(out: list[Tensor]) -> tuple[Tensor, Tensor]:
    """gate and up [S, I]"""
    gate, up = out if len(out) == 2 else out[0].chunk(2, dim=-1)
    return gate, up
