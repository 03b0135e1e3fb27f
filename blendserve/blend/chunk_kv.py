"""Chunk KV, computed once and for all: behind the prefix, captured before RoPE.

The prefix runs once; then chunks run in stacks that share the matmuls, each attending to the prefix and to itself
alone: one after another, or on a GPU with flash-attn in one launch (kernels/cuda/packed.py). So the result does not
depend on which chunks are stacked, to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from blendserve.core import ChunkKV, Span, Steps, TokenIds, run
from blendserve.kernels.chunks import ChunkStack
from blendserve.kernels.ops import attend_chunks
from blendserve.kernels.types import Rope
from blendserve.models.forward import run_layers
from blendserve.models.model import DecoderModel, Projected

STACK_TOKENS = 1024  # rows a stack on a CPU: enough to fill the matmuls, little enough to stay in cache
GPU_STACK_BYTES = 1 << 30  # of KV that a stack makes on a GPU: 8,192 rows of an 8B model
GPU_STACK_TOKENS = 16_384  # rows at most; a GPU is full long before


class ChunkComputer:
    """Computes the KV of chunks that all stand behind the same tokens."""

    def __init__(self, adapter: DecoderModel, context: TokenIds, context_kv: ChunkKV | None = None) -> None:
        """context_kv: the KV of `context`, where the caller has it."""
        self._adapter = adapter
        empty = _empty(adapter, ())
        self._prefix_keys, self._prefix_values = empty.keys, empty.values  # [L, K, F, D], keys after RoPE
        self.context_kv = empty
        if context:
            self.context_kv = context_kv or self.compute([context])[0]
            ropes = adapter.rope(torch.arange(len(context), device=adapter.device))
            turned = [adapter.rotate(k, rope) for k, rope in zip(self.context_kv.keys, ropes, strict=True)]
            self._prefix_keys, self._prefix_values = torch.stack(turned), self.context_kv.values

    @property
    def stack_tokens(self) -> int:
        """Rows that run together, unless a single chunk has more."""
        if self._adapter.device.type != "cuda":
            return STACK_TOKENS
        return max(STACK_TOKENS, min(GPU_STACK_TOKENS, GPU_STACK_BYTES // self._adapter.kv_bytes_per_token))

    def stream(self, chunks: Iterable[TokenIds]) -> Iterator[ChunkKV]:
        """The KV of each chunk in order, computed a stack at a time; chunks are asked for a stack ahead of it."""
        for stack in in_stacks(chunks, self.stack_tokens):
            yield from self.compute(stack)

    def compute(self, chunks: Sequence[TokenIds]) -> list[ChunkKV]:
        """The KV of these chunks, run as one stack."""
        return run(self.steps(chunks))

    @torch.inference_mode()
    def steps(self, chunks: Sequence[TokenIds]) -> Steps[list[ChunkKV]]:
        """The same, with a pause before every layer."""
        adapter = self._adapter
        out = [_empty(adapter, ids) for ids in chunks]
        if any(chunks):
            hidden = adapter.embed(torch.tensor([i for ids in chunks for i in ids], device=adapter.device))
            layers = _Stacked(adapter, out, self._prefix_keys, self._prefix_values)
            yield from run_layers(adapter, hidden, layers)
        return out


def in_stacks(chunks: Iterable[TokenIds], most_tokens: int) -> Iterator[list[TokenIds]]:
    """The chunks in order, so many at a time that they have no more tokens, or are one."""
    stack: list[TokenIds] = []
    for ids in chunks:
        if stack and sum(map(len, stack)) + len(ids) > most_tokens:
            yield stack
            stack = []
        stack.append(ids)
    if stack:
        yield stack


class _Stacked:
    """Chunks side by side, each attending to [prefix | itself]; their KV is kept as it is before RoPE."""

    def __init__(
        self, adapter: DecoderModel, out: Sequence[ChunkKV], prefix_keys: Tensor, prefix_values: Tensor
    ) -> None:
        self._adapter, self._prefix = adapter, (prefix_keys, prefix_values)
        lengths, n_prefix = [kv.n_tokens for kv in out], prefix_keys.shape[2]
        starts = [0, *accumulate(lengths)]
        self._out = list(zip(out, starts, strict=False))
        spans = [Span(at, at + n) for at, n in zip(starts, lengths, strict=False) if n]
        self._stack = ChunkStack(spans, n_prefix, adapter.group, adapter.device)
        positions = torch.cat([torch.arange(n_prefix, n_prefix + n) for n in lengths])
        self._ropes = adapter.rope(positions.to(adapter.device))

    def rope(self, l: int) -> Rope:
        return self._ropes[l]

    def write(self, l: int, fresh: Projected, keys: Tensor) -> None:
        for kv, at in self._out:
            kv.keys[l], kv.values[l] = (x[:, at : at + kv.n_tokens] for x in (fresh.k, fresh.v))
        self._keys, self._values = keys, fresh.v

    def attend(self, l: int, q: Tensor) -> Tensor | None:
        if l == self._adapter.n_layers - 1:
            return None  # nobody reads its output
        prefix_kv = self._prefix[0][l], self._prefix[1][l]
        return attend_chunks(q, self._keys, self._values, prefix_kv, self._adapter.specs[l], self._stack)


def _empty(adapter: DecoderModel, ids: TokenIds) -> ChunkKV:
    shape = (adapter.n_layers, adapter.n_kv_heads, len(ids), adapter.head_dim)
    keys, values = (torch.empty(shape, dtype=adapter.dtype, device=adapter.device) for _ in range(2))
    return ChunkKV(keys, values, ids=tuple(ids))
