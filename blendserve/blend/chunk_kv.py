"""Keys of chunks, and their KV, computed once: each after the same context, captured before RoPE.

The context runs once. Then chunks run in stacks that share the matmuls, each attending to the context and to itself
alone: one after another, or on a GPU with flash-attn in one launch. So the result does not depend on which chunks are
stacked, to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from blendserve.core import Steps, TokenIds, run
from blendserve.kernels.chunks import ChunkStack
from blendserve.kernels.ops import attend_chunks
from blendserve.kernels.types import Rope
from blendserve.kv import ChunkKV, Layers, join_layers
from blendserve.models.forward import LayerPass, run_layers
from blendserve.models.model import DecoderModel, Projected
from blendserve.store import ChunkKey, chunk_key
from blendserve.store.codecs.base import ChunkShape
from blendserve.store.key import TAG_BYTES, namespace_tag

SCOPE_BYTES = 4  # of a learnt chunk's key, which all chunks of its scope share
STACK_TOKENS = 1024  # rows of a stack on a CPU: enough to fill the matmuls, few enough to stay in cache
GPU_STACK_BYTES = 1 << 30  # of KV that a stack makes on a GPU: 8,192 rows of an 8B model
GPU_STACK_TOKENS = 16_384  # rows at most; a GPU is full long before


def chunk_shape(model: DecoderModel, n_tokens: int) -> ChunkShape:
    """The shape of the model's KV of a chunk of so many tokens."""
    shapes, rows = zip(*model.chunk_layers(n_tokens), strict=True)
    state_rows = (
        tuple(n if l in model.recurrent else 0 for l, n in enumerate(rows)) if model.recurrent else ()
    )
    return ChunkShape(model.dtype, n_tokens, shapes, state_rows)


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """Token ids -> key, for one model, context and namespace."""

    fingerprint: str  # of the model
    dtype: str
    context: TokenIds  # which every chunk's KV is computed after
    namespace: str = ""
    # whose prompts the chunks were learnt from; None: of chunks that were precomputed
    scope: str | None = None

    def __call__(self, ids: TokenIds) -> ChunkKey:
        fields = self.fingerprint, self.context, ids, self.dtype
        if self.scope is None:
            return chunk_key(*fields, self.namespace)
        # in the namespace, and unrelated to the keys of other scopes
        key = chunk_key(*fields, f"{self.namespace}\0{self.scope}")
        return self._beginning + key[TAG_BYTES + SCOPE_BYTES :]

    def owns(self, key: ChunkKey) -> bool:
        """Whether a key of the namespace may be of this scope; other keys' tokens need not be read."""
        return self.scope is None or key.startswith(self._beginning)

    @property
    def _beginning(self) -> bytes:
        """The first bytes of all keys of this scope."""
        return namespace_tag(self.namespace) + namespace_tag(f"{self.namespace}\0{self.scope}")[:SCOPE_BYTES]

    def learnt_by(self, scope: str) -> ChunkKeys:
        """Keys of chunks that are learnt in a scope. All scopes of this namespace share one namespace for theirs."""
        return replace(self, namespace=f"{self.namespace}\0learnt", scope=scope)


class ChunkComputer:
    """Computes the KV of chunks after one context. Thread-safe."""

    def __init__(
        self,
        model: DecoderModel,
        context: TokenIds,
        context_kv: ChunkKV | None = None,
        is_moved: bool = True,
    ) -> None:
        """context_kv: the KV of `context`, its keys after RoPE; computed when it is first needed if None.

        is_moved: whether the chunks may stand elsewhere; else a recurrent layer's state map is its state behind them.
        """
        self.model = model
        self.context = context
        self._is_moved = is_moved
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
            model = self.model
            kv = _empty(self.model, ())
            if self.context:
                kv = (yield from ChunkComputer(model, (), is_moved=False).steps([self.context]))[0]
            self._prepared = kv, placed(model, kv).keys
        return self._prepared[0]

    def placed_context(self) -> Steps[ChunkKV]:
        """The same with keys after RoPE."""
        yield from self.prepare()
        assert self._prepared
        kv = self._prepared[0]
        return ChunkKV(self._prepared[1], kv.values, recurrent=kv.recurrent)

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
            layers = _StackPass(self.model, out, context_keys, context_kv.values, self._is_moved)
            yield from run_layers(self.model, self.model.embed(ids), layers)
        return out


def placed(model: DecoderModel, kv: ChunkKV, start: int = 0) -> ChunkKV:
    """The KV with its keys after RoPE, for tokens from a position on."""
    ropes = model.rope(torch.arange(start, start + kv.n_tokens, device=model.device))
    keys = [k if l in kv.recurrent else model.rotate(k, ropes[l]) for l, k in enumerate(kv.keys)]
    return ChunkKV(join_layers(keys) if kv.n_tokens else kv.keys, kv.values, recurrent=kv.recurrent)


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


class _StackPass(LayerPass):
    """Chunks side by side, each attending to [context | itself]. Keeps their KV before RoPE."""

    def __init__(
        self,
        model: DecoderModel,
        out: Sequence[ChunkKV],
        context_keys: Layers,
        context_values: Layers,
        is_moved: bool,
    ) -> None:
        """context_keys, context_values [L, K, F, D], keys after RoPE. is_moved: as of ChunkComputer."""
        self._model = model
        self._context = (context_keys, context_values)
        self._is_moved = is_moved
        lengths = [kv.n_tokens for kv in out]
        n_context = context_keys[model.attention_layer].shape[1]
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

    def recur(self, l: int, x: Tensor) -> Tensor:
        mixer = self._model.mixer(l)
        parts = list[Tensor]()
        before = mixer.after(mixer.empty, self._context[0][l], self._context[1][l])
        for kv, at in self._out:
            rows = x[at : at + kv.n_tokens]
            if self._is_moved:
                added, made = mixer.run_chunk(rows, before)
            else:
                added, behind = mixer.run(rows, before)
                made = mixer.packed(behind)
            for side, part in zip((kv.keys, kv.values), made, strict=True):
                side[l].copy_(part)
            parts.append(added)
        return torch.cat(parts)


def _empty(model: DecoderModel, ids: TokenIds) -> ChunkKV:
    """Room for a chunk's KV; state maps are those of no tokens behind nothing."""
    new = partial(torch.zeros if model.recurrent else torch.empty, dtype=model.dtype, device=model.device)

    def side(i: int) -> Layers:
        shapes = [(shape.heads, n_rows, shape[i]) for shape, n_rows in model.chunk_layers(len(ids))]
        return new((len(shapes), *shapes[0])) if len(set(shapes)) == 1 else tuple(map(new, shapes))

    return ChunkKV(side(1), side(2), ids=tuple(ids), recurrent=model.recurrent)
