"""The compiled kernels of an instruction set, loaded once a process. selfcheck.py says whether they are right."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch  # brings the OpenMP runtime that the kernels link to
from torch import Tensor

from blendserve.kernels.cpu.build import Unavailable, build
from blendserve.kernels.cpu.isa import Level

# The fields of structs of kernels.h, by function where they are its arguments: P = pointer, q = int64_t, f = float.
STRUCTS = {
    "attention": "7P 11q 2f q",
    "linear": "4P 7q",
    "add_rms_norm": "5P 5q 2f q",
    "silu_and_mul": "3P 6q",
    "scatter_kv": "5P 10q",
    "correct_kv": "14P 14q 8f q",
    "rans_encode": "9P 2q",
    "rans_decode": "9P 5q",
    "dequantize": "12P 4q",
    "layer_qkv": "9P 9q 2f q",
    "layer_out": "4P 7q 3f q",
    "decode_step": "8P 9q 3f 2q",
    "KvSegment": "2P 6q",
    "LayerWeights": "20P 2q 2f",
    "RopeTable": "2P q",
    "DecodeRow": "2P 4q",
}


def pack(name: str, rows: Iterable[tuple[float, ...]]) -> Tensor:
    """An array of structs, as bytes."""
    layout = struct.Struct(STRUCTS[name])
    made = bytearray().join(layout.pack(*row) for row in rows)
    return torch.frombuffer(made, dtype=torch.uint8) if made else torch.empty(0, dtype=torch.uint8)


@cache
def loaded(level: Level) -> SimpleNamespace:
    """Its functions, compiled first if need be. Each takes the fields of its struct in order, pointers as addresses.

    Raises Unavailable with the reason.
    """
    path = build(level)
    try:
        return bind(ctypes.CDLL(str(path)), level.sources)
    except OSError as error:
        raise Unavailable(f"the compiled kernels cannot be loaded: {error}") from None


def bind(library: ctypes.CDLL, names: Iterable[str]) -> SimpleNamespace:
    """These functions of a shared object."""
    return SimpleNamespace(
        **{name: _function(library[f"blendserve_{name}"], STRUCTS[name]) for name in names}
    )


def _function(function: Any, arguments: str) -> Callable[..., int]:
    fields = struct.Struct(arguments)
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64
    return lambda *values: function(fields.pack(*values))


def pointer(x: Tensor | None) -> int:
    """The address of a tensor's first element; 0 = null."""
    return 0 if x is None else x.data_ptr()


def dtype_of(level: Level) -> torch.dtype:
    """The dtype of its kernels."""
    dtype: torch.dtype = getattr(torch, level.dtype)
    return dtype
