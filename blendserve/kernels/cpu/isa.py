"""Instruction sets that kernels are compiled for, side by side: each is a shared object of its own, chosen at run time.

To add one, add an entry to LEVELS: the CPU flags that it needs and, for each function of kernels.h that it has, the
source. ops.py makes a backend of each, selfcheck.py checks it before it serves, and autotune.py finds the fastest.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from blendserve.cpu_cap import SETS, cap
from blendserve.provenance import cpuinfo

_AVX2 = frozenset({"avx2", "bmi2", "fma", "movbe"})
_AVX512 = _AVX2 | frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_BF16 = _AVX512 | {"avx512_bf16", "avx512_vnni"}
_AMX = _BF16 | {"amx_tile", "amx_bf16"}
_BF16_OPTIONS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
# Exported function -> source. AMX has attention, linear layers, and the halves of a layer around them.
_LAYER = ("add_rms_norm", "silu_and_mul", "gelu_and_mul", "scatter_kv", "layer_qkv", "layer_out")
_AMX_SOURCES = {
    "attention": "attention_amx.cpp",
    **dict.fromkeys(("linear", "packed_linear"), "linear_amx.cpp"),
    "take": "strips.cpp",
    **dict.fromkeys(_LAYER, "layer.cpp"),
}
_VECTORS = {
    "attention": "attention.cpp",
    **dict.fromkeys(("linear", "packed_linear"), "linear.cpp"),
    "pack": "pack_strips.cpp",
    "take": "strips.cpp",
    **dict.fromkeys(_LAYER, "layer.cpp"),
    "correct_kv": "correction.cpp",
    "decode_step": "decode_step.cpp",
    **dict.fromkeys(("rans_encode", "rans_decode", "dequantize"), "rans.cpp"),
}


@dataclass(frozen=True, eq=False)
class Level:
    """An instruction set, and what is compiled for it."""

    name: str  # of SETS
    title: str
    dtype: str  # what its kernels compute in
    needs: frozenset[str]  # flags of /proc/cpuinfo
    compile: tuple[str, ...]
    sources: Mapping[str, str]  # function -> file


LEVELS = {
    level.name: level
    for level in (
        Level("avx2", "AVX2", "float32", _AVX2, ("-march=x86-64-v3",), _VECTORS),
        Level("avx512", "AVX-512", "float32", _AVX512, ("-march=x86-64-v4",), _VECTORS),
        Level("avx512_bf16", "AVX512-BF16", "bfloat16", _BF16, _BF16_OPTIONS, _VECTORS),
        Level("amx", "AMX", "bfloat16", _AMX, (*_BF16_OPTIONS, "-mamx-tile", "-mamx-bf16"), _AMX_SOURCES),
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
    widest = {name: level for level in levels if level.dtype == dtype for name in level.sources}
    return [level for level in levels if level in widest.values()]


@cache
def cpu_flags() -> frozenset[str]:
    """The flags of an x86 CPU."""
    return frozenset(cpuinfo("flags").split())


@cache
def may_use_tiles() -> bool:
    """Asks Linux for them, once a process: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)."""
    return bool(ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0)
