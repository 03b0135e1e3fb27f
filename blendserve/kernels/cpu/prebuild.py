"""The kernels of every instruction set, compiled into the package before it is put into a wheel or an image.

    python -m blendserve.kernels.cpu.prebuild

Installing the result needs no compiler: build.py uses the object of the CPU, and selfcheck.py checks it there.
The machine that compiles needs none of the instruction sets itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

from blendserve.kernels.cpu.build import PREBUILT, Unavailable, compile_level, find_compiler, prebuilt
from blendserve.kernels.cpu.isa import LEVELS


def prebuild() -> list[Path]:
    """Compile all levels that are not there yet, and drop those of other sources. Raises Unavailable, OSError."""
    PREBUILT.mkdir(exist_ok=True)
    made = [prebuilt(level) for level in LEVELS.values()]
    for old in set(PREBUILT.glob("*.so")) - set(made):
        old.unlink()
    for level, target in zip(LEVELS.values(), made, strict=True):
        if not target.exists():
            compile_level(level, find_compiler(), target)
    return made


if __name__ == "__main__":
    try:
        for path in prebuild():
            print(f"{path.name}: {path.stat().st_size:,} bytes")
    except (Unavailable, OSError) as error:
        sys.exit(f"The kernels were not compiled: {error}.")
