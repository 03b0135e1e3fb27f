"""Symbols to bytes and back, and symbols to numbers: the plain form, which compiled kernels must equal to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.kernels import coding
from blendserve.kernels.coding import (
    CONTEXTS,
    ESCAPE,
    ONE,
    STREAMS,
    SymbolModel,
    pack_reference,
    unpack_reference,
)

MODEL = coding.some_model()


@st.composite
def layers(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Symbols [C, N], the tokens' contexts [C] and what is expected of the axes [N]."""
    tokens, axes = draw(st.integers(1, 12)), draw(st.sampled_from([0, 4, 8, 20]))
    generator = np.random.default_rng(draw(st.integers(0, 999)))
    spread = draw(st.sampled_from([0.01, 0.5, 4.0, 90.0]))
    values = generator.laplace(scale=spread, size=(tokens, axes)).clip(-128, 127).astype(np.int8)
    contexts = generator.integers(0, CONTEXTS, tokens).astype(np.uint8)
    return values, contexts, generator.integers(4, 90 * ONE, axes).astype(np.int32)


@given(layers())
def test_symbols_come_back(layer: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    values, contexts, means = layer
    segment = pack_reference(values, contexts, means, MODEL)
    assert np.array_equal(unpack_reference(memoryview(segment), contexts, means, MODEL), values)


@given(layers(), st.data())
def test_other_bytes_are_refused_or_are_other_symbols(
    layer: tuple[np.ndarray, np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    values, contexts, means = layer
    segment = bytearray(pack_reference(values, contexts, means, MODEL))
    if data.draw(st.booleans()):
        segment = segment[: data.draw(st.integers(0, len(segment) - 1))]
    else:
        segment[data.draw(st.integers(0, len(segment) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = unpack_reference(memoryview(segment), contexts, means, MODEL)
    except ValueError:
        return
    assert not np.array_equal(found, values)


def test_what_is_expected_costs_little_and_what_is_not_costs_more() -> None:
    zeros, contexts = np.zeros((256, 32), np.int8), np.zeros(256, np.uint8)
    low, high = np.full(32, 4, np.int32), np.full(32, 4 * ONE, np.int32)
    sizes = [len(pack_reference(zeros, contexts, means, MODEL)) for means in (low, high)]
    assert sizes[0] < 256 * 32 / 8 / 4  # a quarter of a bit each
    assert sizes[1] > 2 * sizes[0]


def test_size_follows_the_entropy() -> None:
    """At most 3% and the states above the cross-entropy of one class, of which the symbols are drawn."""
    share = MODEL.width[40] / 4096
    classes = np.full_like(MODEL.classes, 40)
    generator = np.random.default_rng(0)
    drawn = generator.choice(ESCAPE, size=(400, 16), p=share[:ESCAPE] / share[:ESCAPE].sum())
    values = np.where(drawn % 2, (drawn + 1) // 2, -(drawn // 2)).astype(np.int8)
    segment = pack_reference(
        values, np.zeros(400, np.uint8), np.full(16, ONE), SymbolModel(classes, MODEL.width)
    )
    bits = -np.log2(share[drawn]).sum()
    assert bits / 8 <= len(segment) <= 1.03 * bits / 8 + 4 * STREAMS


def test_a_model_that_does_not_add_up_is_refused() -> None:
    wrong = MODEL.width.copy()
    wrong[3, ESCAPE] += 1
    with pytest.raises(ValueError, match="fill"):
        SymbolModel(MODEL.classes, wrong)
    with pytest.raises(ValueError, match="shapes"):
        SymbolModel(MODEL.classes[:3], MODEL.width)


@pytest.mark.parametrize("n_tokens", [0, 1, 37])
def test_numbers_equal_the_formula_in_twice_the_precision(n_tokens: int) -> None:
    layer = coding.some_map(32, 8)
    below, symbols = (coding.some_codes(max(n_tokens, 1), n)[:n_tokens] for n in (32, 8))
    heads, codes = coding.reconstruct_reference(below, symbols, layer, 4, torch.float32)
    assert (heads.shape, codes.shape) == ((8, n_tokens, 4), (n_tokens, 32))
    numbers = below.double() @ layer.map.double() * layer.map_scale.double() + layer.mean.double()
    numbers += symbols.double() @ layer.residual.double() * layer.residual_scale.double()
    torch.testing.assert_close(
        heads.transpose(0, 1).reshape(n_tokens, 32).double(), numbers, rtol=1e-5, atol=1e-4
    )
    near = (numbers * layer.code_scale + layer.code_zero).clamp(-128, 127)
    assert bool(((codes.double() - near).abs() <= 0.501).all())


@pytest.mark.parametrize("n_tokens", [1, 30])
def test_contexts_tell_large_tokens_from_small_ones(n_tokens: int) -> None:
    """By the definition: sixteenths of the mean, in whole numbers."""
    symbols = (
        np.random.default_rng(2).integers(-128, 128, (n_tokens, 5)) // np.arange(1, n_tokens + 1)[:, None]
    )
    symbols[0] = -128
    sums = [sum(abs(int(x)) for x in token) for token in symbols]
    wanted = [sum(16 * n * n_tokens // sum(sums) >= ratio for ratio in coding.RATIOS) for n in sums]
    assert coding.contexts_of(symbols.astype(np.int8), n_tokens).tolist() == wanted
    assert (coding.contexts_of(None, n_tokens) == CONTEXTS - 1).all()
    assert (coding.contexts_of(np.zeros((n_tokens, 5), np.int8), n_tokens) == 0).all()
