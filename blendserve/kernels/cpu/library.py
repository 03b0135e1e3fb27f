"""The compiled kernels of an instruction set, loaded once a process. selfcheck.py says whether they are right."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch  # brings the OpenMP runtime that the kernels link to
from torch import Tensor

from blendserve.kernels.cpu.build import Unavailable, build
from blendserve.kernels.cpu.isa import Level

HEADER = Path(__file__).with_name("kernels.h")
LETTERS = {"int64_t": "q", "float": "f"}  # of module struct; all other fields are pointers


def _layouts() -> dict[str, struct.Struct]:
    """The structs of kernels.h by name, and by the function of which one is the argument."""
    text = re.sub(r"//.*", "", HEADER.read_text())
    found: dict[str, struct.Struct] = {}
    for name, body in re.findall(r"struct (\w+) \{([^}]*)\};", text):
        letters = ""
        for field in filter(None, map(str.strip, body.split(";"))):
            kind, *names = re.split(r"[\s,]+", field.removeprefix("const "))
            plain = found[kind].format if kind in found else LETTERS.get(kind, "")
            letters += "".join("P" if "*" in kind + each else plain for each in names)
        found[name] = struct.Struct(letters)
    functions = re.findall(r"blendserve_(\w+)\(const (\w+)& args\);", text)
    return found | {function: found[name] for function, name in functions}


LAYOUTS = _layouts()


def pack(name: str, rows: Iterable[tuple[float, ...]]) -> Tensor:
    """An array of structs, as bytes."""
    made = bytearray().join(LAYOUTS[name].pack(*row) for row in rows)
    return torch.frombuffer(made, dtype=torch.uint8) if made else torch.empty(0, dtype=torch.uint8)


@cache
def loaded(level: Level) -> SimpleNamespace:
    """A level's functions, compiled if need be. Each takes the fields of its struct in order, pointers as addresses.

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
        **{name: _function(library[f"blendserve_{name}"], LAYOUTS[name]) for name in names}
    )


def _function(function: Any, fields: struct.Struct) -> Callable[..., int]:
    function.argtypes = [ctypes.c_char_p]
    function.restype = ctypes.c_int64
    return lambda *values: function(fields.pack(*values))


def pointer(x: Tensor | None) -> int:
    """The address of a tensor's first element; 0 = null."""
    return 0 if x is None else x.data_ptr()


def dtype_of(level: Level) -> torch.dtype:
    """The dtype of its kernels."""
    dtype: torch.dtype = getattr(torch, level.dtype)
    return dtype
