"""The one loop over layers: whoever runs rows through a reader runs it, and differs in what happens between its halves.

project -> rotate -> write -> attend -> finish

prefill, blended or full       blend/prefill.py          rows anywhere; the policy may drop some on the way
scoring pass of a policy       blend/policies            the question alone, and what it looks at
chunk precompute               blend/chunk_kv.py       keys before RoPE are kept; each chunk attends by itself
decoding, and forced answers   here                      one row a request, of one or of many, captured or not
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from blendserve.core import Steps, run
from blendserve.errors import ConfigError
from blendserve.kernels.cpu.decode_step import MAX_ROWS
from blendserve.kernels.ops import attend, attend_at
from blendserve.kernels.rows import Rows, plans_by_window
from blendserve.kernels.types import Rope
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel, Projected
from blendserve.models.native import NativeDecoder, Row, native_decoder
from blendserve.models.pace import pass_of


class LayerPass(Protocol):
    """What one pass over the layers does between a layer's two halves."""

    def rope(self, l: int) -> Rope:
        """Where the rows that enter layer l stand."""
        ...

    def write(self, l: int, fresh: Projected, keys: Tensor) -> Tensor | slice | None:
        """Keep the rows' fresh KV; `keys` [K, S, D] are rotated -> which rows go on, by index; None = all of them."""
        ...

    def attend(self, l: int, q: Tensor) -> Tensor | None:
        """Rotated queries [H, S, D] of the rows that go on -> [S, H * D]; None: nobody reads what would follow."""
        ...


def run_layers(adapter: DecoderModel, hidden: Tensor, layers: LayerPass) -> Steps[Tensor]:
    """Embedded rows [S, E] through all layers -> hidden [S', E] of those that are left."""
    pace = pass_of(len(hidden), adapter.device)
    for l in range(adapter.n_layers):
        yield
        layer = partial(_run_layer, adapter, l, hidden, layers)
        done = pace.layer(layer) if pace else layer()
        if done is None:
            break
        hidden = done
    return hidden


def _run_layer(adapter: DecoderModel, l: int, hidden: Tensor, layers: LayerPass) -> Tensor | None:
    """Hidden states behind layer l of the rows that are left; None: nobody reads them."""
    fresh, rope = adapter.project(l, hidden), layers.rope(l)
    q, keys = adapter.rotate(fresh.q, rope), adapter.rotate(fresh.k, rope)
    left = layers.write(l, fresh, keys)
    if left is not None:
        q, hidden = q[:, left], hidden[left]
    attended = layers.attend(l, q)
    return None if attended is None else adapter.finish(l, hidden, attended)


class _OneRequest:
    """Rows side by side at the end of one request's cache."""

    def __init__(self, adapter: DecoderModel, cache: KVCache, at: int, n: int) -> None:
        rows = Rows.on(adapter.device, torch.arange(at, at + n))
        self._cache, self._here, self._specs = cache, slice(at, at + n), adapter.specs
        self._ropes = adapter.rope(rows.device)
        self._plans = plans_by_window(rows, adapter.group, adapter.windows)

    def rope(self, l: int) -> Rope:
        return self._ropes[l]

    def write(self, l: int, fresh: Projected, keys: Tensor) -> None:
        self._cache.write(l, self._here, keys, fresh.v)

    def attend(self, l: int, q: Tensor) -> Tensor:
        spec = self._specs[l]
        return attend(q, self._cache.keys[l], self._cache.values[l], spec, self._plans[spec.window])


@torch.inference_mode()
def append(adapter: DecoderModel, cache: KVCache, at: int, tokens: Sequence[int]) -> Tensor:
    """Run these tokens at positions `at`, `at` + 1, ..., append their KV -> logits [n, V] after each.

    The cache must have room for them.
    """
    rows = [Row(cache, at + i, token) for i, token in enumerate(tokens)]
    if native := _native(adapter, rows):
        return native(rows)
    hidden = adapter.embed(torch.tensor(tokens, device=adapter.device))
    return adapter.logits(run(run_layers(adapter, hidden, _OneRequest(adapter, cache, at, len(tokens)))))


