"""Which optional packages for a GPU are installed, and what the GPU can do. Importing this imports none of them."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

MAX_DIM = 256  # of a head


def has_triton() -> bool:
    """Whether Triton kernels can be compiled and run (on a GPU, or in triton's interpreter)."""
    return _found("triton") is not None


def flash_attn() -> ModuleType | None:
    """The flash-attn package, version 2, None where it is not installed or does not load."""
    module = _found("flash_attn")
    return module if hasattr(module, "flash_attn_func") else None


@cache
def _found(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, AttributeError):  # built for another torch or CUDA
        return None


def are_supported(dtypes: set[torch.dtype], *parts: Tensor) -> bool:
    """Whether they are contiguous rows of one of these dtypes on one device, and need no gradients."""
    first = parts[0]
    return first.shape[-1] <= MAX_DIM and all(
        x.dtype == first.dtype in dtypes
        and x.device == first.device
        and x.stride(-1) == 1
        and not x.requires_grad
        for x in parts
    )


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The GPU's compute capability: (8, 0) is an A100, (9, 0) an H100."""
    return torch.cuda.get_device_capability(device)


@cache
def processors(device: torch.device) -> int:
    """How many programs the GPU runs side by side at least."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
