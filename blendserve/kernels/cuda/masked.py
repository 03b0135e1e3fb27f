"""Rows at any positions by SDPA with a boolean mask, a block of rows at a time: what is left without triton.

The query heads of one kv head are stacked as more rows of it, so that keys are never repeated; a block sees keys up to
its last position, and no mask is larger than MASK_BUDGET.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from blendserve.kernels.cuda.dense import BACKENDS
from blendserve.kernels.rows import RowPlan
from blendserve.kernels.types import AttentionSpec

BLOCK = 512  # rows; larger ones waste work beyond the diagonal
MASK_BUDGET = 2**26  # elements of one block's mask, [g * B, n]


def fits(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan) -> bool:
    """It needs a GPU, where it is worth it, and knows no softcap."""
    return q.device.type == "cuda" and spec.softcap is None


def attend(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan) -> Tensor:
    """q [H, S, D] over keys and values [K, T, D] -> [S, H * D]. Waits for the device if the rows are not known here."""
    n_heads, n_rows, dim = q.shape
    n_kv, group = keys.shape[0], n_heads // keys.shape[0]
    at: list[int] = plan.host.tolist()
    out = torch.empty(n_rows, n_kv, group, dim, dtype=q.dtype, device=q.device)
    size = max(1, min(BLOCK, MASK_BUDGET // (group * max(plan.end, 1))))
    for start in range(0, n_rows, size):
        stop = min(start + size, n_rows)
        lo = 0 if spec.window is None else max(0, at[start] - spec.window + 1)
        hi = at[stop - 1] + 1
        rows = q[:, start:stop].reshape(1, n_kv, group * (stop - start), dim)
        mask = _seen(plan.positions[start:stop], lo, hi, spec.window).repeat(group, 1)
        with sdpa_kernel(BACKENDS):
            mixed = F.scaled_dot_product_attention(
                rows, keys[None, :, lo:hi], values[None, :, lo:hi], attn_mask=mask, scale=spec.scale
            )
        out[start:stop] = mixed.view(n_kv, group, stop - start, dim).permute(2, 0, 1, 3)
    return out.view(n_rows, n_heads * dim)


def _seen(row: Tensor, lo: int, hi: int, window: int | None) -> Tensor:
    """[B, hi - lo], True where a row sees a key."""
    key = torch.arange(lo, hi, device=row.device)[None]
    seen = key <= row[:, None]
    return seen if window is None else seen & (key > row[:, None] - window)
