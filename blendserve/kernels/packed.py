"""Quantised weights in strips of 16 outputs, as native kernels read them: cpu/strips.h has the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

STRIP = 16  # outputs
UNIT = 32  # inputs whose codes lie together
QUAD = [0, 2, 1, 3]  # the bytes of a word -> its inputs
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # IQ4's values


@dataclass(frozen=True, slots=True)
class BlockKind:
    """A kind of blocks of GGUF.

    A weight is d * scale * (code - offset) - dmin * min. Kinds of 32 inputs have no scales and minima beside d and dmin.
    """

    form: int  # number in `enum ggml_type`, and of the strips
    inputs: int  # of a block
    n_bytes: int  # of a block of the file
    planes: tuple[int, ...]  # bits of a code, from the lowest
    group: int = 32  # inputs of one scale
    has_min: bool = False
    offset: int = 0
    is_table: bool = False  # codes are places in TABLE

    @property
    def n_small(self) -> int:
        """Scales and minima of an output's block."""
        return self.inputs // self.group * (1 + self.has_min) if self.inputs > UNIT else 0

    @property
    def strip_bytes(self) -> int:
        """Bytes of a block of STRIP outputs."""
        return STRIP * (2 * (1 + self.has_min) + self.n_small + self.inputs * sum(self.planes) // 8)


KINDS = {  # by the names of the package gguf
    "Q4_0": BlockKind(2, 32, 18, (4,), offset=8),
    "Q4_1": BlockKind(3, 32, 20, (4,), has_min=True),
    "Q5_0": BlockKind(6, 32, 22, (4, 1), offset=16),
    "Q5_1": BlockKind(7, 32, 24, (4, 1), has_min=True),
    "Q8_0": BlockKind(8, 32, 34, (4, 4), offset=128),
    "Q2_K": BlockKind(10, 256, 84, (2,), 16, has_min=True),
    "Q3_K": BlockKind(11, 256, 110, (2, 1), 16, offset=4),
    "Q4_K": BlockKind(12, 256, 144, (4,), has_min=True),
    "Q5_K": BlockKind(13, 256, 176, (4, 1), has_min=True),
    "Q6_K": BlockKind(14, 256, 210, (4, 2), 16, offset=32),
    "IQ4_NL": BlockKind(20, 32, 18, (4,), is_table=True),
    "IQ4_XS": BlockKind(23, 256, 136, (4,), is_table=True),
}


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """The weights of a linear layer or an embedding, quantised. What is computed with them has `dtype`."""

    kind: str
    shape: tuple[int, int]  # [outputs, inputs]
    dtype: torch.dtype
    strips: Tensor  # bytes

    device = torch.device("cpu")

    @property
    def form(self) -> int:
        """The number by which kernels know the kind."""
        return KINDS[self.kind].form

    def dim(self) -> int:
        return 2

    def is_contiguous(self) -> bool:
        return True

    def split(self, outputs: Sequence[int]) -> list[PackedMatrix]:
        """Parts of so many outputs each. Raises ValueError where a strip would be cut."""
        if any(n % STRIP for n in outputs[:-1]):
            raise ValueError(
                f"quantised weights of several layers are not a multiple of {STRIP} outputs each"
            )
        strips = self.strips.view(-(-self.shape[0] // STRIP), -1)
        ends = list(accumulate(outputs))
        return [
            replace(
                self,
                shape=(n, self.shape[1]),
                strips=strips[(end - n) // STRIP : -(-end // STRIP)].reshape(-1),
            )
            for n, end in zip(outputs, ends, strict=True)
        ]

    def numbers(self) -> Tensor:
        """The weights in fp32 [outputs, inputs], slowly: what kernels are compared with."""
        kind = KINDS[self.kind]
        outputs, inputs = self.shape
        n_heads = 1 + kind.has_min
        blocks = self.strips.view(-1, inputs // kind.inputs, kind.strip_bytes)  # [O / 16, B, bytes]
        n_blocks = blocks.shape[:2]
        sizes = 2 * STRIP * n_heads, STRIP * kind.n_small, STRIP * kind.inputs * sum(kind.planes) // 8
        head, small, codes = torch.split(blocks, list(sizes), dim=2)
        halves = head.contiguous().view(torch.float16).float()
        scales = list(halves.view(*n_blocks, n_heads, 1, STRIP).unbind(2))
        if kind.n_small:
            own = small if kind.has_min else small.view(torch.int8)
            parts = own.float().view(*n_blocks, n_heads, -1, STRIP).unbind(2)
            scales = [d * part for d, part in zip(scales, parts, strict=True)]  # [O / 16, B, groups, 16]
        scales = [x.repeat_interleave(kind.inputs // x.shape[2], dim=2) for x in scales]
        values = _values(kind, codes.reshape(*n_blocks, -1, sum(kind.planes), STRIP, 4)).float()
        made: Tensor = scales[0] * (values - kind.offset if kind.offset else values)
        made = made - scales[1] if kind.has_min else made  # [O / 16, B, inputs of a block, 16]
        return made.permute(0, 3, 1, 2).reshape(-1, inputs)[:outputs]


def _values(kind: BlockKind, vectors: Tensor) -> Tensor:
    """Vectors of codes [O / 16, B, units, bits, 16, 4] -> what they stand for [O / 16, B, inputs of a block, 16]."""
    low = 0
    codes = torch.zeros((), dtype=torch.int64)
    for bits in kind.planes:
        part = vectors[:, :, :, low : low + bits]
        mask = (1 << bits) - 1
        quads = torch.stack([(part >> at) & mask for at in range(0, 8, bits)], dim=4)
        codes = codes + (quads.flatten(3, 4).long() << low)  # [.., 8 quads, 16, 4]
        low += bits
    by_input = codes[..., QUAD].permute(0, 1, 2, 3, 5, 4).flatten(2, 4)
    return torch.tensor(TABLE)[by_input] if kind.is_table else by_input
