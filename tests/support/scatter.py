"""A second derivation of blending: the borrowed model's own forward on the active rows, over a cache that scatters.

The unmodified model gets the rows' ids, their true positions, a mask by position, and a cache that holds the stored KV
and takes the fresh rows at their places. Slow and dense; shares nothing with blend/prefill.py and blend/attention.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from blendserve.blend.layout import Layout
from blendserve.core import Prompt
from blendserve.models.adapter import Adapter


class ScatterCache(DynamicCache):
    """Holds [L, K, T, D]; `update` writes the rows' KV at their positions and gives the whole layer back."""

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor) -> None:
        super().__init__()
        self.stored_keys, self.stored_values, self.rows = keys, values, rows

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self.stored_keys[layer_idx][:, self.rows] = key_states[0]
        self.stored_values[layer_idx][:, self.rows] = value_states[0]
        return self.stored_keys[layer_idx][None], self.stored_values[layer_idx][None]


@torch.inference_mode()
def scatter_forward(
    adapter: Adapter, prompt: Prompt, layout: Layout, rows: Tensor, hidden: Tensor | None = None
) -> tuple[Any, ScatterCache]:
    """`model.forward` of the rows [S] over the layout's stored KV; `hidden` [T]: positions that nobody may see."""
    n = len(prompt)
    shape = (adapter.n_layers, adapter.n_kv_heads, n, adapter.head_dim)
    keys, values = torch.zeros(shape), torch.zeros(shape)
    for piece in layout.placements:
        at = slice(piece.span.start, piece.span.stop)
        for l in range(adapter.n_layers):
            k, v = piece.view.layer(l)
            keys[l, :, at] = adapter.rotate(k, adapter.rope(torch.arange(at.start, at.stop))[l])
            values[l, :, at] = v
    cache = ScatterCache(keys, values, rows)
    model: Any = adapter.model
    output = model(
        input_ids=torch.tensor(prompt.ids)[rows][None],
        position_ids=rows[None],
        past_key_values=cache,
        attention_mask=_masks(adapter, rows, n, hidden),
        output_attentions=True,
    )
    return output, cache


def _masks(adapter: Adapter, rows: Tensor, n: int, hidden: Tensor | None) -> Any:
    """Additive masks [1, 1, S, T]; one per kind of layer where the model has several."""
    at, row = torch.arange(n), rows[:, None]
    windows = {spec.window for spec in adapter.specs}
    made = {}
    for window in windows:
        unseen = (at > row) | (at <= row - (window or n + 1))
        if hidden is not None:
            unseen |= hidden
        made[window] = torch.zeros(1, 1, *unseen.shape).masked_fill(unseen, torch.finfo(torch.float32).min)
    if len(windows) == 1:
        return made[windows.pop()]
    (window,) = windows - {None}
    return {"full_attention": made[None], "sliding_attention": made[window]}
