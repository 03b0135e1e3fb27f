"""Reads llama.cpp's GGUF files: metadata, and tensors dequantised with numpy by the formulas of ggml-quants.c.

Layout: magic, version, counts, metadata, tensor table, padding, data. Every length in the file is checked against the
bytes that are left before anything is allocated for it.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blendserve.errors import ModelError

Bytes = npt.NDArray[np.uint8]  # [N, bytes of a block]
Floats = npt.NDArray[np.float32]  # [N, elements of a block]

SCALARS = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
)  # struct codes by value type
STRING, ARRAY = 8, 9
CHUNK = 1 << 16  # blocks that are dequantised at once


class UnsupportedGguf(ModelError):
    """The file is in order, but this reader does not know its architecture, tokenizer or quantisation."""


class Quantisation(NamedTuple):
    """How a block of elements is stored."""

    name: str
    elements: int
    n_bytes: int
    values: Callable[[Bytes], Floats]


class StoredTensor(NamedTuple):
    """Where a tensor lies in the file."""

    shape: tuple[int, ...]  # in torch's order
    quantisation: int
    start: int


class Gguf:
    """An open description of a file; tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError for a file that is damaged or no GGUF file."""
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        try:
            with path.open("rb") as file:
                self._read(_Cursor(self, file))
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}", path=path) from error
        except UnicodeDecodeError as error:
            raise self.damaged("its metadata has text that is not UTF-8") from error

    @property
    def scales_rope(self) -> bool:
        """Whether its angles are not those of its base frequency alone, as in Llama 3.1 or Gemma 3 from 4B."""
        kinds = {str(kind) for key, kind in self.metadata.items() if key.endswith(".rope.scaling.type")}
        return "rope_freqs.weight" in self.tensors or bool(kinds - {"none"})

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"the GGUF file {self.path} is damaged: {what}. Download it again", path=self.path)

    def number(self, key: str, default: float | None = None) -> Any:
        """A positive number of the metadata. Raises ModelError where it is missing or anything else."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.damaged(f"its metadata gives {value!r} for {key!r}")
        return value

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tensor, dequantised in fp32 and rounded to `dtype` once. Raises ModelError, UnsupportedGguf."""
        stored = self._stored(name)
        quantisation = QUANTISATIONS[stored.quantisation]
        out = torch.empty(stored.shape, dtype=dtype)
        flat, n_bytes = out.view(-1), quantisation.n_bytes
        n_blocks = len(flat) // quantisation.elements
        with self.path.open("rb") as file:
            file.seek(stored.start)
            for first in range(0, n_blocks, CHUNK):
                count = min(CHUNK, n_blocks - first)
                data = bytearray(count * n_bytes)  # writable, as torch wants it
                if file.readinto(data) < len(data):
                    raise self.damaged(f"it ends within tensor {name!r}")
                values = quantisation.values(np.frombuffer(data, np.uint8).reshape(count, n_bytes))
                start = first * quantisation.elements
                flat[start : start + values.size] = torch.from_numpy(values.reshape(-1))
        return out

    def _stored(self, name: str) -> StoredTensor:
        stored = self.tensors.get(name)
        if stored is None:
            raise self.damaged(f"it has no tensor {name!r}")
        return stored

    def _read(self, cursor: _Cursor) -> None:
        if cursor.take(4) != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file: it does not begin with 'GGUF'", path=self.path)
        version, n_tensors, n_values = cursor.numbers("IQQ")
        if version not in {2, 3}:
            raise UnsupportedGguf(f"{self.path} has GGUF version {version}; versions 2 and 3 are supported")
        for _ in range(n_values):
            key = cursor.text()
            self.metadata[key] = cursor.value(cursor.number("I"))
        table = [cursor.tensor() for _ in range(n_tensors)]
        alignment = int(self.number("general.alignment", 32))
        data = -(-cursor.position // alignment) * alignment
        for name, shape, kind, offset in table:
            n, quantisation = math.prod(shape), QUANTISATIONS.get(kind)
            if quantisation is None and shape:
                known = ", ".join(q.name for q in QUANTISATIONS.values())
                raise UnsupportedGguf(
                    f"tensor {name!r} of {self.path} has quantisation type {kind}; supported are {known}"
                )
            if quantisation is None or not shape or n == 0 or shape[-1] % quantisation.elements:
                raise self.damaged(f"tensor {name!r} has type {kind} and shape {list(shape)}")
            end = data + offset + n // quantisation.elements * quantisation.n_bytes
            if end > cursor.size:
                raise self.damaged(f"tensor {name!r} ends at byte {end:,}, but the file has {cursor.size:,}")
            self.tensors[name] = StoredTensor(shape, kind, data + offset)


class _Cursor:
    """Reads forward through the header; what goes beyond the file's end is refused before it is read."""

    def __init__(self, gguf: Gguf, file: BinaryIO) -> None:
        self.gguf, self.file = gguf, file
        self.size, self.position = os.fstat(file.fileno()).st_size, 0

    def take(self, n_bytes: int) -> bytes:
        data = self.file.read(n_bytes) if n_bytes <= self.size - self.position else b""
        if len(data) < n_bytes:
            raise self.gguf.damaged(f"its header needs {n_bytes:,} bytes at byte {self.position:,}")
        self.position += n_bytes
        return data

    def numbers(self, code: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        """One value of the metadata, of the type that the file names."""
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            element, count = self.numbers("IQ")
            if element in SCALARS:
                width = struct.calcsize(f"<{SCALARS[element]}")
                data = self.take(count * width)
                return [value for (value,) in struct.iter_unpack(f"<{SCALARS[element]}", data)]
            if element == STRING:
                return [self.text() for _ in range(count)]
            kind = element
        if kind not in SCALARS:
            raise self.gguf.damaged(f"its metadata has a value of type {kind} at byte {self.position:,}")
        return self.number(SCALARS[kind])

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, n_dims = self.text(), self.number("I")
        dims = self.numbers(f"{n_dims}Q") if n_dims <= 4 else ()
        return (name, tuple(reversed(dims)), *self.numbers("IQ"))


def _half(blocks: Bytes, at: int) -> Floats:
    """The fp16 at a byte of each block -> fp32 [N, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _unpack(data: Bytes, shifts: Sequence[int], mask: int, width: int) -> Bytes:
    """Small numbers packed into bytes: for every `width` bytes, all at the first shift, then all at the next."""
    shift = np.array(shifts, np.uint8).reshape(1, 1, -1, 1)
    unpacked: Bytes = (data.reshape(len(data), -1, 1, width) >> shift) & np.uint8(mask)
    return unpacked.reshape(len(data), -1)


def _high_bits(blocks: Bytes) -> Bytes:
    """The fifth bits of Q5_0 and Q5_1 [N, 4] -> [N, 32], each worth 16."""
    bits: Bytes = np.unpackbits(blocks, axis=1, bitorder="little") << np.uint8(4)
    return bits


def _scales_and_minima(data: Bytes) -> tuple[Floats, Floats]:
    """Twelve bytes of Q4_K and Q5_K -> eight 6-bit scales and eight 6-bit minima."""
    low, mid, high = data[:, :4], data[:, 4:8], data[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    minima = np.concatenate([mid & 63, (high >> 4) | ((mid >> 2) & 48)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _grouped(scale: Floats, q: npt.NDArray[Any], minimum: Floats | None = None) -> Floats:
    """scale [N, G] and minimum [N, G] of G groups of q [N, E] -> values [N, E]"""
    values = scale[:, :, None] * q.reshape(*scale.shape, -1).astype(np.float32)
    if minimum is not None:
        values -= minimum[:, :, None]
    return values.reshape(q.shape)


def _q4_0(b: Bytes) -> Floats:
    return _half(b, 0) * (_unpack(b[:, 2:], (0, 4), 15, 16).astype(np.float32) - 8)


def _q4_1(b: Bytes) -> Floats:
    return _half(b, 0) * _unpack(b[:, 4:], (0, 4), 15, 16).astype(np.float32) + _half(b, 2)


def _q5_0(b: Bytes) -> Floats:
    q = _unpack(b[:, 6:], (0, 4), 15, 16) | _high_bits(b[:, 2:6])
    return _half(b, 0) * (q.astype(np.float32) - 16)


def _q5_1(b: Bytes) -> Floats:
    q = _unpack(b[:, 8:], (0, 4), 15, 16) | _high_bits(b[:, 4:8])
    return _half(b, 0) * q.astype(np.float32) + _half(b, 2)


def _q8_0(b: Bytes) -> Floats:
    return b[:, 2:].view(np.int8).astype(np.float32) * _half(b, 0)


def _q2_k(b: Bytes) -> Floats:
    scales = b[:, :16]
    q = _unpack(b[:, 16:80], (0, 2, 4, 6), 3, 32)
    return _grouped(_half(b, 80) * (scales & 15), q, _half(b, 82) * (scales >> 4))


def _q3_k(b: Bytes) -> Floats:
    q = _unpack(b[:, 32:96], (0, 2, 4, 6), 3, 32).astype(np.int8)
    q -= (4 - (_unpack(b[:, :32], range(8), 1, 32) << 2)).astype(
        np.int8
    )  # a set bit means: nothing to subtract
    low, high = _unpack(b[:, 96:104], (0, 4), 15, 8), _unpack(b[:, 104:108], (0, 2, 4, 6), 3, 4)
    return _grouped(_half(b, 108) * ((low | (high << 4)).astype(np.float32) - 32), q)


def _q4_k(b: Bytes) -> Floats:
    scales, minima = _scales_and_minima(b[:, 4:16])
    return _grouped(_half(b, 0) * scales, _unpack(b[:, 16:], (0, 4), 15, 32), _half(b, 2) * minima)


def _q5_k(b: Bytes) -> Floats:
    scales, minima = _scales_and_minima(b[:, 4:16])
    q = _unpack(b[:, 48:], (0, 4), 15, 32) | (_unpack(b[:, 16:48], range(8), 1, 32) << 4)
    return _grouped(_half(b, 0) * scales, q, _half(b, 2) * minima)


def _q6_k(b: Bytes) -> Floats:
    q = _unpack(b[:, :128], (0, 4), 15, 64) | (_unpack(b[:, 128:192], (0, 2, 4, 6), 3, 32) << 4)
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return _grouped(_half(b, 208) * scales, q.astype(np.int8) - np.int8(32))


def _bf16(b: Bytes) -> Floats:
    high: npt.NDArray[np.uint32] = b.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return high.view(np.float32)


QUANTISATIONS = {  # by the numbers of `enum ggml_type` in ggml.h
    0: Quantisation("F32", 1, 4, lambda b: b.view(np.float32)),
    1: Quantisation("F16", 1, 2, lambda b: b.view(np.float16).astype(np.float32)),
    2: Quantisation("Q4_0", 32, 18, _q4_0),
    3: Quantisation("Q4_1", 32, 20, _q4_1),
    6: Quantisation("Q5_0", 32, 22, _q5_0),
    7: Quantisation("Q5_1", 32, 24, _q5_1),
    8: Quantisation("Q8_0", 32, 34, _q8_0),
    10: Quantisation("Q2_K", 256, 84, _q2_k),
    11: Quantisation("Q3_K", 256, 110, _q3_k),
    12: Quantisation("Q4_K", 256, 144, _q4_k),
    13: Quantisation("Q5_K", 256, 176, _q5_k),
    14: Quantisation("Q6_K", 256, 210, _q6_k),
    30: Quantisation("BF16", 1, 2, _bf16),
}
