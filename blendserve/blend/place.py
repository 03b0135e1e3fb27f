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
        parts = [(s.start, k, v) for s, (k, v) in zip(spans, layer, strict=True)]
        native.place(parts, keys, values, rope.cos, rope.sin)
    elif by_triton.takes(adapter, stored, keys) and (form := by_triton.form_of(adapter)):
        by_triton.place(stored, plain, [s.start for s in spans], keys, values, rope.cos, rope.sin, form)
    else:
        for span, k, v in zip(spans, stored, plain, strict=True):
            here = slice(span.start, span.stop)
            keys[:, here] = adapter.rotate(k.to(keys.device), rope.at(here))  # the model's own
            values[:, here] = v
