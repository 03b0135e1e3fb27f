"""Attention of several chunks after one prefix in a single launch, by flash-attn's variable lengths.

A row sees the prefix and its own chunk up to itself, which is "causal" aligned at the bottom right of each pair. Where
flash-attn is missing, chunks attend one after another: the same numbers, in more launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blendserve.core import Span
from blendserve.kernels.chunks import ChunkStack
from blendserve.kernels.cuda.available import capability, flash_attn
from blendserve.kernels.cuda.dense import HALVES, MAX_DIM
from blendserve.kernels.rows import AttentionPlan
from blendserve.kernels.types import AttentionSpec


def fits(
    q: Tensor, k: Tensor, v: Tensor, prefix_kv: tuple[Tensor, Tensor], spec: AttentionSpec, stack: ChunkStack
) -> bool:
    """Whether flash-attn runs on this GPU and supports these tensors."""
    return (
        q.device.type == "cuda"
        and q.dtype == k.dtype
        and q.dtype in HALVES
        and q.shape[-1] <= MAX_DIM
        and capability(q.device) >= (8, 0)
        and hasattr(flash_attn(), "flash_attn_varlen_func")
    )


def attend(
    q: Tensor, k: Tensor, v: Tensor, prefix_kv: tuple[Tensor, Tensor], spec: AttentionSpec, stack: ChunkStack
) -> Tensor:
    """ops.attend_chunks."""
    pack = stack.packing
    packed = (
        torch.cat([ahead, own], dim=1).index_select(1, pack.key_index).transpose(0, 1)
        for ahead, own in zip(prefix_kv, (k, v), strict=True)
    )
    package = flash_attn()
    assert package is not None, "ask `fits` first"
    left = -1 if spec.window is None else spec.window - 1
    softcap = {} if spec.softcap is None else {"softcap": spec.softcap}  # older versions have none
    out: Tensor = package.flash_attn_varlen_func(
        q.transpose(0, 1),
        *packed,
        cu_seqlens_q=pack.cu_seqlens_q,
        cu_seqlens_k=pack.cu_seqlens_k,
        max_seqlen_q=pack.max_seqlen_q,
        max_seqlen_k=pack.max_seqlen_k,
        softmax_scale=spec.scale,
        causal=True,
        window_size=(left, 0 if left >= 0 else -1),
        **softcap,
    )
    return out.reshape(q.shape[1], -1)


def packed_twice(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
    """ops.attend of contiguous rows, for the self-check: two equal chunks, of which the second is returned."""
    n, end = q.shape[1], plan.kv_len
    front = keys[:, : end - n], values[:, : end - n]
    rows, own, plain = (
        torch.cat([x, x], dim=1) for x in (q, keys[:, end - n : end], values[:, end - n : end])
    )
    stack = ChunkStack([Span(0, n), Span(n, 2 * n)], end - n, q.shape[0] // keys.shape[0], q.device)
    return attend(rows, own, plain, front, spec, stack)[n:]
