"""The compiled rotation against the model's own, to the bit."""

from __future__ import annotations

import pytest
import torch
from blendserve.native.check import some_turn, turned
from hypothesis import given
from hypothesis import strategies as st

from blendserve import native
from blendserve.models.adapter import Rope
from blendserve.native import place as kernel
from tests.tiny import KINDS, tiny_adapter

pytestmark = pytest.mark.skipif(not native.status().active, reason=native.status().reason)


@given(
    st.sampled_from([1, 3]),
    st.sampled_from([(32, 32), (64, 64), (80, 32), (100, 64), (128, 128), (256, 224)]),
    st.lists(st.sampled_from([1, 5, 130, 300]), max_size=3),
    st.integers(0, 99),
)
@torch.inference_mode()
def test_places_equal_the_formula(heads: int, dims: tuple[int, int], lengths: list[int], seed: int) -> None:
    generator, (dim, width) = torch.Generator().manual_seed(seed), dims
    end = 3 + sum(lengths) + 2 * len(lengths)
    cos, sin = some_turn(end, width, 1.1, generator)
    keys, values = torch.zeros(2, heads, end, dim).bfloat16()
    wanted, at, parts = torch.zeros(2, heads, end, dim).bfloat16(), 3, []
    for n in lengths:
        k, v = torch.randn(2, heads, n, dim, generator=generator).bfloat16()
        parts.append((at, k, v))
        here = slice(at, at + n)
        wanted[0, :, here], wanted[1, :, here] = turned(k, cos[here], sin[here]), v
        at += n + 2
    kernel.place(parts, keys, values, cos, sin)
    assert torch.equal(keys, wanted[0])
    assert torch.equal(values, wanted[1])


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_rows_are_turned_as_the_family_turns_them(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, generator = tiny_adapter(name), torch.Generator().manual_seed(0)
    rope = Rope(*some_turn(50, width, 1.1, generator))
    x = torch.randn(50, 3, 64, generator=generator).bfloat16().transpose(0, 1)
    ours = adapter.rotate(x, rope)
    assert kernel.takes(x, rope.cos, rope.sin)
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "turns_halves", False)
        assert torch.equal(ours, adapter.rotate(x, rope))


def test_most_families_turn_halves() -> None:
    assert {name for name in KINDS if not tiny_adapter(name).turns_halves} == {"cohere"}


def test_refuses_what_it_cannot_do() -> None:
    x, turn = torch.zeros(2, 8, 64, dtype=torch.bfloat16), torch.zeros(8, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert kernel.takes(x, turn, turn)
        assert not kernel.takes(x.float(), turn, turn)
        assert not kernel.takes(x, turn.float(), turn)
        assert not kernel.takes(x, turn[:, :16], turn[:, :16])
        assert not kernel.takes(x[..., :32], turn, turn)
        assert not kernel.takes(x.transpose(1, 2), turn, turn)
    assert not kernel.takes(x, turn, turn)  # gradients would be lost
