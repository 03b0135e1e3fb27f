"""A layer of stored KV put where its tokens stand in this prompt: keys rotated, values as they are.

In one call of a compiled kernel where there is one for this device, dtype and rotation.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from blendserve.core import Span
from blendserve.gpu import place as by_triton
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
    stored, plain = [k for k, _ in layer], [v for _, v in layer]
    if adapter.turns_halves and all(native.takes(x, rope.cos, rope.sin) for x in (*stored[:1], keys)):
        native.place(
            [(s.start, k, v) for s, (k, v) in zip(spans, layer, strict=True)],
            keys,
            values,
            rope.cos,
            rope.sin,
        )
    elif by_triton.takes(adapter, stored, keys) and (form := by_triton.form_of(adapter)):
        by_triton.place(stored, plain, [s.start for s in spans], keys, values, rope.cos, rope.sin, form)
    else:
        place_plainly(adapter, spans, layer, keys, values, rope)


def place_plainly(
    adapter: Adapter,
    spans: Sequence[Span],
    layer: Sequence[tuple[Tensor, Tensor]],
    keys: Tensor,
    values: Tensor,
    rope: Rope,
) -> None:
    """The same by the model's own rotation, chunk by chunk."""
    for span, (stored, plain) in zip(spans, layer, strict=True):
        here = slice(span.start, span.stop)
        keys[:, here] = adapter.rotate(stored.to(keys.device), rope.at(here))
        values[:, here] = plain
