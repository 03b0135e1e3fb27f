"""Environment switches of the kernels, read once a process."""

from __future__ import annotations

import os
from functools import cache

NATIVE = "BLENDSERVE_NATIVE"  # "0": plain torch
AUTOTUNE = "BLENDSERVE_AUTOTUNE"  # "0": nothing is measured, the order of the table holds


@cache
def is_native_on() -> bool:
    return os.environ.get(NATIVE) != "0"


@cache
def is_autotune_on() -> bool:
    return is_native_on() and os.environ.get(AUTOTUNE) != "0"
