"""Compiled kernels for CPUs that multiply bf16; without one, everything runs on plain torch.

    attention.cpp -> build.py (compiled once, kept in the user's cache) -> library.py (loaded, checked) -> attention.py

Nothing here raises for want of a compiler or of an instruction: `status()` tells what is in use and why.
BLENDSERVE_NATIVE=0 in the environment switches it off.
"""

from __future__ import annotations

from blendserve.native.library import SWITCH, Status, status

__all__ = ["SWITCH", "Status", "status"]
