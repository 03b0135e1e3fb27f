"""Attention of contiguous rows on a GPU by the package flash-attn, where it is installed.

The last row sees every key, so a causal mask aligned at the bottom right is causal by position.
"""

from __future__ import annotations

from torch import Tensor

from blendserve.kernels.cuda.available import capability, flash_attn
from blendserve.kernels.rows import AttentionPlan
from blendserve.kernels.sdpa import GPU_DTYPES, MAX_DIM
from blendserve.kernels.types import AttentionSpec


def supports(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> bool:
    """Whether flash-attn is installed, runs on this GPU (Ampere or later) and supports these tensors."""
    parts = (q, keys, values)
    return (
        q.device.type == "cuda"
        and plan.is_contiguous
        and all(x.dtype == q.dtype in GPU_DTYPES and x.stride(-1) == 1 for x in parts)
        and q.shape[-1] <= MAX_DIM
        and not any(x.requires_grad for x in parts)
        and capability(q.device) >= (8, 0)
        and flash_attn() is not None
    )


def attend(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
    """ops.attend: q [H, S, D] over keys and values [K, T, D] -> [S, H * D]."""
    package = flash_attn()
    assert package is not None, "ask `supports` first"
    left = -1 if spec.window is None else spec.window - 1
    parts = (x.transpose(0, 1)[None] for x in (q, keys[:, : plan.kv_len], values[:, : plan.kv_len]))
    softcap = {} if spec.softcap is None else {"softcap": spec.softcap}  # older versions have none
    out: Tensor = package.flash_attn_func(
        *parts, softmax_scale=spec.scale, causal=True, window_size=(left, 0 if left >= 0 else -1), **softcap
    )
    return out[0].reshape(q.shape[1], -1)
