"""The linear layers of a borrowed model's modules, run by whichever kernel serves here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from blendserve.kernels.ops import linear


def call_linear(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)`, by a kernel where module is a plain linear layer."""
    if type(module) is nn.Linear and not is_hooked(module):
        return linear(x, module.weight, module.bias)
    out: Tensor = module(x)
    return out


def is_hooked(module: Any) -> bool:
    """Whether somebody else has to hear of it when this module is called."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def call_module(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`module(x)`, whatever module it is; linear layers in it by the kernel where x is of the kind that it takes."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu":
        return module(x)
    with Linears():
        return module(x)


class Linears(TorchFunctionMode):
    """While entered, in this thread: every F.linear, as in the modules of a borrowed model, is `linear`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and not kwargs:
            return linear(*args)
        return func(*args, **(kwargs or {}))
