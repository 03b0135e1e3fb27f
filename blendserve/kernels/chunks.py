"""Chunks that are computed together after one prefix: which rows and keys of the stack belong to which chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from blendserve.kernels.rows import AttentionPlan, plan_rows
from blendserve.kernels.types import AttentionSpec


class Packing(NamedTuple):
    """Arguments for kernels with variable lengths, as flash-attn names them. Chunk b has rows [q[b], q[b + 1])."""

    cu_seqlens_q: Tensor  # [B + 1] int32, on the device
    cu_seqlens_k: Tensor  # [B + 1] int32, of keys: each chunk has the prefix's keys, then its own
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True)
class ChunkStack:
    """Made once for all layers."""

    lengths: list[int]  # tokens of each chunk, none empty
    n_prefix: int
    group: int  # query heads per kv head, H / K
    device: torch.device
    _plans: dict[tuple[int, int | None], AttentionPlan] = field(default_factory=dict)

    def plan(self, n_tokens: int, window: int | None) -> AttentionPlan:
        """The plan of a chunk of `n_tokens` tokens after the prefix."""
        if (n_tokens, window) not in self._plans:
            at = torch.arange(self.n_prefix, self.n_prefix + n_tokens)
            self._plans[n_tokens, window] = plan_rows(at.to(self.device), self.group, window, at)
        return self._plans[n_tokens, window]

    @cached_property
    def packing(self) -> Packing:
        key_lengths = [self.n_prefix + n for n in self.lengths]
        rows, keys = (
            torch.tensor([0, *accumulate(x)], dtype=torch.int32).to(self.device)
            for x in (self.lengths, key_lengths)
        )
        return Packing(rows, keys, max(self.lengths), max(key_lengths))

    @cached_property
    def key_index(self) -> Tensor:
        """Places in [prefix | chunk 0 | chunk 1 | ...] of the packed keys [prefix | chunk 0 | prefix | chunk 1 | ...]."""
        prefix, own = torch.arange(self.n_prefix), self.n_prefix + torch.arange(sum(self.lengths))
        parts = [x for chunk in torch.split(own, self.lengths) for x in (prefix, chunk)]
        return torch.cat(parts).to(self.device)


def one_after_another(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, prefix_kv: tuple[Tensor, Tensor],
    spec: AttentionSpec, stack: ChunkStack,
) -> Tensor:  # fmt: skip
    """ops.attend_chunks by one call of `attend` for each chunk."""
    out = []
    for rows, *own in zip(*(torch.split(x, stack.lengths, dim=1) for x in (q, k, v)), strict=True):
        keys, values = (torch.cat(pair, dim=1) for pair in zip(prefix_kv, own, strict=True))
        out.append(attend(rows, keys, values, spec, stack.plan(rows.shape[1], spec.window)))
    return torch.cat(out)
