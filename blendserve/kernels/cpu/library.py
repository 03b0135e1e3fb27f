"""The compiled kernels, loaded and checked: a kernel that does not give the formula's numbers is not used."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from blendserve.native.build import Unavailable, build

SWITCH = "BLENDSERVE_NATIVE"  # "0" in the environment: plain torch


@dataclass(frozen=True, slots=True)
class Status:
    """Whether kernels are in use in this process, and why or why not."""

    active: bool
    reason: str


def status() -> Status:
    """What attention on the CPU in bf16 runs on; compiles and checks the kernels when nobody has asked before."""
    if os.environ.get(SWITCH) == "0":
        return Status(False, f"switched off by {SWITCH}=0")
    return _state()[1]


def library() -> ctypes.CDLL | None:
    """The kernels, None where they are off, cannot be had or are wrong."""
    if os.environ.get(SWITCH) == "0":
        return None
    return _state()[0]


@cache
def _state() -> tuple[ctypes.CDLL | None, Status]:
    from blendserve.native.check import check

    try:
        path = build()
        loaded = _load(path)
        check(loaded)
    except Unavailable as error:
        return None, Status(False, str(error))
    return loaded, Status(True, f"compiled kernels from {path}")


def _load(path: Path) -> ctypes.CDLL:
    import torch  # noqa: F401 -- brings the OpenMP runtime that the kernels bind to

    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"the compiled kernels cannot be loaded: {error}") from None
    for name in ("attend", "linear", "move", "place"):
        function = getattr(loaded, f"blendserve_{name}")
        function.argtypes, function.restype = [ctypes.c_void_p], None
    return loaded
