"""The compiled kernels of an instruction set, loaded once a process. selfcheck.py says whether they are right."""

from __future__ import annotations

import ctypes
from functools import cache

import torch  # brings the OpenMP runtime that the kernels link to

from blendserve.kernels.cpu.build import Unavailable, build
from blendserve.kernels.cpu.isa import Level

# The parameters of each function of kernels.h: p = pointer, l = int64_t, f = float; a result of int64_t ends in "->l".
SIGNATURES = {
    "attention": "ppppppp llllll lllll ff l",
    "linear": "pppp lll llll",
    "add_rms_norm": "ppppp lllll ff l",
    "silu_and_mul": "ppp llllll",
    "scatter_kv": "ppppp lllll lllll",
    "correct_kv": "pppppppppppppp lllllllll lllll ffffffff l",
    "rans_encode": "ppppppppp ll",
    "rans_decode": "ppppppppp lllll->l",
    "dequantize": "pppppppppppp llll",
    "layer_qkv": "ppppppppp lllllllll ff l",
    "layer_out": "pppp lllllll fff l",
    "decode_step": "pppppppp lllllllll fff ll",
}
_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "f": ctypes.c_float}


@cache
def loaded(level: Level) -> ctypes.CDLL:
    """The shared object, compiled first if need be. Raises Unavailable with the reason."""
    path = build(level)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"the compiled kernels cannot be loaded: {error}") from None
    for name in level.sources:
        parameters, _, result = SIGNATURES[name].partition("->")
        function = getattr(library, f"blendserve_{name}")
        function.argtypes = [_TYPES[letter] for letter in parameters.replace(" ", "")]
        function.restype = _TYPES[result] if result else None
    return library


def dtype_of(level: Level) -> torch.dtype:
    """The dtype of its kernels."""
    dtype: torch.dtype = getattr(torch, level.dtype)
    return dtype
