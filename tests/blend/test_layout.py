"""What each token starts from, and stored KV in its place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.blend.layout import Layout, lay_out
from blendserve.blend.loader import KVLoader
from blendserve.core import ChunkKV, Prompt
from blendserve.errors import CorruptRecord
from blendserve.models.kv_cache import KVCache
from blendserve.store.memory import MemoryChunk
from tests.support.blending import lay, some_prompt
from tests.support.models import tiny_adapter

LENGTHS = st.lists(st.sampled_from([0, 1, 2, 9]), max_size=6)


@given(LENGTHS, st.integers(0, 3), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(0, 63))
def test_every_token_has_one_kind(
    lengths: list[int], prefix: int, suffix: int, prefix_found: bool, behind_prefix: bool, found: int
) -> None:
    prompt = some_prompt(lengths, prefix, suffix)
    chunks = [stored(n) if found >> i & 1 else None for i, n in enumerate(lengths)]
    front = stored(prefix) if prefix_found and prefix else None
    layout = lay_out(prompt, front, chunks, behind_prefix=behind_prefix)
    kinds = kinds_by_rule(prompt, front is not None, [c is not None for c in chunks], behind_prefix)
    assert "".join("E" if e else "R" if r else "F" if f else "?" for e, r, f in marked(layout)) == kinds
    assert layout.n_found == sum(len(s) for s, c in zip(prompt.spans, chunks, strict=True) if c is not None)


def stored(n: int) -> MemoryChunk:
    return MemoryChunk(ChunkKV(*torch.zeros(2, 1, 1, n, 2)))


def marked(layout: Layout) -> list[tuple[bool, bool, bool]]:
    return list(zip(layout.exact.tolist(), layout.reusable.tolist(), layout.fresh.tolist(), strict=True))


def kinds_by_rule(prompt: Prompt, prefix: bool, chunks: list[bool], behind_prefix: bool) -> str:
    """The module's strip, token by token."""
    kinds = ("E" if prefix else "F") * len(prompt.prefix)
    for chunk, found in zip(prompt.chunks, chunks, strict=True):
        first = len(kinds) == len(prompt.prefix) and behind_prefix
        kinds += ("F" if not found else "E" if first else "R") * len(chunk)
    return kinds + "F" * len(prompt.suffix)


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
