"""Chunks that are computed together after one prefix: which rows and keys of the stack belong to which chunk.

rows  [ chunk 0 | chunk 1 | ... ]
keys  [ prefix chunk 0 | prefix chunk 1 | ... ]      the prefix is repeated: each chunk's keys are contiguous
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from blendserve.core import Span
from blendserve.kernels.rows import AttentionPlan, plan_rows


@dataclass(frozen=True)
class ChunkStack:
    """Made once for all layers."""

    spans: Sequence[Span]  # rows of each chunk, contiguous, none empty
    n_prefix: int
    group: int  # query heads per kv head, H / K
    device: torch.device
    _plans: dict[tuple[int, int | None], AttentionPlan] = field(default_factory=dict)

    def plan(self, n_tokens: int, window: int | None) -> AttentionPlan:
        """The plan of a chunk of `n_tokens` tokens after the prefix."""
        if (n_tokens, window) not in self._plans:
            here = torch.arange(self.n_prefix, self.n_prefix + n_tokens)
            self._plans[n_tokens, window] = plan_rows(here.to(self.device), self.group, window, here)
        return self._plans[n_tokens, window]

    @cached_property
    def packing(self) -> Packing:
        return Packing.of(self.spans, self.n_prefix, self.device)


@dataclass(frozen=True)
class Packing:
    """The stack's arrays for kernels with variable lengths, as flash-attn names them."""

    cu_seqlens_q: (
        Tensor  # [B + 1] int32, on the device: chunk b has rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1]
    )
    cu_seqlens_k: Tensor  # [B + 1] int32, likewise of its keys, prefix included
    key_index: Tensor  # int64: the place of each of these keys in [ prefix | chunk 0 | chunk 1 | ... ]
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def of(cls, spans: Sequence[Span], n_prefix: int, device: torch.device) -> Packing:
        lengths = [len(span) for span in spans]
        prefix = torch.arange(n_prefix)
        keys = torch.cat([torch.cat([prefix, n_prefix + torch.arange(s.start, s.stop)]) for s in spans])
        return cls(
            _ends(lengths).to(device),
            _ends([n_prefix + n for n in lengths]).to(device),
            keys.to(device),
            max(lengths),
            n_prefix + max(lengths),
        )


def _ends(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
