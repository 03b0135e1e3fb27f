"""The compiled kernels of an instruction set, built and loaded once a process. verify.py says whether they are right."""

from __future__ import annotations

import ctypes
from functools import cache

import torch  # brings the OpenMP runtime that the kernels bind to

from blendserve.kernels.cpu.build import Unavailable, build
from blendserve.kernels.cpu.isa import Level


@cache
def loaded(level: Level) -> ctypes.CDLL:
    """The shared object, compiled first if need be. Raises Unavailable with the reason, each time anew."""
    path = build(level)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"the compiled kernels cannot be loaded: {error}") from None
    for name in level.sources:
        function = getattr(library, f"blendserve_{name}")
        function.argtypes, function.restype = [ctypes.c_void_p], None
    return library


def dtype_of(level: Level) -> torch.dtype:
    """What its kernels take."""
    dtype: torch.dtype = getattr(torch, level.dtype)
    return dtype
