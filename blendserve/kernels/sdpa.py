"""Attention by torch's scaled_dot_product_attention: of any rows on a CPU, of contiguous rows on a GPU.

The last row sees every key, so a causal mask aligned at the bottom right is causal by position.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from blendserve.kernels.cuda.available import are_supported
from blendserve.kernels.rows import AttentionPlan
from blendserve.kernels.types import AttentionSpec

# Without cuDNN's, which plans for tens of milliseconds at each new length: nearly every prompt has a new one.
GPU_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
GPU_DTYPES = {torch.bfloat16, torch.float16}
BLOCK = 128  # rows with one mask on a CPU, where torch converts it to fp32


def supports(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> bool:
    """There is no softcap and no sink, and on a GPU no window that hides a key."""
    if spec.softcap is not None or spec.sinks is not None or not q.shape[1]:
        return False
    if q.device.type == "cpu":
        return True
    if not plan.is_contiguous:  # first: the others' `kv_len` may wait for the GPU
        return False
    hides_none = spec.window is None or spec.window >= plan.kv_len
    return hides_none and are_supported(GPU_DTYPES, q, keys, values)


def attend(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
    """ops.attend: q [H, S, D] over keys and values [K, T, D] -> [S, H * D]."""
    n_rows = q.shape[1]
    end = plan.kv_len
    on_gpu = q.device.type == "cuda"
    is_causal = plan.is_contiguous and (spec.window is None or spec.window >= end)
    if is_causal and (on_gpu or n_rows in (1, end)):
        mask = _causal_suffix(n_rows, end) if 1 < n_rows < end else None
        with sdpa_kernel(GPU_BACKENDS) if on_gpu else nullcontext():
            return _sdpa(q, keys[:, :end], values[:, :end], spec.scale, mask, is_causal=1 < n_rows == end)
    out = torch.empty(n_rows, q.shape[0] * values.shape[2], dtype=q.dtype)
    for start in range(0, n_rows, BLOCK):
        stop = min(start + BLOCK, n_rows)
        seen = plan.keys_seen(start, stop)
        mask = None if stop == start + 1 else ~plan.hidden_keys(slice(start, stop), seen)
        out[start:stop] = _sdpa(q[:, start:stop], keys[:, seen], values[:, seen], spec.scale, mask)
    return out


def _sdpa(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None, is_causal: bool = False
) -> Tensor:
    """[H, S, D] over [K, T, D] -> [S, H * D]"""
    out = F.scaled_dot_product_attention(
        q[None],
        keys[None],
        values[None],
        mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=len(q) > len(keys),
    )
    return out[0].transpose(0, 1).reshape(q.shape[1], -1)


def _causal_suffix(n_rows: int, end: int) -> Tensor:
    """The last rows of `end`, as an object: no S x T mask is made."""
    from torch.nn.attention.bias import causal_lower_right  # start-up: all of torch's compiler, over a second

    return causal_lower_right(n_rows, end)
