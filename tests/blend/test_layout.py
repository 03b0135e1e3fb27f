"""Stored KV in its place; what each token starts from is in test_differential.py."""

from __future__ import annotations

import pytest
import torch

from blendserve.blend.layout import lay_out
from blendserve.blend.loader import KVLoader
from blendserve.errors import CorruptRecord
from blendserve.models.kv_cache import KVCache
from blendserve.store.memory import MemoryChunk
from tests.support.blending import lay, some_prompt
from tests.support.models import tiny_adapter


def test_places_each_piece_rotated_to_its_span_once() -> None:
    adapter, prompt = tiny_adapter("llama-yarn"), some_prompt([4, 0, 7])
    layout = lay(adapter, prompt)
    rope = adapter.rope(torch.arange(len(prompt)))
    cache = KVCache(adapter, len(prompt))
    loader = KVLoader(adapter, cache, layout.placements, rope)
    loader.place(2)
    for piece in layout.placements:
        keys, values = piece.view.layer(2)
        for offset, at in enumerate(range(piece.span.start, piece.span.stop)):
            turned = adapter.rotate(keys[:, offset : offset + 1], adapter.rope(torch.tensor([at]))[2])
            assert torch.equal(cache.keys[2][:, at], turned[:, 0])
            assert torch.equal(cache.values[2][:, at], values[:, offset])
    assert loader.bytes_loaded == sum(p.view.n_bytes for p in layout.placements) // adapter.n_layers
    cache.keys.zero_()
    loader.place(2)
    assert not cache.keys.any()


def test_a_damaged_layer_is_told() -> None:
    class Damaged(MemoryChunk):
        def layer(self, l: int) -> tuple[torch.Tensor, torch.Tensor]:
            raise CorruptRecord(b"k", f"layer {l}")

    adapter, prompt = tiny_adapter("llama"), some_prompt([4])
    view = lay(adapter, prompt).placements[1].view
    assert isinstance(view, MemoryChunk)
    layout = lay_out(prompt, None, [Damaged(view.kv)], behind_prefix=True)
    cache = KVCache(adapter, len(prompt))
    with pytest.raises(CorruptRecord, match="layer 1"):
        KVLoader(adapter, cache, layout.placements, adapter.rope(torch.arange(len(prompt)))).place(1)
