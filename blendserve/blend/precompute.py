"""Chunk KV, computed once and for all: behind the prefix, captured before RoPE.

The text in front runs once; then chunks run in stacks that share the matmuls, each attending to the front and to itself
alone: one after another, or on a GPU with flash-attn in one launch (gpu/packed.py). So the result does not depend on
which chunks are stacked, to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from blendserve.blend.attention import RowPlan, attend, plan_rows
from blendserve.core import ChunkKV, Span, TokenIds
from blendserve.gpu import packed
from blendserve.models.adapter import Adapter, Projected

STACK_TOKENS = 1024  # rows a stack on a CPU: enough to fill the matmuls, little enough to stay in cache
GPU_STACK_BYTES = 1 << 30  # of KV that a stack makes on a GPU: 8,192 rows of an 8B model
GPU_STACK_TOKENS = 16_384  # rows at most; a GPU is full long before


class ChunkComputer:
    """Computes the KV of chunks that all stand behind the same tokens."""

    def __init__(self, adapter: Adapter, behind: TokenIds, front: ChunkKV | None = None) -> None:
        """front: the KV of `behind`, where the caller has it."""
        self._adapter = adapter
        self._behind = behind
        empty = _empty(adapter, 0)
        self._front_keys, self._front_values = empty.keys, empty.values  # [L, K, F, D], keys after RoPE
        self._n_front = 0
        self.front = empty
        if behind:
            self.front = front or self.compute([behind])[0]
            self._n_front = len(behind)
            ropes = adapter.rope(torch.arange(len(behind), device=adapter.device))
            turned = [adapter.rotate(k, rope) for k, rope in zip(self.front.keys, ropes, strict=True)]
            self._front_keys = torch.stack(turned)
            self._front_values = self.front.values

    @property
    def stack_tokens(self) -> int:
        """Rows that run together, unless a single chunk has more."""
        if self._adapter.device.type != "cuda":
            return STACK_TOKENS
        return max(STACK_TOKENS, min(GPU_STACK_TOKENS, GPU_STACK_BYTES // self._adapter.kv_bytes_per_token))

    def stream(self, chunks: Sequence[TokenIds]) -> Iterator[ChunkKV]:
        """The KV of each chunk in order, computed a stack at a time."""
        stack: list[TokenIds] = []
        most = self.stack_tokens
        for ids in chunks:
            if stack and sum(map(len, stack)) + len(ids) > most:
                yield from self.compute(stack)
                stack = []
            stack.append(ids)
        if stack:
            yield from self.compute(stack)

    @torch.inference_mode()
    def compute(self, chunks: Sequence[TokenIds]) -> list[ChunkKV]:
        """The KV of these chunks, run as one stack."""
        adapter, front = self._adapter, self._n_front
        out = [_empty(adapter, len(ids)) for ids in chunks]
        if not any(chunks):
            return out
        spans = _side_by_side(chunks)
        positions = torch.cat([torch.arange(front, front + len(ids)) for ids in chunks])
        ropes = adapter.rope(positions.to(adapter.device))
        stack = _Stack(adapter, front, [span for span in spans if len(span)])
        hidden = adapter.embed(torch.tensor([i for ids in chunks for i in ids], device=adapter.device))
        for l in range(adapter.n_layers):
            rows = adapter.project(l, hidden)
            for kv, span in zip(out, spans, strict=True):
                kv.keys[l] = rows.k[:, span.start : span.stop]
                kv.values[l] = rows.v[:, span.start : span.stop]
            if l == adapter.n_layers - 1:
                break  # nobody reads its output
            turned = Projected(adapter.rotate(rows.q, ropes[l]), adapter.rotate(rows.k, ropes[l]), rows.v)
            hidden = adapter.finish(l, hidden, self._attend(l, turned, stack))
        return out

    def _attend(self, l: int, rows: Projected, stack: _Stack) -> Tensor:
        """Each chunk's rows over [front | chunk] -> [S, H * D]."""
        spec, front = self._adapter.specs[l], (self._front_keys[l], self._front_values[l])
        if packed.takes(rows.q, rows.k, spec):
            return packed.attend(rows.q, rows.k, rows.v, front, spec, stack.pack)
        attended = []
        for span in stack.spans:
            here = slice(span.start, span.stop)
            keys, values = (
                torch.cat([x, own[:, here]], dim=1) for x, own in zip(front, (rows.k, rows.v), strict=True)
            )
            attended.append(attend(rows.q[:, here], keys, values, spec, stack.plans[len(span), spec.window]))
        return torch.cat(attended)


@dataclass(frozen=True)
class _Stack:
    """Chunks that run together behind a front of so many tokens: how they attend."""

    adapter: Adapter
    n_front: int
    spans: Sequence[Span]  # of the rows of each, none empty

    @cached_property
    def plans(self) -> dict[tuple[int, int | None], RowPlan]:
        """By length and window."""
        front, adapter = self.n_front, self.adapter
        windows = {spec.window for spec in adapter.specs}
        return {
            (n, window): plan_rows(here.to(adapter.device), adapter.group, window, here)
            for n in {len(span) for span in self.spans}
            for here in [torch.arange(front, front + n)]
            for window in windows
        }

    @cached_property
    def pack(self) -> packed.Pack:
        return packed.Pack.of(self.spans, self.n_front, self.adapter.device)


def _empty(adapter: Adapter, tokens: int) -> ChunkKV:
    shape = (adapter.n_layers, adapter.n_kv_heads, tokens, adapter.head_dim)
    return ChunkKV(*(torch.empty(shape, dtype=adapter.dtype, device=adapter.device) for _ in range(2)))


def _side_by_side(chunks: Sequence[TokenIds]) -> list[Span]:
    spans, at = [], 0
    for ids in chunks:
        spans.append(Span(at, at + len(ids)))
        at += len(ids)
    return spans
