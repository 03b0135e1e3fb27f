"""The norms of a borrowed model, run by whichever kernel serves here."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from blendserve.kernels.norm import Norm, NormForm, form_of
from blendserve.kernels.ops import add_norm
from blendserve.models.linear_layers import is_hooked


class Norms:
    """Finds out what a model's norms compute: modules of one class compute alike, and the first of each is tried."""

    def __init__(self) -> None:
        self._forms: dict[type, NormForm | None] = {}

    def of(self, module: Any) -> Norm:
        """How kernels see this module."""
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if weight is None or weight.dim() != 1 or weight.device.type != "cpu" or eps is None:
            return Norm(module)
        kind = type(module)
        if kind not in self._forms:
            self._forms[kind] = form_of(module, weight, eps)
        return Norm(module, weight, eps, self._forms[kind])


def call_norm(norm: Norm | None, x: Tensor, add: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x + add [S, E] (without `add`, x itself), and that normed; None norms nothing."""
    if norm is None or is_hooked(norm.own):
        total = x if add is None else x + add
        return total, total if norm is None else norm.own(total)
    return add_norm(x, add, norm)


def norm_heads(norm: Norm, x: Tensor) -> Tensor:
    """x [S, heads, D], each head normed by itself."""
    if norm.form is None:  # it may have weights for each head
        return norm.own(x)
    return call_norm(norm, x.reshape(-1, x.shape[-1]))[1].view(x.shape)
