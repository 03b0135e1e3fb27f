"""The compiled loops of coded KV against their plain form, to the bit, at every instruction set."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.kernels import coding
from blendserve.kernels.cpu import coding as kernel
from blendserve.kernels.cpu.isa import Level
from tests.kernels.test_coding import MODEL, layers

OPERATION = "decode"


def decoded(
    level: Level, segment: memoryview, below: np.ndarray | None, n_tokens: int, means: np.ndarray
) -> np.ndarray:
    """The symbols alone, by the kernel."""
    axes = len(means)
    codes = coding.some_codes(n_tokens, coding.BLOCK)
    given = segment, (below, codes), means, MODEL, coding.some_map(coding.BLOCK, axes), 4, torch.float32
    return kernel.decode(level, *given)[1]


@given(layer=layers(), seed=st.integers(0, 9), lowest=st.booleans())
def test_bytes_and_symbols_are_the_same(
    level: Level, layer: tuple[np.ndarray, np.ndarray, np.ndarray], seed: int, lowest: bool
) -> None:
    values, _, means = layer
    seen = None if lowest else below(len(values), seed)
    contexts = coding.contexts_of(seen, len(values))
    segment = coding.pack_reference(values, contexts, means, MODEL)
    assert kernel.pack(level, values, contexts, means, MODEL) == segment
    assert np.array_equal(decoded(level, memoryview(segment), seen, len(values), means), values)


@given(layer=layers(), data=st.data())
def test_damage_is_judged_the_same(
    level: Level, layer: tuple[np.ndarray, np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    values, _, means = layer
    seen = below(len(values), 1)
    contexts = coding.contexts_of(seen, len(values))
    segment = bytearray(coding.pack_reference(values, contexts, means, MODEL))
    for _ in range(data.draw(st.integers(1, 3))):
        segment[data.draw(st.integers(0, len(segment) - 1))] = data.draw(st.integers(0, 255))
    segment = segment[: data.draw(st.integers(0, len(segment)))]
    found: list[np.ndarray | None] = []
    judges: list[Callable[[memoryview], np.ndarray]] = [
        lambda given: coding.unpack_reference(given, contexts, means, MODEL),
        lambda given: decoded(level, given, seen, len(values), means),
    ]
    for judge in judges:
        try:
            found.append(judge(memoryview(segment)))
        except ValueError:
            found.append(None)
    assert (found[0] is None) == (found[1] is None)
    assert found[0] is None or np.array_equal(found[0], found[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("axes", [4, 28, 36, 80])
@pytest.mark.parametrize("spread", [0.3, 1.5, 40.0])
def test_a_layer_is_decoded_as_the_plain_form_does(level: Level, axes: int, spread: float) -> None:
    """Symbols that are compared, looked up and escaped, in whole and in broken groups."""
    generator, layer = np.random.default_rng(axes), coding.some_map(32, axes)
    values = generator.laplace(scale=spread, size=(23, axes)).clip(-128, 127).astype(np.int8)
    means, codes = np.full(axes, int(spread * coding.ONE), np.int32), coding.some_codes(23, 32)
    for seen in (below(23, 3), None):
        segment = coding.pack_reference(values, coding.contexts_of(seen, 23), means, MODEL)
        given = memoryview(segment), (seen, codes), means, MODEL, layer, 8, torch.bfloat16
        got, wanted = kernel.decode(level, *given), coding.decode_reference(*given)
        assert torch.equal(got[0], wanted[0])
        assert np.array_equal(got[1], values)
        assert torch.equal(got[2], wanted[2])


def below(n_tokens: int, seed: int) -> np.ndarray:
    """Symbols of the layer below, of some tokens many times those of others."""
    codes = coding.some_codes(n_tokens, 37, seed).numpy()
    codes[1::3] //= 60
    return codes


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
