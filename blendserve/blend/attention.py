"""Attention that is causal by *position*: row i sees key j iff position(j) <= position(i).

Rows may stand anywhere in the prompt, in ascending order; keys fill positions 0 .. T-1. No S x T mask or score matrix is
ever made: rows go in blocks, each block sees keys up to its last position, and only the strip between its first and
last position needs a mask.

        keys ->  0 ............ first ..... last ......... T
    block rows  [  no mask      | diagonal strip |  cut   ]

The query heads that share a kv head are stacked into one matmul, so keys are never repeated.

In bf16 on a CPU that multiplies it, a compiled kernel does the same in one pass (blendserve/native); this is its
reference, and what runs everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from blendserve.models.adapter import AttentionSpec
from blendserve.native import attention as native

MAX_BLOCK = 96  # rows; larger blocks waste work beyond the diagonal, smaller ones fill the matmul badly
SCORE_BUDGET = (
    2**22
)  # elements of one kv head's scores in a block, [g * B, n]: what bounds memory at long contexts


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [start, stop) that attend to keys [lo, hi) together; `mask` [B, hi - masked_from] hides what is not theirs."""

    start: int
    stop: int
    lo: int
    hi: int
    masked_from: int
    mask: Tensor | None  # True = hidden


@dataclass(frozen=True)
class RowPlan:
    """The rows of a prefill: made once, used by every layer with the same window."""

    positions: Tensor  # [S] int64, ascending
    group: int  # query heads a kv head, H / K
    window: int | None

    @cached_property
    def end(self) -> int:
        """How many keys the last row sees."""
        return int(self.positions[-1]) + 1 if len(self.positions) else 0

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """How the plain form cuts them; a compiled kernel has its own way, and these are not made for it."""
        at: list[int] = self.positions.tolist()
        blocks, start = [], 0
        while start < len(at):
            size = max(1, min(MAX_BLOCK, SCORE_BUDGET // (self.group * (at[start] + 1))))
            stop = min(start + size, len(at))
            blocks.append(_block(self.positions, start, stop, at[start], at[stop - 1], self.window))
            start = stop
        return tuple(blocks)


def plan_rows(positions: Tensor, group: int, window: int | None = None) -> RowPlan:
    """The plan for rows at ascending `positions` [S]; group: query heads a kv head, H / K."""
    return RowPlan(positions, group, window)


def _block(positions: Tensor, start: int, stop: int, first: int, last: int, window: int | None) -> Block:
    lo = 0 if window is None else max(0, first - window + 1)
    masked_from = first + 1 if window is None or last < window else lo
    if masked_from > last:
        return Block(start, stop, lo, last + 1, masked_from, None)
    row = positions[start:stop, None]
    key = torch.arange(masked_from, last + 1, device=positions.device)[None]
    hidden = key > row
    if window is not None:
        hidden |= key <= row - window
    return Block(start, stop, lo, last + 1, masked_from, hidden)


def attend(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan) -> Tensor:
    """Rotated queries q [H, S, D] over keys and values [K, T, D] -> [S, H * D].

    Equals softmax(softcap(scale q k^T) + causal mask by position) v; tests/blend/test_attention.py has the plain formula.
    """
    if plan.end > keys.shape[1]:
        raise ValueError(f"a row at position {plan.end - 1} needs more than {keys.shape[1]} keys")
    if native.takes(q, keys, values, spec.scale):
        seen = native.Seen(plan.positions, spec.scale, plan.window, spec.softcap)
        return native.attend(q, keys, values, seen)
    return attend_plainly(q, keys, values, spec, plan)


def attend_plainly(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan) -> Tensor:
    """The same on plain torch, on any device and in any dtype."""
    n_heads, n_rows, dim = q.shape
    n_kv = keys.shape[0]
    group = n_heads // n_kv
    q = q.view(n_kv, group, n_rows, dim)
    out = torch.empty(n_rows, n_kv, group, dim, dtype=q.dtype, device=q.device)
    room = max(((b.stop - b.start) * (b.hi - b.lo) for b in plan.blocks), default=0) * group
    workspace = torch.empty(room, dtype=q.dtype, device=q.device)  # one block of one kv head at a time
    for block in plan.blocks:
        rows, n = block.stop - block.start, block.hi - block.lo
        scores = workspace[: group * rows * n].view(group * rows, n)
        for head in range(n_kv):  # one matmul a kv head: a batched one would copy the keys, which are a slice
            qb = q[head, :, block.start : block.stop].reshape(group * rows, dim)
            torch.addmm(scores, qb, keys[head, block.lo : block.hi].T, beta=0, alpha=spec.scale, out=scores)
            _mask(scores, block, group, spec.softcap)
            torch.softmax(scores, dim=-1, out=scores)
            mixed = torch.mm(scores, values[head, block.lo : block.hi])
            out[block.start : block.stop, head] = mixed.view(group, rows, dim).transpose(0, 1)
    return out.view(n_rows, n_heads * dim)


def _mask(scores: Tensor, block: Block, group: int, softcap: float | None) -> None:
    """Softcap and mask one block's scores [g * B, n] in place."""
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if block.mask is not None:
        strip = scores.view(group, block.stop - block.start, -1)[..., block.masked_from - block.lo :]
        strip.masked_fill_(block.mask, float("-inf"))
