"""Eight bits a value, with a scale for each token and head, around the chunk's mean of each channel.

    segment   integers [K, C, D] of 8 bits | scales [K, C] | centres [K, D]      value = centre + integer * scale

There are two of each, keys' and then values'; scales and centres are bf16, whose range is that of all KV. A scale is the
largest distance of the head's D values from their centres over 127. Keys have channels that lie far from 0 for all
tokens: centres, which are a few bytes a chunk, leave less than a third of the error there.

A product of integer and scale is exact in 32 bits and a value is rounded once, so that every CPU decodes the same. A head
with a value that is no number is NaN for that token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blendserve.store.codecs.base import Buffer, ChunkShape, Coding, Pair
from blendserve.store.codecs.raw import Raw, aligned

MOST = 127


class Int8(Raw):
    """About half of 16-bit KV."""

    keeps_states = is_lossless = False
    coding = Coding("int8")

    @classmethod
    def segment_bytes(cls, shape: ChunkShape, l: int) -> int:
        """0 for a chunk without tokens."""
        n_tokens = shape.n_tokens
        heads, dim, value_dim = shape.layers[l]
        return heads * (n_tokens * (dim + value_dim + 4) + 2 * (dim + value_dim)) if n_tokens else 0

    def expected_bytes(self, raw_bytes: int) -> int:
        return raw_bytes * 33 // 64  # of 16 bits and 64 values a head

    def segment(self, keys: Tensor, values: Tensor) -> bytes:
        if not keys.shape[1]:
            return b""
        parts = (part for pair in zip(_coded(keys), _coded(values), strict=True) for part in pair)
        return b"".join(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in parts)

    def decode(self, shape: ChunkShape, l: int, segment: Buffer) -> Pair:
        n_tokens = shape.n_tokens
        heads, *dims = shape.layers[l]
        # scales and centres are exact in bf16, but need not be in fp16
        working = shape.dtype if shape.dtype == torch.bfloat16 else torch.float32
        count = heads * n_tokens * sum(dims)
        n_scales = heads * n_tokens
        numbers = torch.frombuffer(segment, dtype=torch.int8, count=count)
        integers = torch.split(numbers, [n_scales * d for d in dims])
        rest = torch.split(
            aligned(segment, torch.bfloat16, count), [n_scales] * 2 + [heads * d for d in dims]
        )
        decoded = []
        for dim, *parts in zip(dims, rest[2:], integers, rest[:2], strict=True):
            sizes = (1, dim), (n_tokens, dim), (n_tokens, 1)
            parts = [x.view(heads, *size).to(working) for x, size in zip(parts, sizes, strict=True)]
            decoded.append(torch.addcmul(*parts).to(shape.dtype))
        keys, values = decoded
        return keys, values


def _coded(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys or values [K, C, D] -> integers, scales and centres."""
    wide = x.detach().cpu().float()
    centres = wide.nan_to_num(0.0, 0.0, 0.0).mean(dim=1, keepdim=True).to(torch.bfloat16)
    wide = wide - centres.float()
    scales = (wide.abs().amax(dim=-1, keepdim=True) / MOST).to(torch.bfloat16)  # [K, C, 1]
    shares = wide / scales.float().clamp(min=torch.finfo(torch.float32).tiny)
    return shares.nan_to_num(0.0).round().clamp(-MOST, MOST).to(torch.int8), scales, centres
