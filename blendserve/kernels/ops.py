"""Attention that is causal by *position*: row i sees key j iff position(j) <= position(i).

Rows may stand anywhere in the prompt, in ascending order; keys fill positions 0 .. T-1. No S x T mask or score matrix is
ever made: rows go in blocks, each block sees keys up to its last position, and only the strip between its first and
last position needs a mask.

        keys ->  0 ............ first ..... last ......... T
    block rows  [  no mask      | diagonal strip |  cut   ]

The query heads that share a kv head are stacked into one matmul, so keys are never repeated.

That is the plain form, on any device and in any dtype. Where a kernel does the same in one pass, it does: WAYS is the
table of who attends when.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from blendserve.blend.rows import SCORE_BUDGET, Block, RowPlan, plan_rows
from blendserve.gpu import attention as by_position
from blendserve.gpu import dense, flex, masked
from blendserve.gpu.proven import Attend
from blendserve.models.adapter import Adapter, AttentionSpec
from blendserve.native import attention as native

__all__ = ["SCORE_BUDGET", "RowPlan", "attend", "attend_plainly", "plan_rows", "way_for", "ways_on"]


def attend(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan) -> Tensor:
    """Rotated queries q [H, S, D] over keys and values [K, T, D] -> [S, H * D].

    Equals softmax(softcap(scale q k^T) + causal mask by position) v; tests/blend/test_attention.py has the plain formula.
    """
    if plan.known is not None and plan.end > keys.shape[1]:
        raise ValueError(f"a row at position {plan.end - 1} needs more than {keys.shape[1]} keys")
    return way_for(q, keys, values, spec, plan).attend(q, keys, values, spec, plan)


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


def _native_takes(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan) -> bool:
    return native.takes(q, keys, values, spec.scale)


def _native(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan) -> Tensor:
    return native.attend(q, keys, values, native.Seen(plan.positions, spec.scale, plan.window, spec.softcap))


def _always(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan) -> bool:
    return True


class Takes(Protocol):
    """Whether a way can attend so, and serves on this machine."""

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan
    ) -> bool: ...


class Way(NamedTuple):
    """One way to attend."""

    name: str
    takes: Takes
    attend: Attend


WAYS = (  # the first that takes it does it
    Way("compiled kernel", _native_takes, _native),  # bf16 on a CPU that multiplies it
    Way("flash-attn", dense.takes_flash, dense.flash),  # rows side by side on a GPU
    Way("torch's FlashAttention", dense.takes_sdpa, dense.sdpa),
    Way("Triton kernel", by_position.takes, by_position.attend),  # rows anywhere on a GPU
    Way("FlexAttention", flex.takes, flex.attend),
    Way("SDPA with masks", masked.takes, masked.attend),
    Way("plain torch", _always, attend_plainly),
)


def way_for(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan) -> Way:
    """Who attends to these."""
    return next(way for way in WAYS if way.takes(q, keys, values, spec, plan))


def ways_on(adapter: Adapter) -> tuple[str, str]:
    """Who attends in this reader's first layer: for rows that stand side by side, and for rows anywhere."""
    spec, device = adapter.specs[0], adapter.device
    q = torch.zeros(adapter.n_heads, 64, adapter.head_dim, dtype=adapter.dtype, device=device)
    keys = torch.zeros(adapter.n_kv_heads, 128, adapter.head_dim, dtype=adapter.dtype, device=device)
    plans = (
        plan_rows(at.to(device), adapter.group, spec.window, at)
        for at in (torch.arange(64), 2 * torch.arange(64))
    )
    side_by_side, anywhere = (way_for(q, keys, keys, spec, plan).name for plan in plans)
    return side_by_side, anywhere
