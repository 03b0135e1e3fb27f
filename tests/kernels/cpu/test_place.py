"""The compiled rotation against the model's own, to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.kernels import verify
from blendserve.kernels.cpu import place as kernel
from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.cpu.library import dtype_of
from blendserve.kernels.rotary import HALVES
from blendserve.kernels.types import Rope
from blendserve.kernels.verify import PLAIN_HALVES, some_rope
from tests.support.models import KINDS, tiny_adapter

OPERATION = "place"


@given(
    st.sampled_from([1, 3]),
    st.sampled_from([(32, 32), (64, 64), (80, 32), (100, 64), (128, 128), (256, 224)]),
    st.lists(st.sampled_from([1, 5, 130, 300]), max_size=3),
    st.integers(0, 99),
)
@torch.inference_mode()
def test_places_equal_the_formula(
    level: Level, heads: int, dims: tuple[int, int], lengths: list[int], seed: int
) -> None:
    dtype, generator, (dim, width) = dtype_of(level), torch.Generator().manual_seed(seed), dims
    end = 3 + sum(lengths) + 2 * len(lengths)
    rope = some_rope(end, width, 1.1, generator, dtype)
    keys, values = torch.zeros(2, heads, end, dim, dtype=dtype)
    wanted, at, parts = torch.zeros(2, heads, end, dim, dtype=dtype), 3, []
    for n in lengths:
        k, v = torch.randn(2, heads, n, dim, generator=generator).to(dtype)
        parts.append((at, k, v))
        here = slice(at, at + n)
        wanted[0, :, here], wanted[1, :, here] = PLAIN_HALVES.rotate(k, rope.at(here)), v
        at += n + 2
    kernel.place(level, parts, keys, values, rope, PLAIN_HALVES)
    assert torch.equal(keys, wanted[0])
    assert torch.equal(values, wanted[1])


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_rows_are_turned_as_the_family_turns_them(
    level: Level, name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, generator = tiny_adapter(name), torch.Generator().manual_seed(0)
    rope = some_rope(50, width, 1.1, generator, dtype_of(level))
    x = torch.randn(50, 3, 64, generator=generator).to(dtype_of(level)).transpose(0, 1)
    if adapter.rotary.form == HALVES:
        assert kernel.fits_rotation(level, x, rope, adapter.rotary)
        ours = kernel.rotate(level, x, rope, adapter.rotary)
    else:
        ours = adapter.rotate(x, rope)
    monkeypatch.setenv(verify.SWITCH, "0")
    assert torch.equal(ours, adapter.rotate(x, rope))


def test_most_families_turn_halves() -> None:
    assert {name for name in KINDS if tiny_adapter(name).rotary.form != HALVES} == {"cohere"}


def test_refuses_what_it_cannot_do(level: Level) -> None:
    x, turn = torch.zeros(2, 8, 64, dtype=dtype_of(level)), torch.zeros(8, 64, dtype=dtype_of(level))

    def can(x: torch.Tensor, cos: torch.Tensor) -> bool:
        return kernel.fits_rotation(level, x, Rope(cos, cos), PLAIN_HALVES)

    with torch.inference_mode():
        assert can(x, turn)
        assert not can(x.half(), turn)
        assert not can(x, turn.half())
        assert not can(x, turn[:, :16])
        assert not can(x[..., :32], turn)
        assert not can(x.transpose(1, 2), turn)
    assert not can(x, turn)  # gradients would be lost
