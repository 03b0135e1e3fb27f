"""Dropping a file from the system's page cache, and looking whether it really went.

Only pages that no process maps can go, so the store has to be closed first. Linux only; a file on tmpfs never leaves
memory. What a hypervisor or the disk itself caches is out of reach, so "cold" means cold for this system.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

LEFT = 0.02  # of the file may stay, for it to count as dropped


def drop(file: Path) -> str:
    """Write the file out and drop it from the cache -> why that could not be done, "" when it was."""
    if not hasattr(os, "posix_fadvise"):
        return "this system cannot drop a file from its page cache"
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    left = resident(file)
    if left is None:
        return "this system does not tell which pages are in its cache"
    if left > LEFT:
        return (
            f"{left:.0%} of {file.name} stayed in memory: is its folder on tmpfs? Give a --folder on a disk"
        )
    return ""


def resident(file: Path) -> float | None:
    """The share of a file's pages that the page cache holds, by mincore(2); None where there is no such call."""
    size = file.stat().st_size
    if not size:
        return 0.0
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        known = _mincore(view.ctypes.data, size, pages)
        del view  # or the map could not be closed
    return float((pages & 1).mean()) if known else None


def _mincore(address: int, size: int, pages: np.ndarray) -> bool:
    try:
        call = ctypes.CDLL(None, use_errno=True).mincore
    except (AttributeError, OSError):
        return False
    out = pages.ctypes.data_as(ctypes.POINTER(ctypes.c_ubyte))
    return int(call(ctypes.c_void_p(address), ctypes.c_size_t(size), out)) == 0
