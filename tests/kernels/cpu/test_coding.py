"""The compiled loops of coded KV against their plain form, to the bit, at every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.kernels import coding
from blendserve.kernels.cpu import coding as kernel
from blendserve.kernels.cpu.isa import Level
from tests.kernels.test_coding import MODEL, layers

OPERATION = "unpack"


@given(layer=layers())
def test_bytes_and_symbols_are_the_same(
    level: Level, layer: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    values, contexts, means = layer
    segment = coding.pack_reference(values, contexts, means, MODEL)
    assert kernel.pack(level, values, contexts, means, MODEL) == segment
    assert np.array_equal(kernel.unpack(level, memoryview(segment), contexts, means, MODEL), values)


@given(layer=layers(), data=st.data())
def test_damage_is_judged_the_same(
    level: Level, layer: tuple[np.ndarray, np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    values, contexts, means = layer
    segment = bytearray(coding.pack_reference(values, contexts, means, MODEL))
    for _ in range(data.draw(st.integers(1, 3))):
        segment[data.draw(st.integers(0, len(segment) - 1))] = data.draw(st.integers(0, 255))
    segment = segment[: data.draw(st.integers(0, len(segment)))]
    found: list[np.ndarray | None] = []
    for judge in (coding.unpack_reference, lambda *args: kernel.unpack(level, *args)):
        try:
            found.append(judge(memoryview(segment), contexts, means, MODEL))
        except ValueError:
            found.append(None)
    assert (found[0] is None) == (found[1] is None)
    assert found[0] is None or np.array_equal(found[0], found[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@given(
    n_tokens=st.integers(0, 40),
    dim=st.sampled_from([4, 8, 16, 64]),
    heads=st.sampled_from([4, 8, 20]),
    axes=st.sampled_from([0, 4, 28]),
    known=st.booleans(),
    seed=st.integers(0, 9),
)
def test_numbers_are_the_same(
    level: Level, dtype: torch.dtype, n_tokens: int, dim: int, heads: int, axes: int, known: bool, seed: int
) -> None:
    layer = coding.some_map(heads * dim, axes, seed)
    below = coding.some_codes(n_tokens + 1, heads * dim, seed)[1:]
    symbols = coding.some_codes(n_tokens + 1, axes, seed + 2)[1:] if known else None
    args = below, symbols, layer, dim, dtype
    assert kernel.fits_reconstruct(level, *args)
    for got, wanted in zip(
        kernel.reconstruct(level, *args), coding.reconstruct_reference(*args), strict=True
    ):
        assert torch.equal(got, wanted)


def test_widths_that_fill_no_block_are_left_to_the_plain_form(level: Level) -> None:
    codes = coding.some_codes(3, 24)
    layer = coding.some_map(24, 4)
    assert not kernel.fits_reconstruct(level, codes, None, layer, 4, torch.float32)
