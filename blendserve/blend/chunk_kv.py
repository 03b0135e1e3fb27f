"""Keys of chunks, and their KV, computed once: each after the same context, captured before RoPE.

The context runs once. Then chunks run in stacks that share the matmuls, each attending to the context and to itself
alone: one after another, or on a GPU with flash-attn in one launch. So the result does not depend on which chunks are
stacked, to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from blendserve.core import ChunkKV, Layers, Steps, TokenIds, join_layers, run
from blendserve.kernels.chunks import ChunkStack
from blendserve.kernels.ops import attend_chunks
from blendserve.kernels.types import Rope
from blendserve.models.forward import run_layers
from blendserve.models.model import DecoderModel, Projected
from blendserve.store import ChunkKey, chunk_key
from blendserve.store.key import TAG_BYTES, namespace_tag

STACK_TOKENS = 1024  # rows of a stack on a CPU: enough to fill the matmuls, few enough to stay in cache
GPU_STACK_BYTES = 1 << 30  # of KV that a stack makes on a GPU: 8,192 rows of an 8B model
GPU_STACK_TOKENS = 16_384  # rows at most; a GPU is full long before


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """Token ids -> key, for one model, context and namespace."""

    fingerprint: str  # of the model
    dtype: str
    context: TokenIds  # which every chunk's KV is computed after
    namespace: str = ""
    scope: str | None = (
        None  # whose prompts the chunks were learnt from; None: of chunks that were precomputed
    )

    def __call__(self, ids: TokenIds) -> ChunkKey:
        fields = self.fingerprint, self.context, ids, self.dtype
        if self.scope is None:
            return chunk_key(*fields, self.namespace)
        # in the namespace, and unrelated to the keys of other scopes
        key = chunk_key(*fields, f"{self.namespace}\0{self.scope}")
        return namespace_tag(self.namespace) + key[TAG_BYTES:]

    def learnt_by(self, scope: str) -> ChunkKeys:
        """Keys of chunks that are learnt in a scope. All scopes of this namespace share one namespace for theirs."""
        return replace(self, namespace=f"{self.namespace}\0learnt", scope=scope)


class ChunkComputer:
    """Computes the KV of chunks after one context. Thread-safe."""

    def __init__(self, model: DecoderModel, context: TokenIds, context_kv: ChunkKV | None = None) -> None:
        """context_kv: the KV of `context`, its keys after RoPE; computed when it is first needed if None."""
        self.model, self.context = model, context
        self._prepared: tuple[ChunkKV, Layers] | None = None  # the context's KV, and its keys after RoPE
        if context_kv:
            self._prepared = context_kv, context_kv.keys

    @property
    def stack_tokens(self) -> int:
        """Rows that run together, unless a single chunk has more."""
        if self.model.device.type != "cuda":
            return STACK_TOKENS
        return max(STACK_TOKENS, min(GPU_STACK_TOKENS, GPU_STACK_BYTES // self.model.kv_bytes_per_token))

    @property
    def context_kv(self) -> ChunkKV:
        """The KV of the context."""
        return run(self.prepare())

    @torch.inference_mode()
    def prepare(self) -> Steps[ChunkKV]:
        """The KV of the context, computed once."""
        if self._prepared is None:
            model, kv = self.model, _empty(self.model, ())
            if self.context:
                kv = (yield from ChunkComputer(model, ()).steps([self.context]))[0]
            self._prepared = kv, placed(model, kv).keys
        return self._prepared[0]

    def placed_context(self) -> Steps[ChunkKV]:
        """The same with keys after RoPE."""
        yield from self.prepare()
        assert self._prepared
        return ChunkKV(self._prepared[1], self._prepared[0].values)

    def stream(self, chunks: Iterable[TokenIds]) -> Iterator[ChunkKV]:
        """The KV of each chunk in order, computed a stack at a time; a stack is read before it is computed."""
        for stack in in_stacks(chunks, self.stack_tokens):
            yield from self.compute(stack)

    def compute(self, chunks: Sequence[TokenIds]) -> list[ChunkKV]:
        """The KV of these chunks, run as one stack."""
        return run(self.steps(chunks))

    @torch.inference_mode()
    def steps(self, chunks: Sequence[TokenIds]) -> Steps[list[ChunkKV]]:
        """The same as a generator."""
        yield from self.prepare()
        assert self._prepared
        context_kv, context_keys = self._prepared
        out = [_empty(self.model, ids) for ids in chunks]
        if any(chunks):
            ids = torch.tensor([i for ids in chunks for i in ids], device=self.model.device)
            layers = _StackPass(self.model, out, context_keys, context_kv.values)
            yield from run_layers(self.model, self.model.embed(ids), layers)
        return out


def placed(model: DecoderModel, kv: ChunkKV, start: int = 0) -> ChunkKV:
    """The KV with its keys after RoPE, for tokens from a position on."""
    ropes = model.rope(torch.arange(start, start + kv.n_tokens, device=model.device))
    keys = [model.rotate(k, ropes[l]) for l, k in enumerate(kv.keys)]
    return ChunkKV(join_layers(keys) if kv.n_tokens else kv.keys, kv.values)


def in_stacks(chunks: Iterable[TokenIds], max_tokens: int) -> Iterator[list[TokenIds]]:
    """The chunks in order, in lists of at most `max_tokens`, or of one chunk."""
    stack: list[TokenIds] = []
    for ids in chunks:
        if stack and sum(map(len, stack)) + len(ids) > max_tokens:
            yield stack
            stack = []
        stack.append(ids)
    if stack:
        yield stack


class _StackPass:
    """Chunks side by side, each attending to [context | itself]. Keeps their KV before RoPE."""

    def __init__(
        self, model: DecoderModel, out: Sequence[ChunkKV], context_keys: Layers, context_values: Layers
    ) -> None:
        """context_keys, context_values [L, K, F, D], keys after RoPE."""
        self._model, self._context = model, (context_keys, context_values)
        lengths, n_context = [kv.n_tokens for kv in out], context_keys[0].shape[1]
        starts = [0, *accumulate(lengths)]
        self._out = list(zip(out, starts, strict=False))
        self._stack = ChunkStack([n for n in lengths if n], n_context, model.device)
        positions = torch.cat([torch.arange(n_context, n_context + n) for n in lengths])
        self._ropes = model.rope(positions.to(model.device))

    def rope(self, l: int) -> Rope:
        return self._ropes[l]

    def write(self, l: int, fresh: Projected, keys: Tensor) -> None:
        for kv, at in self._out:
            for side, x in ((kv.keys, fresh.k), (kv.values, fresh.v)):
                side[l].copy_(x[:, at : at + kv.n_tokens])
        self._keys, self._values = keys, fresh.v

    def attend(self, l: int, q: Tensor) -> Tensor | None:
        if l == self._model.n_kv_layers - 1:
            return None  # no KV is left to make
        context, own = (
            self._model.attended_kv(l, *kv)
            for kv in ((self._context[0][l], self._context[1][l]), (self._keys, self._values))
        )
        return attend_chunks(q, *own, context, self._model.specs[l], self._stack)


def _empty(model: DecoderModel, ids: TokenIds) -> ChunkKV:
    def side(dims: Sequence[int]) -> Layers:
        shapes = [(shape.heads, len(ids), dim) for shape, dim in zip(model.kv_shapes, dims, strict=True)]
        if len(set(shapes)) == 1:
            return torch.empty((len(shapes), *shapes[0]), dtype=model.dtype, device=model.device)
        return tuple(torch.empty(shape, dtype=model.dtype, device=model.device) for shape in shapes)

    keys, values = (side([shape[i] for shape in model.kv_shapes]) for i in (1, 2))
    return ChunkKV(keys, values, ids=tuple(ids))
