"""Coded symbols: native kernels and the plain form against the format read by hand, models, contexts and damage."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.kernels.cpu.build import Unavailable
from blendserve.kernels.cpu.isa import LEVELS, Level, missing
from blendserve.kernels.cpu.library import loaded
from blendserve.store.codecs.predict import rans, rans_native
from blendserve.store.codecs.predict.rans import CONTEXTS, ESCAPE, RansModel
from tests.support.codecs import refuses
from tests.support.kernels import guarded
from tests.support.rans import dequantized, unpacked

MODEL = rans.random_model()
NATIVE = [level for level in LEVELS.values() if "rans_decode" in level.sources]
SIZES = st.fixed_dictionaries(
    {
        "tokens": st.integers(1, 24),
        "axes": st.sampled_from([3, 8, 20, 28, 36]),
        "spread": st.sampled_from([0.01, 0.3, 1.5, 4.0, 90.0]),
        "lowest": st.booleans(),
        "seed": st.integers(0, 99),
    }
)


@pytest.fixture(scope="module", params=NATIVE, ids=lambda level: level.name)
def library(request: pytest.FixtureRequest) -> SimpleNamespace:
    level: Level = request.param
    if reason := missing(level):
        pytest.skip(reason)
    try:
        return loaded(level)
    except Unavailable as error:
        pytest.skip(str(error))


def symbols(tokens: int, axes: int, spread: float, lowest: bool, seed: int) -> Any:
    """Symbols [C, N], those of the layer below, of some tokens much smaller, and the axes' means [N]."""
    numbers = np.random.default_rng(seed)
    values = numbers.laplace(scale=spread, size=(tokens, axes)).clip(-128, 127).astype(np.int8)
    below = numbers.integers(-128, 128, (tokens, 37)).astype(np.int8)
    below[1::3] //= 60
    return values, None if lowest else below, numbers.integers(4, 90 * rans.ONE, axes).astype(np.int32)


@given(SIZES)
def test_the_plain_form_is_the_format_read_by_hand(sizes: dict[str, Any]) -> None:
    values, below, means = symbols(**sizes)
    contexts = rans.contexts_of(below, len(values))
    segment = memoryview(rans.encode_reference(values, contexts, means, MODEL))
    assert torch.equal(unpacked(segment, contexts, means, MODEL), torch.from_numpy(values))
    assert np.array_equal(rans.decode_reference(segment, contexts, means, MODEL), values)


