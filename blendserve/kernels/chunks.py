"""Chunks that are computed together after one prefix: which rows and keys of the stack belong to which chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from blendserve.kernels.rows import AttentionPlan, plan_rows
from blendserve.kernels.types import AttentionSpec


@dataclass(frozen=True)
class ChunkStack:
    """Made once for all layers."""

    lengths: list[int]  # tokens of each chunk, none empty
    n_prefix: int
    device: torch.device
    _plans: dict[tuple[int, int, int | None], AttentionPlan] = field(default_factory=dict)

    def plan(self, n_tokens: int, group: int, window: int | None) -> AttentionPlan:
        """The plan of a chunk of `n_tokens` tokens after the prefix; `group`: query heads per kv head, H / K."""
        key = n_tokens, group, window
        if key not in self._plans:
            at = torch.arange(self.n_prefix, self.n_prefix + n_tokens)
            self._plans[key] = plan_rows(at.to(self.device), group, window, at)
        return self._plans[key]

    @cached_property
    def packing(self) -> dict[str, Any]:
        """Arguments of flash-attn: where each chunk's rows and keys [prefix | own] begin, [B + 1] int32, and the most."""
        found: dict[str, Any] = {}
        for name, lengths in (("q", self.lengths), ("k", [self.n_prefix + n for n in self.lengths])):
            begins = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(self.device)
            found |= {f"cu_seqlens_{name}": begins, f"max_seqlen_{name}": max(lengths)}
        return found

    @cached_property
    def key_index(self) -> Tensor:
        """Places in [prefix | chunk 0 | chunk 1 | ...] of the packed keys [prefix | chunk 0 | prefix | chunk 1 | ...]."""
        prefix = torch.arange(self.n_prefix)
        own = self.n_prefix + torch.arange(sum(self.lengths))
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
        plan = stack.plan(rows.shape[1], len(rows) // len(keys), spec.window)
        out.append(attend(rows, keys, values, spec, plan))
    return torch.cat(out)
