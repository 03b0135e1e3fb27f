"""Moving keys: there and back is the identity, and a moved key is the key that the model itself would have had there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.blend.precompute import ChunkComputer
from blendserve.kernels.types import Rope
from tests.support.blending import assert_near, distance, model_kv, some_prompt
from tests.support.models import KINDS, TINY, tiny_adapter

FAMILIES = pytest.mark.parametrize("name", TINY)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=30)
@given(a=st.integers(0, 250), b=st.integers(0, 250), seed=st.integers(0, 99))
def test_there_and_back_is_the_identity(name: str, a: int, b: int, seed: int) -> None:
    adapter = tiny_adapter(name)
    keys = torch.randn(2, 3, adapter.head_dim, generator=torch.Generator().manual_seed(seed))
    both = adapter.rope(torch.tensor([a, b, a])), adapter.rope(torch.tensor([b, a, b]))
    for here, other in zip(*both, strict=True):
        there = adapter.rotate(keys, here)
        back = adapter.rotate(there, here.inverse)
        assert_near(back, keys, 1e-5)
        moved = adapter.rotate(back, other)
        assert_near(adapter.rotate(adapter.rotate(moved, other.inverse), here), there, 1e-5)


@FAMILIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moved_layer_0_key_is_the_direct_one_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    adapter = tiny_adapter(name, dtype)
    prompt = some_prompt([13, 13, 13])
    stored = ChunkComputer(adapter, prompt.prefix).compute([chunk.ids for chunk in prompt.chunks])
    forward = model_kv(adapter, prompt.ids)[0][0]
    for span, kv in zip(prompt.spans, stored, strict=True):
        direct = forward[:, span.start : span.stop]
        ropes = adapter.rope(torch.arange(span.start, span.stop + 1))
        moved = adapter.rotate(kv.keys[0], ropes[0].at(slice(0, -1)))
        assert torch.equal(moved, direct), f"largest difference {distance(moved, direct)}"
        misplaced = adapter.rotate(kv.keys[0], ropes[0].at(slice(1, None)))
        assert distance(misplaced, direct) > 0.1


def test_the_inverse_undoes_a_rotation_that_also_scales() -> None:
    angle = torch.tensor([[0.3, 1.1]])
    turned = Rope(2 * angle.cos(), 2 * angle.sin()).inverse
    assert_near(turned.cos, angle.cos() / 2, 1e-6)
    assert_near(turned.sin, -angle.sin() / 2, 1e-6)
