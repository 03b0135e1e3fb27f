"""A layer of stored KV put where its tokens stand in this prompt: keys rotated, values as they are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from blendserve.core import Span
from blendserve.models.adapter import Adapter, Rope
from blendserve.native import place as native


def place(
    adapter: Adapter,
    spans: Sequence[Span],
    layer: Sequence[tuple[Tensor, Tensor]],
    keys: Tensor,
    values: Tensor,
    rope: Rope,
) -> None:
    """Stored keys before RoPE and values [K, C, D] of each span -> keys and values [K, T, D]; rope: of positions [T]."""
    alike = [x for x, _ in layer[:1]]  # all of a store's chunks are
    if adapter.turns_halves and all(native.takes(x, rope.cos, rope.sin) for x in (*alike, keys)):
        parts = [(span.start, k, v) for span, (k, v) in zip(spans, layer, strict=True)]
        native.place(parts, keys, values, rope.cos, rope.sin)
        return
    for span, (stored, plain) in zip(spans, layer, strict=True):
        here = slice(span.start, span.stop)
        keys[:, here] = adapter.rotate(stored.to(keys.device), rope.at(here))
        values[:, here] = plain
