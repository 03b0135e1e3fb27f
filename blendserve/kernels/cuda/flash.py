"""Attention of contiguous rows on a GPU by the package flash-attn, where it is installed.

The last row sees every key, so a causal mask aligned at the bottom right is causal by position. The chunks of a stack
attend in one launch, by variable lengths: each row sees the prefix and its own chunk up to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blendserve.kernels.chunks import ChunkStack
from blendserve.kernels.cuda.available import are_supported, capability, flash_attn
from blendserve.kernels.rows import AttentionPlan
from blendserve.kernels.sdpa import GPU_DTYPES
from blendserve.kernels.types import AttentionSpec


def supports(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> bool:
    """Whether contiguous rows are supported, as in `supports_chunks`."""
    return plan.is_contiguous and supports_chunks(q, keys, values, (), spec)


def supports_chunks(
    q: Tensor, k: Tensor, v: Tensor, prefix_kv: Sequence[Tensor], spec: AttentionSpec, *_: object
) -> bool:
    """Whether flash-attn is installed, runs on this GPU (Ampere or later) and supports these tensors; it has no sinks."""
    is_on_gpu = q.device.type == "cuda" and spec.sinks is None and capability(q.device) >= (8, 0)
    is_equal = k.shape[-1] == v.shape[-1]
    return (
        is_on_gpu and is_equal and are_supported(GPU_DTYPES, q, k, v, *prefix_kv) and flash_attn() is not None
    )


def attend(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
    """ops.attend: q [H, S, D] over keys and values [K, T, D] -> [S, H * D]."""
    parts = (x.transpose(0, 1)[None] for x in (q, keys[:, : plan.kv_len], values[:, : plan.kv_len]))
    package: Any = flash_attn()
    out: Tensor = package.flash_attn_func(*parts, **_options(spec))
    return out[0].reshape(q.shape[1], -1)


def attend_chunks(
    q: Tensor, k: Tensor, v: Tensor, prefix_kv: tuple[Tensor, Tensor], spec: AttentionSpec, stack: ChunkStack
) -> Tensor:
    """ops.attend_chunks."""
    packed = (
        torch.cat(pair, dim=1).index_select(1, stack.key_index).transpose(0, 1)
        for pair in zip(prefix_kv, (k, v), strict=True)
    )
    package: Any = flash_attn()
    out: Tensor = package.flash_attn_varlen_func(
        q.transpose(0, 1), *packed, **stack.packing, **_options(spec)
    )
    return out.reshape(q.shape[1], -1)


def _options(spec: AttentionSpec) -> dict[str, Any]:
    left = -1 if spec.window is None else spec.window - 1
    softcap = {} if spec.softcap is None else {"softcap": spec.softcap}  # older versions have none
    return {
        "softmax_scale": spec.scale, "causal": True, "window_size": (left, 0 if left >= 0 else -1), **softcap
    }  # fmt: skip
