"""Instruction sets that kernels are compiled for, side by side: each is a shared object of its own, chosen at run time.

A further one is an entry of LEVELS: the flags it needs and, for each operation that it computes, the source that exports
`blendserve_<operation>` with the call of the others (attend.py, linear.py, place.py, correct.py). ops.py makes a backend
of each, verify.py checks it before it serves, and the faster one of those that are right is measured.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from blendserve.cpu_cap import SETS, cap

_AVX2 = frozenset({"avx2", "bmi2", "fma", "movbe"})
_AVX512 = _AVX2 | frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_AMX = _AVX512 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16"}
_BF16 = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
_VECTORS = {
    **{
        name: f"{name}.cpp"
        for name in ("attend", "linear", "correct", "place", "norm", "gate", "decode_step")
    },
    **dict.fromkeys(("pack", "decode", "reconstruct"), "coding.cpp"),
}  # for vectors of any width
_TILES = {name: f"{name}_amx.cpp" for name in ("attend", "linear", "correct")}


@dataclass(frozen=True)
class Level:
    """An instruction set, and what is compiled for it."""

    name: str  # of SETS
    title: str
    dtype: str  # what its kernels compute in
    needs: frozenset[str]  # flags of /proc/cpuinfo
    compile: tuple[str, ...]
    sources: Mapping[str, str]  # operation -> file

    def __hash__(self) -> int:
        return hash(self.name)


LEVELS = {
    level.name: level
    for level in (
        Level("avx2", "AVX2", "float32", _AVX2, ("-march=x86-64-v3",), _VECTORS),
        Level("avx512", "AVX-512", "float32", _AVX512, ("-march=x86-64-v4",), _VECTORS),
        Level(
            "avx512_bf16",
            "AVX512-BF16",
            "bfloat16",
            _AVX512 | {"avx512_bf16", "avx512_vnni"},
            _BF16,
            _VECTORS,
        ),
        Level("amx", "AMX", "bfloat16", _AMX, (*_BF16, "-mamx-tile", "-mamx-bf16"), _TILES),
    )
}


def missing(level: Level) -> str:
    """Why this process may not run such instructions, "" if it may. Raises ConfigError where the cap is none."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"{platform.system()} on {platform.machine()}: only Linux on x86_64 has kernels"
    lacks = level.needs - cpu_flags()
    if lacks:
        return f"this CPU lacks {', '.join(sorted(lacks))}"
    capped = cap()
    if capped is not None and SETS.index(level.name) > SETS.index(capped):
        return f"capped to {capped}"
    return "" if level.name != "amx" or may_use_tiles() else "the kernel does not permit tiles"


def allowed() -> tuple[str, ...]:
    """The sets that this process may use, ascending."""
    return tuple(name for name in SETS if not missing(LEVELS[name]))


def in_use() -> list[Level]:
    """The levels whose kernels a model in `auto` dtype runs on this CPU: for each operation, the widest of its dtype."""
    levels = [LEVELS[name] for name in allowed()]
    dtype = "bfloat16" if any(level.dtype == "bfloat16" for level in levels) else "float32"
    widest = {operation: level for level in levels if level.dtype == dtype for operation in level.sources}
    return [level for level in levels if level in widest.values()]


def cpu_flags() -> frozenset[str]:
    return frozenset(_cpuinfo("flags").split())


def cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


@cache
def _cpuinfo(field: str) -> str:
    """Of the first core; "" where nobody tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


@cache
def may_use_tiles() -> bool:
    """Asks Linux for them, once a process: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)."""
    return bool(ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0)