class _ManyRequests:
    """One row each of several requests, which share the matmuls; each attends to its own cache."""

    def __init__(self, adapter: DecoderModel, rows: Sequence[Row]) -> None:
        self._rows, self._specs = rows, adapter.specs
        self._ropes = adapter.rope(torch.tensor([row.at for row in rows], device=adapter.device))
        places = [Rows.on(adapter.device, torch.tensor([row.at])) for row in rows]
        self._plans = [plans_by_window(place, adapter.group, adapter.windows) for place in places]

    def rope(self, l: int) -> Rope:
        return self._ropes[l]

    def write(self, l: int, fresh: Projected, keys: Tensor) -> None:
        for b, row in enumerate(self._rows):
            only = slice(b, b + 1)
            row.cache.write(l, slice(row.at, row.at + 1), keys[:, only], fresh.v[:, only])

    def attend(self, l: int, q: Tensor) -> Tensor:
        spec = self._specs[l]
        parts = zip(self._rows, self._plans, strict=True)
        return torch.cat(
            [
                attend(q[:, b : b + 1], row.cache.keys[l], row.cache.values[l], spec, plans[spec.window])
                for b, (row, plans) in enumerate(parts)
            ]
        )


@torch.inference_mode()
def append_each(adapter: DecoderModel, rows: Sequence[Row]) -> Tensor:
    """Run each row's token at its position, append its KV -> logits [B, V]. Equals `append` of each, to rounding."""
    native = _native(adapter, rows)
    return native(rows) if native else run_rows(adapter, rows)


def decode_in_int8(adapter: DecoderModel) -> None:
    """Have answers decoded with an int8 copy of the weights. Raises ConfigError where the model has no native step."""
    decoder, reason = native_decoder(adapter, run_rows, int8=True)
    if decoder is None:
        raise ConfigError(
            f"reader.decode_weights=int8 cannot be used with this model: {reason}; leave it at model",
            setting="reader.decode_weights",
        )
    adapter.int8_decoding = True


def decode_each(adapter: DecoderModel, rows: Sequence[Row]) -> Tensor:
    """`append_each` with the weights that answers are decoded with: the model's own, or their int8 copy."""
    decoder = native_decoder(adapter, run_rows, int8=True)[0] if adapter.int8_decoding else None
    if decoder is None:
        return append_each(adapter, rows)
    return torch.cat([decoder(rows[i : i + MAX_ROWS]) for i in range(0, len(rows), MAX_ROWS)])


def _native(adapter: DecoderModel, rows: Sequence[Row]) -> NativeDecoder | None:
    """One native call for these rows, where there is such; a row's numbers do not depend on how many there are."""
    return native_decoder(adapter, run_rows)[0] if 0 < len(rows) <= MAX_ROWS else None


@torch.inference_mode()
def run_rows(adapter: DecoderModel, rows: Sequence[Row]) -> Tensor:
    """The same by the layer loop."""
    hidden = adapter.embed(torch.tensor([row.token for row in rows], device=adapter.device))
    return adapter.logits(run(run_layers(adapter, hidden, _ManyRequests(adapter, rows))))


class _Captured:
    """One row each of B requests at positions that only the device knows, as a graph replays them."""

    def __init__(self, adapter: DecoderModel, keys: Tensor, values: Tensor, at: Tensor, slot: Tensor) -> None:
        self._keys, self._values, self._at, self._slot = keys, values, at, slot
        self._specs, self._ropes = adapter.specs, adapter.rope(at)
        self._requests = torch.arange(len(keys), device=keys.device)

    def rope(self, l: int) -> Rope:
        return self._ropes[l]

    def write(self, l: int, fresh: Projected, keys: Tensor) -> None:
        self._keys[:, l][self._requests, :, self._slot] = keys.transpose(0, 1)
        self._values[:, l][self._requests, :, self._slot] = fresh.v.transpose(0, 1)

    def attend(self, l: int, q: Tensor) -> Tensor:
        spec, only = self._specs[l], [slice(b, b + 1) for b in range(len(self._keys))]
        caches = zip(only, self._keys[:, l], self._values[:, l], strict=True)
        return torch.cat([attend_at(q[:, b], keys, values, spec, self._at[b]) for b, keys, values in caches])


@torch.inference_mode()
def append_captured(
    adapter: DecoderModel, keys: Tensor, values: Tensor, token: Tensor, at: Tensor, slot: Tensor
) -> Tensor:
    """Tokens [B] at positions [B] over B caches, keys and values [B, L, K, T, D] -> logits [B, V].

    Each row's KV is written at its slot [B]: its position, or a place that nobody reads.
    """
    return adapter.logits(
        run(run_layers(adapter, adapter.embed(token), _Captured(adapter, keys, values, at, slot)))
    )
