"""The compiled rotation against the model's own, to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.kernels import verify
from blendserve.kernels.cpu import place as kernel
from blendserve.kernels.cpu.isa import LEVELS
from blendserve.kernels.rotary import HALVES
from blendserve.kernels.types import Rope
from blendserve.kernels.verify import PLAIN_HALVES, some_rope
from tests.tiny import KINDS, tiny_adapter

BF16 = LEVELS["avx512_bf16"]
pytestmark = pytest.mark.skipif(not verify.cpu_status(BF16).active, reason=verify.cpu_status(BF16).reason)


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
    rope = some_rope(end, width, 1.1, generator)
    keys, values = torch.zeros(2, heads, end, dim).bfloat16()
    wanted, at, parts = torch.zeros(2, heads, end, dim).bfloat16(), 3, []
    for n in lengths:
        k, v = torch.randn(2, heads, n, dim, generator=generator).bfloat16()
        parts.append((at, k, v))
        here = slice(at, at + n)
        wanted[0, :, here], wanted[1, :, here] = PLAIN_HALVES.rotate(k, rope.at(here)), v
        at += n + 2
    kernel.place(BF16, parts, keys, values, rope, PLAIN_HALVES)
    assert torch.equal(keys, wanted[0])
    assert torch.equal(values, wanted[1])


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_rows_are_turned_as_the_family_turns_them(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, generator = tiny_adapter(name), torch.Generator().manual_seed(0)
    rope = some_rope(50, width, 1.1, generator)
    x = torch.randn(50, 3, 64, generator=generator).bfloat16().transpose(0, 1)
    ours = adapter.rotate(x, rope)
    assert kernel.fits_rotation(BF16, x, rope, PLAIN_HALVES)
    monkeypatch.setenv(verify.SWITCH, "0")
    assert torch.equal(ours, adapter.rotate(x, rope))


def test_most_families_turn_halves() -> None:
    assert {name for name in KINDS if tiny_adapter(name).rotary.form != HALVES} == {"cohere"}


def test_refuses_what_it_cannot_do() -> None:
    x, turn = torch.zeros(2, 8, 64, dtype=torch.bfloat16), torch.zeros(8, 64, dtype=torch.bfloat16)

    def can(x: torch.Tensor, cos: torch.Tensor) -> bool:
        return kernel.fits_rotation(BF16, x, Rope(cos, cos), PLAIN_HALVES)

    with torch.inference_mode():
        assert can(x, turn)
        assert not can(x.float(), turn)
        assert not can(x, turn.float())
        assert not can(x, turn[:, :16])
        assert not can(x[..., :32], turn)
        assert not can(x.transpose(1, 2), turn)
    assert not can(x, turn)  # gradients would be lost
