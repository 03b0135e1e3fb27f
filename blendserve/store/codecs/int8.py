"""Eight bits a value, with a scale for each token and head, around the chunk's mean of each channel.

    segment   integers [2, K, C, D] of 8 bits | scales [2, K, C] | centres [2, K, D]      value = centre + integer * scale

The two of each are keys' and values'; scales and centres are bf16, whose range is that of all KV. A scale is the largest
distance of the head's D values from their centres over 127. Keys have channels that lie far from 0 for all tokens:
centres, which are a few bytes a chunk, leave less than a third of the error there.

A product of integer and scale is exact in 32 bits and a value is rounded once, so that every CPU decodes the same. A head
with a value that is no number is NaN for that token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blendserve.store.codecs.base import Buffer, ChunkShape, Coding, Pair
from blendserve.store.codecs.raw import Raw, aligned

MOST = 127


class Int8(Raw):
    """About half of 16-bit KV."""

    coding = Coding("int8")

    @classmethod
    def segment_bytes(cls, shape: ChunkShape, l: int) -> int:
        """0 for a chunk without tokens."""
        n_tokens, (heads, dim) = shape.n_tokens, shape.layers[l]
        return 2 * heads * (n_tokens * (dim + 2) + 2 * dim) if n_tokens else 0

    def expected_bytes(self, raw_bytes: int) -> int:
        return raw_bytes * 33 // 64  # of 16 bits and 64 values a head

    def segment(self, keys: Tensor, values: Tensor) -> bytes:
        both = torch.stack((keys.detach(), values.detach())).cpu().float()  # [2, K, C, D]
        if not both.numel():
            return b""
        centres = both.nan_to_num(0.0, 0.0, 0.0).mean(dim=2, keepdim=True).to(torch.bfloat16)
        both -= centres.float()
        scales = (both.abs().amax(dim=-1, keepdim=True) / MOST).to(torch.bfloat16)  # [2, K, C, 1]
        shares = both / scales.float().clamp(min=torch.finfo(torch.float32).tiny)
        integers = shares.nan_to_num(0.0).round().clamp(-MOST, MOST).to(torch.int8)
        parts = (part.contiguous().view(-1).view(torch.uint8).numpy() for part in (integers, scales, centres))
        return b"".join(part.tobytes() for part in parts)

    def decode(self, shape: ChunkShape, l: int, segment: Buffer) -> Pair:
        heads, dim = shape.layers[l]
        size = (2, heads, shape.n_tokens, dim)
        # scales and centres are exact in bf16, but need not be in fp16
        working = shape.dtype if shape.dtype == torch.bfloat16 else torch.float32
        integers = torch.frombuffer(segment, dtype=torch.int8, count=math.prod(size)).view(size)
        rest = aligned(segment, torch.bfloat16, integers.numel())
        scales = rest[: math.prod(size[:3])].view(*size[:3], 1)
        centres = rest[scales.numel() :].view(2, heads, 1, dim)
        keys, values = torch.addcmul(*(x.to(working) for x in (centres, integers, scales))).to(shape.dtype)
        return keys, values
