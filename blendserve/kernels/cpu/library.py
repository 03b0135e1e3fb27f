"""The compiled kernels, built and loaded once a process. Whether they are right is for verify.py to say."""

from __future__ import annotations

import ctypes
from functools import cache

from blendserve.kernels.cpu.build import Unavailable, build

FUNCTIONS = ("attend", "linear", "correct", "place")


@cache
def loaded() -> ctypes.CDLL:
    """The shared object, compiled first if need be. Raises Unavailable with the reason, each time anew."""
    import torch  # noqa: F401 -- brings the OpenMP runtime that the kernels bind to

    path = build()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"the compiled kernels cannot be loaded: {error}") from None
    for name in FUNCTIONS:
        function = getattr(library, f"blendserve_{name}")
        function.argtypes, function.restype = [ctypes.c_void_p], None
    return library
