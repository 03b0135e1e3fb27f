"""Codec predict: prediction from the layer below, exact outliers, and native kernels with the plain form's bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.blend.chunk_kv import ChunkComputer
from blendserve.engine.sensitivity import ModelSensitivity, gradients
from blendserve.kernels.cpu.build import Unavailable
from blendserve.kernels.cpu.isa import LEVELS, Level, missing
from blendserve.kernels.cpu.library import loaded
from blendserve.kv import ChunkKV, stacked
from blendserve.store.codecs.predict import native, rans
from blendserve.store.codecs.predict.codec import Predict
from blendserve.store.codecs.predict.rans import ONE
from blendserve.store.codecs.predict.tables import BIT, Tables, quantised
from tests.support.codecs import decoded, refuses, related
from tests.support.codecs import predict_tables as tables
from tests.support.kernel_switches import guarded
from tests.support.models import tiny_decoder


def size(codec: Predict, kv: ChunkKV) -> int:
    return sum(map(len, codec.encode(kv)))


def test_a_predictable_layer_costs_little() -> None:
    codec, kv = Predict.with_tables(2, tables()), related(60, 99)
    # the same numbers, elsewhere
    keys, values = (
        stacked(kv.keys)[[0, 2, 1, 3]],
        stacked(kv.values)[[0, 3, 1, 2]],
    )
    assert size(codec, kv) < 0.6 * size(codec, replace(kv, keys=keys, values=values))


def test_symbols_are_the_cheaper_of_two() -> None:
    """Error in squared steps, and bits of a geometric distribution with the axis' mean, by brute force."""
    along = torch.randn(200, 6, generator=torch.Generator().manual_seed(1)).numpy() * 2
    means, step = np.array([4, 200, 1000, 4096, 9000, 20000], np.int32), 0.7
    share = means / (ONE + means)  # of a symbol k: share ** k, and half of that for each sign
    both = [np.floor(np.abs(along) / step) + up for up in (0, 1)]
    costs = [(np.abs(along) / step - k) ** 2 + BIT * (-k * np.log2(share) + (k > 0)) for k in both]
    wanted = np.sign(along) * np.where(costs[1] < costs[0], both[1], both[0])
    found = quantised(along, step, means)
    assert (found == wanted).all()
    assert 0 < (found == 0).mean() < 1


def test_known_tokens_cost_an_index() -> None:
    codec, kv = Predict.with_tables(2, tables()), related(60, 99)
    first = len(codec.encode(kv)[0])
    assert first == 8 + 2 * 60
    assert len(codec.encode(replace(kv, ids=()))[0]) > first
    wrong = replace(kv, ids=tuple(i % 50 for i in range(60)))
    apart = decoded(codec, wrong).keys[0] - kv.keys[0]
    assert apart.abs().max() < 0.1  # false ids do not change what is decoded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("level", Predict.levels)
def test_an_outlier_token_stays_exact_and_changes_no_other(dtype: torch.dtype, level: int) -> None:
    """The first token of a prompt, the attention sink, is one."""
    codec, kv = Predict.with_tables(level, tables()), related(40, 5)
    kv = ChunkKV(stacked(kv.keys).to(dtype), stacked(kv.values).to(dtype), ids=kv.ids)
    odd = ChunkKV(stacked(kv.keys).clone(), stacked(kv.values).clone(), ids=kv.ids)
    stacked(odd.keys)[2:, 1, 0], stacked(odd.values)[1, 0, 17] = 300.0, -70.0
    back, plain = decoded(codec, odd), decoded(codec, kv)
    sides = ([stacked(kv.keys), stacked(kv.values)] for kv in (back, odd, plain))
    for got, wanted, without in zip(*sides, strict=True):
        assert torch.equal(got[:, :, [0, 17]], wanted[:, :, [0, 17]])
        others = [t for t in range(40) if t not in (0, 17)]
        apart = (got - without)[:, :, others].float().norm() / without[:, :, others].float().norm()
        assert apart < 0.02  # contexts differ, and with them no value but by rounding up or down


