"""Attention of contiguous rows on a GPU: chunk precompute, full prefill, decoding.

The last row sees every key, so a causal mask aligned at the bottom right is causal by position. flash-attn serves where
it is installed, else torch's FlashAttention. cuDNN's attention is left out: it plans for tens of milliseconds at each new
length, and nearly every prompt has a new one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from blendserve.kernels.cuda.available import capability, flash_attn
from blendserve.kernels.rows import AttentionPlan
from blendserve.kernels.types import AttentionSpec

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
HALVES = {torch.bfloat16, torch.float16}
MAX_DIM = 256


def fits_flash(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> bool:
    """Whether flash-attn runs on this GPU (Ampere or later) and supports these tensors."""
    return (
        plan.is_contiguous
        and _halves(q, keys, values)
        and capability(q.device) >= (8, 0)
        and flash_attn() is not None
    )


def flash(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
    """q [H, S, D] over keys and values [K, T, D] -> [S, H * D], in flash-attn."""
    package = flash_attn()
    assert package is not None, "ask `fits_flash` first"
    left = -1 if spec.window is None else spec.window - 1
    parts = (x.transpose(0, 1)[None] for x in (q, keys[:, : plan.kv_len], values[:, : plan.kv_len]))
    softcap = {} if spec.softcap is None else {"softcap": spec.softcap}  # older versions have none
    out: Tensor = package.flash_attn_func(
        *parts, softmax_scale=spec.scale, causal=True, window_size=(left, 0 if left >= 0 else -1), **softcap
    )
    return out[0].reshape(q.shape[1], -1)


def fits_sdpa(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> bool:
    """Whether torch's can: it has no softcap and no window."""
    return (
        plan.is_contiguous
        and _halves(q, keys, values)
        and spec.softcap is None
        and (spec.window is None or spec.window >= plan.kv_len)
    )


def sdpa(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
    """The same in torch's scaled_dot_product_attention."""
    n_rows, end = q.shape[1], plan.kv_len
    mask = _causal(n_rows, end) if 1 < n_rows < end else None
    with sdpa_kernel(BACKENDS):
        out = F.scaled_dot_product_attention(
            q[None],
            keys[None, :, :end],
            values[None, :, :end],
            attn_mask=mask,
            is_causal=1 < n_rows == end,
            scale=spec.scale,
            enable_gqa=len(q) != len(keys),
        )
    return out[0].transpose(0, 1).reshape(n_rows, -1)


def _causal(n_rows: int, end: int) -> Tensor:
    """The last rows of `end`, as an object: nothing of S x T is made."""
    from torch.nn.attention.bias import causal_lower_right  # start-up: all of torch's compiler, over a second

    return causal_lower_right(n_rows, end)


def _halves(q: Tensor, keys: Tensor, values: Tensor) -> bool:
    parts = (q, keys, values)
    return (
        q.device.type == "cuda"
        and q.dtype in HALVES
        and all(x.dtype == q.dtype and x.stride(-1) == 1 for x in parts)
        and q.shape[-1] <= MAX_DIM
        and not any(x.requires_grad for x in parts)
    )
