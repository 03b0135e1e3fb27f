"""Linear layers in the compiled kernel, over the weights as the model stores them: what it takes, and the call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from blendserve.native.library import library

FEW = 8  # rows; weights coming from memory are the limit up to here, on any CPU


class LinearCall(ctypes.Structure):
    """`LinearCall` of linear.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weights", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("x_row", "w_row", "out_row")),
        *((name, ctypes.c_int64) for name in ("rows", "outs", "depth", "threads")),
    )


def call_linear(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)`, by the kernel where module is a plain linear layer that it can do."""
    if type(module) is nn.Linear and not (module._forward_hooks or module._forward_pre_hooks):
        return linear(x, module.weight, module.bias)
    out: Tensor = module(x)
    return out


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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [S, I] times weight [O, I], plus bias [O] -> [S, O]; F.linear for what the kernel cannot do."""
    loaded = library() if takes(x, weight, bias) else None
    if loaded is None:
        return F.linear(x, weight, bias)
    return run(loaded, x, weight, bias)


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel can do it, and is not slower: a CPU with matrix tiles is left to torch for many rows."""
    return (
        x.dim() == 2
        and all(y.dtype == torch.bfloat16 and y.device.type == "cpu" for y in (x, weight))
        and x.stride(1) == weight.stride(1) == 1
        and weight.shape[0] % 2 == weight.shape[1] % 2 == 0
        and (bias is None or (bias.dtype == torch.bfloat16 and bias.is_contiguous()))
        and not torch.is_grad_enabled()
        and (x.shape[0] <= FEW or not _has_tiles())
    )


def run(loaded: ctypes.CDLL, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The call itself. The GIL is free meanwhile."""
    rows, outs = x.shape[0], weight.shape[0]
    out = torch.empty(rows, outs, dtype=x.dtype)
    pointers = x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr()
    sizes = x.stride(0), weight.stride(0), outs, rows, outs, x.shape[1], torch.get_num_threads()
    loaded.blendserve_linear(ctypes.byref(LinearCall(*pointers, *sizes)))
    return out


@cache
def _has_tiles() -> bool:
    return bool(torch.cpu._is_amx_tile_supported())
