"""A cap on the instruction sets of this process, to behave as an older CPU would: BLENDSERVE_CPU_ISA.

Ours beside torch's, oneDNN's and MKL's own, which read theirs when they are first used; so this runs before torch comes.
"""

from __future__ import annotations

import os

from blendserve.errors import ConfigError

SWITCH = "BLENDSERVE_CPU_ISA"
SETS = ("avx2", "avx512", "avx512_bf16", "amx")  # each needs those before it
LIBRARIES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
_THEIRS = {  # what each library calls it
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE_VNNI", "AVX512"),
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512"),
    "amx": ("avx512", "AVX512_CORE_AMX", "AVX512"),
}


def cap() -> str | None:
    """One of SETS; None = all that the CPU has. Raises ConfigError."""
    word = os.environ.get(SWITCH)
    if word and word not in SETS:
        raise ConfigError(f"{SWITCH} cannot be {word!r}: use one of {', '.join(SETS)}", setting=SWITCH)
    return word or None


def tell_libraries() -> None:
    """The cap, to libraries that have none of their own. A word that is none is left for `cap` to refuse."""
    for name, word in zip(LIBRARIES, _THEIRS.get(os.environ.get(SWITCH, ""), ()), strict=False):
        os.environ.setdefault(name, word)
