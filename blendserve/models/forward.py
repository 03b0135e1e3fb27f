"""The one loop over layers. The passes that run rows through a model differ in what they do between a layer's halves.

project -> rotate -> write -> attend -> finish

prefill, blended or full       blend/prefill.py          rows anywhere; the policy may drop some on the way
scoring pass of a policy       blend/prefill.py          the question alone, and what it attends to
refining                       blend/refine.py           rows anywhere once more, over a prefilled cache
chunk precompute               blend/chunk_kv.py         keys before RoPE are kept; each chunk attends alone
decoding, and forced answers   here                      rows behind one or many caches, captured or not
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from blendserve.core import Steps, run
from blendserve.kernels.ops import attend, attend_at
from blendserve.kernels.rows import Rows, plan_layers
from blendserve.kernels.types import Rope
from blendserve.kv import Layers
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel, Hidden, Projected, States
from blendserve.models.native import native_layers
from blendserve.models.thread_tuner import layer_series

ROWS_PER_STEP = 128  # of `feed`: a step takes about as long as one of decoding


class LayerPass(ABC):
    """What one pass over the layers does between a layer's two halves; a layer without KV of its own writes none."""

    @abstractmethod
    def rope(self, l: int) -> Rope:
        """cos and sin of the rows that enter layer l."""

    @abstractmethod
    def write(self, l: int, fresh: Projected, keys: Tensor) -> Tensor | slice | None:
        """Keep the rows' fresh KV; `keys` [K, S, D] are rotated -> which rows go on, by index; None = all of them."""

    @abstractmethod
    def attend(self, l: int, q: Tensor) -> Tensor | None:
        """Rotated queries [H, S, D] of the rows that go on -> [S, H * D]; None: what would follow is not read."""

    def recur(self, l: int, x: Tensor) -> Tensor:
        """Run a recurrent layer, in place of all these: normed rows [S, E] -> what its mixer adds to them, [S, E]."""
        raise NotImplementedError("this pass is not for recurrent layers")


def run_layers(model: DecoderModel, hidden: States, layers: LayerPass) -> Steps[States]:
    """Embedded rows [S, E] through all layers -> hidden [S', E] of the rows that go on."""
    series = layer_series(len(hidden), model.device)
    for l in range(model.n_layers):
        yield
        layer = partial(_run_layer, model, l, hidden, layers)
        done = series.run(layer) if series else layer()
        if done is None:
            break
        hidden = done
    return hidden


def _run_layer(model: DecoderModel, l: int, hidden: States, layers: LayerPass) -> States | None:
    """Hidden states behind layer l of the rows that go on; None: they are not read."""
    if model.layers[l].mixer is not None:
        return model.finish(l, hidden, layers.recur(l, model.normed(l, hidden)))
    rope = layers.rope(l)
    native = native_layers(model, len(hidden))
    if native and not isinstance(hidden, Hidden):
        *before_rope, q, keys = native.qkv(l, hidden, rope)
        fresh = Projected(*before_rope)
    else:
        fresh = model.project(l, hidden)
        q = model.rotate_queries(l, fresh.q, rope)
        keys = model.rotate(fresh.k, rope)
    q = rope.scale_queries(q)
    left = layers.write(l, fresh, keys) if len(fresh.k) else None
    if left is not None:
        q = q[:, left]
        hidden = hidden[left]
    attended = layers.attend(l, q)
    if attended is None:
        return None
    native = native_layers(model, len(hidden))
    if native and not isinstance(hidden, Hidden):
        return native.out(l, hidden, attended)
    return model.finish(l, hidden, attended)


@dataclass(frozen=True, slots=True)
class Row:
    """A token to run, and where its KV goes."""

    cache: KVCache
    at: int
    token: int


