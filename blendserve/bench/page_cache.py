"""Dropping a file from the system's page cache, with a check that it is gone.

Only pages that no process maps can be dropped, so the store has to be closed first. Linux only; a file on tmpfs never
leaves memory. Caches of a hypervisor or of the disk stay: "cold" means cold for this system.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

LEFT = 0.02  # of the file may stay, for it to count as dropped


def drop(file: Path) -> str:
    """Write the file out and drop it from the cache -> the reason why that failed, or ""."""
    try:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        left = resident(file)
    except (AttributeError, OSError):
        return "this system cannot drop a file from its page cache"
    if left <= LEFT:
        return ""
    return f"{left:.0%} of {file.name} stayed in memory: is its folder on tmpfs? Give a --folder on a disk"


def resident(file: Path) -> float:
    """The share of a file's pages that the page cache holds, by mincore(2). Raises AttributeError, OSError without it."""
    size = file.stat().st_size
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        address = ctypes.c_void_p(view.ctypes.data)
        failed = ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data))
        del view  # or the map could not be closed
    if failed:
        raise OSError("mincore failed")
    return float((pages & 1).mean())
