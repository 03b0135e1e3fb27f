"""Rows at any positions by FlexAttention: for a GPU on which our own Triton kernel does not serve.

Its block mask is made from the positions alone, block by block; nothing of S x T is made. On a GPU it is compiled, once
for all lengths; on a CPU it runs as torch writes it out, which is for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blendserve.kernels.cuda import scattered
from blendserve.kernels.rows import RowPlan
from blendserve.kernels.types import AttentionSpec

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # rows and keys of a block


def fits(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan) -> bool:
    """Whether these are on a GPU, and it is made for them; compiling it there takes triton."""
    return scattered.fits_gpu(q, keys, values, spec, plan)


def attend(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan) -> Tensor:
    """q [H, S, D] over keys and values [K, T, D] -> [S, H * D]."""
    flex = _flex(q.device.type == "cuda")
    keys, values = keys[:, : plan.end], values[:, : plan.end]  # memory behind them may hold NaN
    out = flex(
        q[None],
        keys[None],
        values[None],
        score_mod=_softcap(spec.softcap),
        block_mask=block_mask(plan.positions, plan.end, spec.window),
        scale=spec.scale,
        enable_gqa=len(q) != len(keys),
    )
    mixed: Tensor = out[0].transpose(0, 1).reshape(q.shape[1], -1)
    return mixed


def block_mask(positions: Tensor, n_keys: int, window: int | None) -> BlockMask:
    """Which blocks of keys each block of rows sees in part, and which whole, from ascending positions [S]."""
    from torch.nn.attention.flex_attention import BlockMask

    starts = torch.arange(0, len(positions), BLOCK, device=positions.device)
    first = positions[starts][:, None]  # [blocks, 1]
    last = positions[(starts + BLOCK - 1).clamp(max=len(positions) - 1)][:, None]
    start = torch.arange(0, n_keys, BLOCK, device=positions.device)[None]
    stop = (start + BLOCK).clamp(max=n_keys) - 1
    seen, whole = start <= last, stop <= first
    if window is not None:
        seen &= stop > first - window
        whole &= start > last - window
    counts, blocks = _ordered(seen & ~whole)
    whole_counts, whole_blocks = _ordered(whole)

    def visible(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        here = positions[row]
        return key <= here if window is None else (key <= here) & (key > here - window)

    return BlockMask.from_kv_blocks(
        counts,
        blocks,
        whole_counts,
        whole_blocks,
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(len(positions), n_keys),
    )


def _ordered(marked: Tensor) -> tuple[Tensor, Tensor]:
    """Marks [rows, keys] of blocks -> how many each row has, and their numbers first, as FlexAttention wants them."""
    order = torch.argsort(marked.int(), dim=-1, descending=True, stable=True)
    return marked.sum(dim=-1)[None, None].int(), order[None, None].int()


def _softcap(cap: float | None) -> Callable[..., Tensor] | None:
    if cap is None:
        return None

    def squeeze(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return squeeze


@cache
def _flex(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