def test_tables_round_trip_and_damaged_ones_are_refused() -> None:
    raw = tables()
    found = Tables.parse(raw)
    assert found.to_bytes() == raw
    changes: tuple[dict[str, Any], ...] = (
        {"n_axes": found.n_axes + 1000},
        {"mean": found.mean * float("nan")},
        {"ids": found.ids.flip(0)},
        {"symbols": found.symbols + 1},
        {"classes": found.classes[:3]},
        {"steps": found.steps.flip(0)},
        {"steps": 0 * found.steps},
        {"axes": found.axes[:, :-1]},
    )
    wrong = [replace(found, **change).to_bytes() for change in changes]
    assert all(refuses(Tables.parse, given) for given in (*wrong, raw[: len(raw) // 2], b"\xff" * 100))


def test_steps_come_from_the_tables() -> None:
    """Stored chunks outlive other steps of the levels. Twice the steps on axes half as long are the same."""
    found, kv = Tables.parse(tables()), related(60, 99)
    doubled = replace(found, steps=2 * found.steps)
    same = replace(doubled, axes_scale=found.axes_scale / 2)
    codecs = [Predict.with_tables(2, made.to_bytes()) for made in (found, same, doubled)]
    segments = [[bytes(segment) for segment in codec.encode(kv)] for codec in codecs]
    assert segments[0] == segments[1]
    assert torch.equal(*(stacked(decoded(codec, kv).keys) for codec in codecs[:2]))
    assert size(codecs[2], kv) < size(codecs[0], kv)


def test_sensitivity_is_a_mean_over_tokens_each_by_the_root_of_its_information(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the few attention sinks would be all of it. The first token never counts."""
    decoder, chunk, window = tiny_decoder("llama", dtype=torch.float32), 40, 60
    ids, made, total = tuple((7 * i + i * i) % 90 for i in range(2 * window)), list[Any](), torch.zeros(())

    def noted(*args: Any) -> Any:
        made.append(gradients(*args))
        return made[-1]

    for name, value in (("gradients", noted), ("CHUNK", chunk), ("WINDOW", window)):
        monkeypatch.setattr(f"{ModelSensitivity.__module__}.{name}", value)
    found = ModelSensitivity(decoder).sensitivity(ids, 2)
    for pairs in made:
        rows = torch.stack([torch.stack(pair) for pair in pairs])[..., 1:, :].transpose(2, 3).flatten(3)
        share = 1 / rows.square().sum(dim=(0, 1, 3)).sqrt()  # rows: [L, 2, tokens, K x D]
        total = total + torch.einsum("lpta,lptb,t->lpab", rows, rows, share) / (chunk - 1)
    torch.testing.assert_close(found, total / 2, rtol=1e-3, atol=1e-6)
    assert bool((total.diagonal(dim1=-2, dim2=-1).sum(-1) > 0).all())
    assert ModelSensitivity(decoder).sensitivity(ids[:chunk], 2) is None


def test_layer_0_is_the_models() -> None:
    decoder = tiny_decoder("llama", dtype=torch.float32)
    kv = ChunkComputer(decoder, ()).compute([(5, 9, 5)])[0]
    torch.testing.assert_close(ModelSensitivity(decoder).first_layer([5, 9, 5]), (kv.keys[0], kv.values[0]))


# Coded symbols: native kernels, whose code is another one, against the plain form

MODEL = native.random_model()
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
    return values, None if lowest else below, numbers.integers(4, 90 * ONE, axes).astype(np.int32)


@given(sizes=SIZES, data=st.data())
def test_native_kernels_give_the_same_bytes_and_symbols_and_refuse_the_same(
    library: SimpleNamespace, sizes: dict[str, Any], data: st.DataObject
) -> None:
    values, below, means = symbols(**sizes)
    contexts = rans.contexts_of(below, len(values))
    plain = partial(rans.decode_reference, contexts=contexts, means=means, model=MODEL)

    def compiled(segment: memoryview) -> Any:
        return rans.decode(library, segment, below, len(values), means, MODEL)

    wanted = rans.encode_reference(values, contexts, means, MODEL)
    assert rans.encode(library, values, contexts, means, MODEL) == wanted
    assert all(np.array_equal(decode(memoryview(wanted)), values) for decode in (plain, compiled))
    damaged = bytearray(wanted)
    if data.draw(st.booleans()):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        damaged = damaged[: data.draw(st.integers(0, len(damaged) - 1))]
    if refuses(plain, memoryview(damaged)):
        assert refuses(compiled, memoryview(damaged))
    else:
        found = plain(memoryview(damaged))
        assert np.array_equal(compiled(memoryview(damaged)), found)
        assert not np.array_equal(found, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(
    shape=st.sampled_from([(4, 4), (8, 8), (4, 16), (20, 4), (8, 64), (2, 24)]),
    tokens=st.integers(0, 40),
    axes=st.sampled_from([0, 3, 4, 28]),
    zero=st.booleans(),
)
def test_native_numbers_are_the_same_bits(
    library: SimpleNamespace, dtype: torch.dtype, shape: tuple[int, int], tokens: int, axes: int, zero: bool
) -> None:
    """Kernels take some shapes, and leave others, such as heads of 24 numbers or 3 axes, to the plain form."""
    n_heads, dim = shape
    below, given_symbols = (native.random_codes(tokens + 1, n, n)[1:] for n in (n_heads * dim, axes))
    args: Any = below, None if zero else given_symbols, native.random_map(n_heads * dim, axes), dim, dtype
    with guarded():
        found = rans.dequantize(library, *args)
    assert all(map(torch.equal, found, rans.dequantize_reference(*args)))


@pytest.mark.parametrize("name", ["encode", "decode", "dequantize"])
def test_the_self_check_refuses_what_is_one_position_off(
    library: SimpleNamespace, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.check(library)
    right = getattr(rans, name)

    def off(library: SimpleNamespace, first: Any, *rest: Any) -> Any:
        if name == "decode":
            return np.roll(right(library, first, *rest), 1, 0)
        moved = first.roll(1, 0) if isinstance(first, torch.Tensor) else np.roll(first, 1, 0)
        return right(library, moved, *rest)

    monkeypatch.setattr(rans, name, off)
    with pytest.raises(Unavailable):
        native.check(library)