@given(sizes=SIZES)
def test_native_kernels_give_the_same_bytes_and_symbols(
    library: SimpleNamespace, sizes: dict[str, Any]
) -> None:
    values, below, means = symbols(**sizes)
    contexts = rans.contexts_of(below, len(values))
    wanted = rans.encode_reference(values, contexts, means, MODEL)
    assert rans_native.encode(library, values, contexts, means, MODEL) == wanted
    found = rans_native.decode(library, memoryview(wanted), below, len(values), means, MODEL)
    assert np.array_equal(found, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(
    shape=st.sampled_from([(4, 4), (8, 8), (4, 16), (20, 4), (8, 64)]),
    tokens=st.integers(0, 40),
    axes=st.sampled_from([0, 4, 28]),
    zero=st.booleans(),
    seed=st.integers(0, 99),
)
def test_numbers_are_the_formulas_and_the_same_bits_everywhere(
    library: SimpleNamespace,
    dtype: torch.dtype,
    shape: tuple[int, int],
    tokens: int,
    axes: int,
    zero: bool,
    seed: int,
) -> None:
    width, dim = shape[0] * shape[1], shape[1]
    below, given_symbols = (rans.random_codes(tokens + 1, n, seed + n)[1:] for n in (width, axes))
    layer = rans.random_map(width, axes, seed)
    args = below, None if zero else given_symbols, layer
    assert rans_native.is_supported(layer, dim)
    with guarded():
        heads, codes = rans_native.dequantize(library, *args, dim, dtype)
    plain = rans.dequantize_reference(*args, dim, dtype)
    assert torch.equal(heads, plain[0])
    assert torch.equal(codes, plain[1])
    numbers, exact = dequantized(*args, dim)
    eps = torch.finfo(dtype).eps
    assert bool(((heads.double() - numbers).abs() <= eps * numbers.abs() + 1e-3).all())
    assert bool(((codes.double() - exact).abs() <= 0.501).all())


@pytest.mark.parametrize(("dim", "axes"), [(24, 4), (16, 3)])
def test_other_shapes_are_left_to_the_plain_form(library: SimpleNamespace, dim: int, axes: int) -> None:
    layer = rans.random_map(48, axes)
    assert not rans_native.is_supported(layer, dim)
    below, given_symbols = rans.random_codes(5, 48), rans.random_codes(5, axes)
    found = rans_native.dequantize(library, below, given_symbols, layer, dim, torch.float32)
    numbers, _ = dequantized(below, given_symbols, layer, dim)
    assert torch.allclose(found[0].double(), numbers, atol=1e-3)


@given(sizes=SIZES, data=st.data())
def test_other_bytes_are_refused_or_are_other_symbols(
    library: SimpleNamespace, sizes: dict[str, Any], data: st.DataObject
) -> None:
    """Natively as by the plain form, in whole."""
    values, below, means = symbols(**sizes)
    contexts = rans.contexts_of(below, len(values))
    damaged = bytearray(rans.encode_reference(values, contexts, means, MODEL))
    if data.draw(st.booleans()):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        damaged = damaged[: data.draw(st.integers(0, len(damaged) - 1))]
    native = partial(rans_native.decode, library, memoryview(damaged), below, len(values), means, MODEL)
    try:
        plain = rans.decode_reference(memoryview(damaged), contexts, means, MODEL)
    except ValueError:
        assert refuses(native)
        return
    assert np.array_equal(native(), plain)
    assert not np.array_equal(plain, values)


@pytest.mark.parametrize("name", ["encode", "decode", "dequantize"])
def test_the_self_check_refuses_what_is_one_position_off(
    library: SimpleNamespace, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rans_native.check(library)
    right = getattr(rans_native, name)

    def off(library: SimpleNamespace, first: Any, *rest: Any) -> Any:
        if name == "decode":
            return np.roll(right(library, first, *rest), 1, 0)
        moved = first.roll(1, 0) if isinstance(first, torch.Tensor) else np.roll(first, 1, 0)
        return right(library, moved, *rest)

    monkeypatch.setattr(rans_native, name, off)
    with pytest.raises(Unavailable):
        rans_native.check(library)


def test_a_model_that_does_not_add_up_is_refused() -> None:
    wrong = MODEL.width.copy()
    wrong[3, ESCAPE] += 1
    for classes, width in ((MODEL.classes, wrong), (MODEL.classes[:3], MODEL.width)):
        assert refuses(RansModel, classes, width)


@pytest.mark.parametrize("n_tokens", [1, 30])
def test_contexts_tell_large_tokens_from_small_ones(n_tokens: int) -> None:
    """By the definition: sixteenths of the mean, in whole numbers."""
    values = (
        np.random.default_rng(2).integers(-128, 128, (n_tokens, 5)) // np.arange(1, n_tokens + 1)[:, None]
    )
    values[0] = -128
    sums = [sum(abs(int(x)) for x in token) for token in values]
    wanted = [sum(16 * n * n_tokens // sum(sums) >= ratio for ratio in rans.RATIOS) for n in sums]
    assert rans.contexts_of(values.astype(np.int8), n_tokens).tolist() == wanted
    assert (rans.contexts_of(None, n_tokens) == CONTEXTS - 1).all()
    assert (rans.contexts_of(np.zeros((n_tokens, 5), np.int8), n_tokens) == 0).all()