class _AppendPass(LayerPass):
    """Rows behind what their caches hold; those of one cache at consecutive positions attend together."""

    def __init__(self, model: DecoderModel, rows: Sequence[Row]) -> None:
        at = torch.tensor([row.at for row in rows])
        self._model = model
        self._ropes = model.rope(at.to(model.device))
        self._specs = model.specs
        self._runs = list(_runs(rows))
        self._plans = [
            plan_layers(Rows.on(model.device, at[part]), model.attention_forms) for _, part, _ in self._runs
        ]

    def rope(self, l: int) -> Rope:
        return self._ropes[l]

    def write(self, l: int, fresh: Projected, keys: Tensor) -> None:
        for cache, part, positions in self._runs:
            cache.write(l, positions, keys[:, part], fresh.v[:, part])

    def attend(self, l: int, q: Tensor) -> Tensor:
        spec = self._specs[l]
        runs = zip(self._runs, self._plans, strict=True)
        parts = [
            attend(q[:, part], *self._model.attended_kv(l, *_beginning(cache, l, at.stop)), spec, plans[l])
            for (cache, part, at), plans in runs
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def recur(self, l: int, x: Tensor) -> Tensor:
        mixer = self._model.mixer(l)
        parts: list[Tensor] = []
        for cache, part, positions in self._runs:
            before = cache.state(l, positions.start) if positions.start else mixer.empty
            added, after = mixer.run(x[part], before)
            cache.keep_state(l, positions.stop, after)
            parts.append(added)
        return torch.cat(parts)


def _beginning(cache: KVCache, l: int, n: int) -> tuple[Tensor, Tensor]:
    """Keys and values [K, n, D] of layer l: what is behind them may be no numbers."""
    return cache.keys[l][:, :n], cache.values[l][:, :n]


def _runs(rows: Sequence[Row]) -> Iterator[tuple[KVCache, slice, slice]]:
    """Runs of rows at consecutive positions of one cache: cache, rows, positions."""
    for _, group in groupby(enumerate(rows), lambda pair: (id(pair[1].cache), pair[1].at - pair[0])):
        (first, row), *more = group
        n = 1 + len(more)
        yield row.cache, slice(first, first + n), slice(row.at, row.at + n)


@torch.inference_mode()
def append(model: DecoderModel, rows: Sequence[Row]) -> Steps[Tensor]:
    """Run each row's token at its position, append its KV, a layer a step -> logits [B, V]. The cache must have room."""
    hidden = model.embed(torch.tensor([row.token for row in rows], device=model.device))
    hidden = yield from run_layers(model, hidden, _AppendPass(model, rows))
    return model.logits(hidden)


def run_rows(model: DecoderModel, rows: Sequence[Row]) -> Tensor:
    """`append` as one step."""
    return run(append(model, rows))


@torch.inference_mode()
def feed(model: DecoderModel, cache: KVCache, tokens: Sequence[int]) -> Steps[Tensor]:
    """Full prefill, ROWS_PER_STEP rows at a time -> logits [V] after the last token.

    Equal to one pass over all rows, to rounding; its steps are shorter, so that other work waits less.
    """
    hidden = model.embed(torch.tensor(tokens[:0], dtype=torch.long, device=model.device))
    for start in range(0, len(tokens), ROWS_PER_STEP):
        part = tokens[start : start + ROWS_PER_STEP]
        rows = [Row(cache, start + i, token) for i, token in enumerate(part)]
        hidden = model.embed(torch.tensor(part, device=model.device))
        hidden = yield from run_layers(model, hidden, _AppendPass(model, rows))
    return model.logits(hidden[-1:])[0]


@torch.inference_mode()
def read(model: DecoderModel, cache: KVCache, tokens: Sequence[int]) -> Steps[States]:
    """Full prefill of a prompt in one pass -> hidden [T, E] after each of its tokens."""
    cache.forget_states()
    rows = [Row(cache, at, token) for at, token in enumerate(tokens)]
    hidden = model.embed(torch.tensor(tokens, device=model.device))
    return (yield from run_layers(model, hidden, _AppendPass(model, rows)))


class _CapturedPass(LayerPass):
    """One row each of B requests at positions that only the device knows, as a graph replays them."""

    def __init__(self, model: DecoderModel, keys: Layers, values: Layers, at: Tensor, slot: Tensor) -> None:
        self._layers = list(zip(*map(_by_layer, (keys, values)), strict=True))
        self._at = at
        self._slot = slot
        self._model = model
        self._specs = model.specs
        self._ropes = model.rope(at)
        self._requests = torch.arange(len(at), device=at.device)

    def rope(self, l: int) -> Rope:
        return self._ropes[l]

    def write(self, l: int, fresh: Projected, keys: Tensor) -> None:
        for all_kv, ours in zip(self._layers[l], (keys, fresh.v), strict=True):
            all_kv[self._requests, :, self._slot] = ours.transpose(0, 1)

    def attend(self, l: int, q: Tensor) -> Tensor:
        spec = self._specs[l]
        only = [slice(b, b + 1) for b in range(len(self._at))]
        caches = zip(only, *self._layers[l], strict=True)
        return torch.cat(
            [attend_at(q[:, b], *self._model.attended_kv(l, *kv), spec, self._at[b]) for b, *kv in caches]
        )


def _by_layer(kv: Layers) -> Sequence[Tensor]:
    """Keys or values of several caches [B, L, K, T, D] -> [B, K, T, D] of each layer."""
    return kv.unbind(1) if isinstance(kv, Tensor) else kv


@torch.inference_mode()
def run_captured(
    model: DecoderModel, keys: Layers, values: Layers, token: Tensor, at: Tensor, slot: Tensor
) -> Tensor:
    """Tokens [B] at positions [B] over B caches, keys and values [B, L, K, T, D] or by layer -> logits [B, V].

    Each row's KV is written at its slot [B]: its position, or a place that is not read.
    """
    captured = _CapturedPass(model, keys, values, at, slot)
    return model.logits(run(run_layers(model, model.embed(token), captured)))
