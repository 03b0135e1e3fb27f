"""Reads GGUF files, in which llama.cpp and Ollama keep models: metadata, and tensors as views of the mapped file.

A file is: magic, version, counts, metadata, a table of tensors, padding, data. A split model has several such files.
Every length is checked against the file's end, so that a damaged or truncated file is a ModelError.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blendserve.errors import BlendserveError, ModelError, ModelUnsupported
from blendserve.kernels.packed import KINDS
from blendserve.models.checkpoint import first_line
from blendserve.models.weights import QuantisedMatrix

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# struct codes by value type, and the two types that have a length
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
MAX_DIMS = 4
# by the numbers of `enum ggml_type` in ggml.h
PLAIN = {
    0: torch.float32,
    1: torch.float16,
    30: torch.bfloat16,
}
BLOCKS = {kind.form: (name, kind.inputs, kind.n_bytes) for name, kind in KINDS.items()}
PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)


class Entry(NamedTuple):
    """Where a tensor is."""

    shape: tuple[int, ...]  # in torch's order
    kind: int
    data: np.ndarray[Any, np.dtype[np.uint8]]  # mapped


class Gguf:
    """The metadata and tensors of a model in one GGUF file, or in several parts."""

    def __init__(self, path: Path) -> None:
        """path: the file, or any part of a split one. Raises ModelError."""
        self.path = path
        self.tensors: dict[str, Entry] = {}
        parts = parts_of(path)
        for n, part in enumerate(parts):
            with reading(part):
                read = _Reader(part)
                if n == 0:
                    self.metadata = read.metadata
                    _check_count(self.metadata.get("split.count", 1), len(parts), path)
                if self.tensors.keys() & read.tensors.keys():
                    raise ValueError("two tensors have the same name")
                self.tensors |= read.tensors

    def tensor(self, name: str) -> Tensor | QuantisedMatrix:
        """The tensor, not copied. Raises KeyError, ModelUnsupported for a quantisation that is not read."""
        shape, kind, data = self.tensors[name]
        if kind in PLAIN:
            return torch.from_numpy(data).view(PLAIN[kind]).view(shape)
        outputs, inputs = shape
        return QuantisedMatrix(BLOCKS[kind][0], (outputs, inputs), data.reshape(outputs, -1))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file causes into a ModelError that names the file."""
    try:
        yield
    except (BlendserveError, ImportError):
        raise
    except FileNotFoundError as error:
        path = Path(error.filename or path)
        raise ModelError(
            f"there is no file {path}: give the path of a GGUF file with all its parts, a folder or a hub id",
            path=path,
        ) from error
    except Exception as error:  # struct, numpy, torch and tokenizers have no common class for bad values
        told = first_line(error) if isinstance(error, ValueError | OSError) else repr(error)
        raise ModelError(f"{path} is damaged: {told}. Fetch it again", path=path) from error


def parts_of(path: Path) -> list[Path]:
    """All parts of a split file, by its name."""
    found = PART.search(path.name)
    if not found:
        return [path]
    count = int(found[2])
    names = (PART.sub(f"-{n:05}-of-{count:05}", path.name) for n in range(1, count + 1))
    return [path.with_name(name) for name in names]


def _check_count(says: int, found: int, path: Path) -> None:
    if says != found:
        raise ModelError(
            f"{path} is one of {says} parts of a model: name them NAME-00001-of-{says:05}.gguf and so on",
            path=path,
        )


class _Reader:
    """Reads one file."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants to write
        self._at = 0
        magic, version = self._numbers("4sI")
        if magic != MAGIC:
            raise ValueError("it does not begin with GGUF")
        if version not in VERSIONS:
            self._refuse(path, version)
        n_tensors, n_values = self._numbers("QQ")
        self.metadata: dict[str, Any] = {}
        for _ in range(n_values):
            name = self._text()
            self.metadata[name] = self._value(*self._numbers("I"))
        table = [self._entry() for _ in range(n_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        self.tensors = {name: self._mapped(start + at, shape, kind, path) for name, shape, kind, at in table}
        if len(self.tensors) < n_tensors:
            raise ValueError("two tensors have the same name")

    def _refuse(self, path: Path, version: int) -> None:
        if version in (n << 24 for n in VERSIONS):
            raise ModelError(
                f"{path} is a big-endian GGUF file: convert it to little-endian by llama.cpp's "
                "gguf_convert_endian.py, or fetch it in that form",
                path=path,
            )
        raise ModelError(
            f"{path} has version {version} of GGUF, and 2 and 3 are read: fetch it again, or convert the model again",
            path=path,
        )

    def _numbers(self, code: str) -> tuple[Any, ...]:
        """The next values, by their struct codes."""
        values = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return values

    def _text(self) -> str:
        (text,) = self._texts(1)
        return text

    def _texts(self, count: int) -> list[str]:
        texts = []
        data = self._data
        at = self._at
        for _ in range(count):
            (length,) = LENGTH.unpack_from(data, at)
            at += LENGTH.size
            texts.append(str(data[at : at + length], "utf-8"))
            at += length
        self._at = at
        return texts

    def _value(self, kind: int) -> Any:
        """One value of the metadata."""
        if kind == STRING:
            return self._text()
        if kind != ARRAY:
            return self._numbers(SCALARS[kind])[0]
        element, count = self._numbers("IQ")
        if element == STRING:
            return self._texts(count)
        values = np.frombuffer(self._data, f"<{SCALARS[element]}", count, self._at)
        self._at += values.nbytes
        return values.tolist()

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name; its shape in torch's order, type, and offset in the data."""
        name = self._text()
        (n_dims,) = self._numbers("I")
        if not 0 < n_dims <= MAX_DIMS:
            raise ValueError(f"tensor {name!r} has {n_dims} dimensions")
        dims = self._numbers(f"{n_dims}Q")
        kind, at = self._numbers("IQ")
        return name, dims[::-1], kind, at

    def _mapped(self, start: int, shape: tuple[int, ...], kind: int, path: Path) -> Entry:
        elements = int(np.prod([int(n) for n in shape], dtype=object))
        if kind in PLAIN:
            n_bytes = elements * PLAIN[kind].itemsize
        elif kind in BLOCKS and len(shape) == 2:
            _, of_block, block_bytes = BLOCKS[kind]
            if shape[-1] % of_block:
                raise ValueError(f"rows of {shape[-1]} weights are no whole blocks")
            n_bytes = elements // of_block * block_bytes
        else:
            raise ModelUnsupported(f"{path} has tensors of ggml type {kind}, which is not read", path=path)
        return Entry(shape, kind, np.frombuffer(self._data, np.uint8, n_bytes, start))
