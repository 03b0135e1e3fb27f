"""Layers on their way to a device that is late: each arrives as it was read, and the computing thread waits for none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import ChunkKV
from blendserve.fetch.layers import LayerReader
from blendserve.store.view import TensorView
from tests.support.stores import chunk
from tests.support.streams import LateCopyStream, LateMark

LAYERS = 9


class Unstable(TensorView):
    """A view as of a map: what it gave for a layer is gone when it is read again."""

    def __init__(self, kv: ChunkKV) -> None:
        super().__init__(kv)
        self.in_memory = False
        self.chunk = TensorView(kv)
        both = torch.stack([kv.keys[0], kv.values[0]])  # side by side, as in a record
        self.page = both[0], both[1]
        self.reads: list[int] = []

    def layer(self, l: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads.append(l)
        for page, part in zip(self.page, self.chunk.layer(l), strict=True):
            page.copy_(part)
        return self.page


def is_layer(layer: Sequence[tuple[torch.Tensor, torch.Tensor]], views: Sequence[Unstable], l: int) -> bool:
    """Whether it is layer l of all chunks."""
    pairs = zip(layer, (view.chunk.layer(l) for view in views), strict=True)
    return all(torch.equal(a, b) for found, wanted in pairs for a, b in zip(found, wanted, strict=True))


def unstable(*lengths: int, dtype: torch.dtype = torch.float32) -> list[Unstable]:
    return [Unstable(chunk(n, LAYERS, dtype=dtype, seed=i)) for i, n in enumerate(lengths)]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.sampled_from([torch.bfloat16, torch.float32]))
def test_a_layer_is_whole_once_its_own_mark_has_passed_and_stays_so(
    lengths: list[int], dtype: torch.dtype
) -> None:
    views, stream, layers = unstable(*lengths, dtype=dtype), LateCopyStream(), []
    with closing(LayerReader(views, LAYERS, stream)) as reader:
        for l in range(LAYERS):
            layers.append(reader.take(l))
            mark = stream.handed[l]
            assert isinstance(mark, LateMark)
            stream.run(mark.upto)
            assert is_layer(layers[l], views, l)
    assert stream.waited_in == []
    assert all(is_layer(layer, views, l) for l, layer in enumerate(layers))
    assert [view.reads for view in views] == [list(range(LAYERS))] * len(views)
    n_copies = sum(1 if n else 2 for n in lengths)  # keys and values of a chunk together, unless it is empty
    assert len(stream.copies) == n_copies * LAYERS


def test_tensors_on_the_device_are_left_there() -> None:
    stream, kv = LateCopyStream(), chunk(6, LAYERS)
    with stream.entered():
        there = TensorView(ChunkKV(stream.send(kv.keys), stream.send(kv.values)))
    here = TensorView(chunk(3, LAYERS, seed=1))
    with closing(LayerReader([there, here], LAYERS, stream)) as reader:
        layers = [reader.take(l) for l in range(LAYERS)]
    stream.finish()
    assert len(stream.copies) == 2 + 2 * LAYERS  # `here` has keys and values apart
    for l, layer in enumerate(layers):
        assert layer[0][0].data_ptr() == there.layer(l)[0].data_ptr()
        assert torch.equal(layer[0][1], kv.values[l])
        assert torch.equal(layer[1][1], here.layer(l)[1])
