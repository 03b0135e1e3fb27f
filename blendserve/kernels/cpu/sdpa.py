"""Attention by torch's scaled_dot_product_attention on a CPU.

Causal where the rows are all positions, without a mask for the last row alone, else by a mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from blendserve.kernels.rows import AttentionPlan
from blendserve.kernels.types import AttentionSpec

BLOCK = 128  # rows with one mask, which torch converts to fp32


def fits(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> bool:
    """Scores have no softcap."""
    return q.device.type == "cpu" and spec.softcap is None and q.shape[1] > 0


def attend(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
    """ops.attend for what `fits`: q [H, S, D] over keys and values [K, T, D] -> [S, H * D]."""
    n_heads, n_rows, dim = q.shape
    if plan.is_contiguous and n_rows == plan.kv_len and (spec.window is None or spec.window >= n_rows):
        return _mixed(q, keys[:, :n_rows], values[:, :n_rows], spec.scale, is_causal=n_rows > 1)
    out = torch.empty(n_rows, n_heads * dim, dtype=q.dtype)
    at: list[int] = plan.positions_on_host.tolist()
    for start in range(0, n_rows, BLOCK):
        stop = min(start + BLOCK, n_rows)
        seen = slice(0 if spec.window is None else max(0, at[start] - spec.window + 1), at[stop - 1] + 1)
        mask = None if stop == start + 1 else _mask(plan.positions[start:stop], seen, spec.window)
        parts = q[:, start:stop], keys[:, seen], values[:, seen]
        out[start:stop] = _mixed(*parts, spec.scale, attn_mask=mask)
    return out


def _mixed(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """[H, S, D] over [K, T, D] -> [S, H * D]"""
    mixed = F.scaled_dot_product_attention(
        q[None],
        keys[None],
        values[None],
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=len(q) > len(keys),
    )
    return mixed[0].transpose(0, 1).reshape(q.shape[1], -1)


def _mask(row: Tensor, seen: slice, window: int | None) -> Tensor:
    """[S, keys seen], True for visible keys."""
    key, row = torch.arange(seen.start, seen.stop)[None], row[:, None]
    looks = key <= row
    return looks if window is None else looks & (key > row - window)
