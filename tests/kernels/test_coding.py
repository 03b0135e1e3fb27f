"""Coded symbols: their size, what a model must be, and damage, which every backend judges the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.kernels import coding, verify
from blendserve.kernels.coding import CONTEXTS, ESCAPE, SymbolModel
from tests.support.kernels import MODEL, TABLE, Options, Way, ways

DECODERS = [way for way in ways() if way.operation == "decode"]


@pytest.mark.parametrize("way", DECODERS, ids=lambda way: way.name)
@given(options=TABLE["decode"].shapes(DECODERS[0]), data=st.data())
def test_other_bytes_are_refused_or_are_other_symbols(
    way: Way, options: Options, data: st.DataObject
) -> None:
    """As the plain form judges them, in whole."""
    if way.level is not None and not (status := verify.cpu_status(way.level)).active:
        pytest.skip(status.reason)
    segment, *rest = way.args(torch.float32, options)
    right, damaged = way.run((segment, *rest))[1], bytearray(segment)
    if data.draw(st.booleans()):
        damaged[data.draw(st.integers(0, len(segment) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        damaged = damaged[: data.draw(st.integers(0, len(segment) - 1))]

    def judged(by: Way) -> Any:
        try:
            return by.run((memoryview(damaged), *rest))[1]
        except ValueError:
            return None

    found, plain = judged(way), judged(DECODERS[-1])
    assert (found is None) == (plain is None)
    assert found is None or (np.array_equal(found, plain) and not np.array_equal(found, right))


def test_a_model_that_does_not_add_up_is_refused() -> None:
    wrong = MODEL.width.copy()
    wrong[3, ESCAPE] += 1
    for classes, width in ((MODEL.classes, wrong), (MODEL.classes[:3], MODEL.width)):
        with pytest.raises(ValueError):  # noqa: PT011
            SymbolModel(classes, width)


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
