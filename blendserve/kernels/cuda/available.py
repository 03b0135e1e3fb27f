"""Whether Triton is installed, and what the GPU can do. Importing this does not import Triton."""

from __future__ import annotations

import importlib
from functools import cache

import torch


@cache
def has_triton() -> bool:
    """Whether Triton kernels can be compiled and run (on a GPU, or in triton's interpreter)."""
    try:
        importlib.import_module("triton")
    except (ImportError, OSError, RuntimeError, AttributeError):  # built for another torch or CUDA
        return False
    return True


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The GPU's compute capability: (8, 0) is an A100, (9, 0) an H100."""
    return torch.cuda.get_device_capability(device)


@cache
def processors(device: torch.device) -> int:
    """How many programs the GPU runs side by side at least."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
