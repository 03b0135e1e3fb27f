"""Every kernel operation x backend x dtype x shape: the formula's numbers, nothing unseen, each row alone.

tests/support/kernels.py has the formulas, the shapes and the list of backends. A backend that this machine lacks is
skipped and counted; one that it has and that selfcheck.py refuses is a failure. `TRITON_INTERPRET=0 pytest -m gpu` runs
the backends that a GPU can have on one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

from blendserve.kernels import reference, sdpa, selfcheck, switches
from blendserve.kernels.cases import NAN, REAL, Args, Draw
from blendserve.kernels.cpu import bindings
from blendserve.kernels.cpu.build import Unavailable
from blendserve.kernels.cpu.library import loaded
from blendserve.kernels.cuda import flash, scattered
from blendserve.kernels.cuda.available import flash_attn
from blendserve.kernels.cuda.place import place
from blendserve.kernels.dispatch import Backend, KernelOp
from blendserve.kernels.norm import Norm
from blendserve.kernels.ops import OPERATIONS
from blendserve.kernels.rotary import HALVES, INTERLEAVED
from blendserve.kernels.selfcheck import Kind
from blendserve.kernels.types import Activation, Rope, gelu_tanh
from tests.support.kernel_switches import guarded, plain_torch, threads
from tests.support.kernels import DTYPES, TABLE, Options, Way, compare, same, ways

WAYS = list(ways())
NATIVE = [way for way in WAYS if way.is_native]
# what a GPU has backends of its own for
ON_GPU = {
    "attend",
    "attend_at",
    "attend_chunks",
    "place",
    "add_norm",
}


def word(x: Any) -> str:
    return f"{x.name}-{x.operation}" if isinstance(x, Way) else str(x).removeprefix("torch.")


def cells(found: list[Way]) -> pytest.MarkDecorator:
    on_gpu = [replace(way, device="cuda") for way in found if way.operation in ON_GPU and not way.is_native]
    marks: dict[str, Any] = {"cpu": (), "cuda": pytest.mark.gpu}
    params = [
        pytest.param(way, dtype, marks=marks[way.device], id=f"{way.device}-{word(way)}-{word(dtype)}")
        for way in (*found, *on_gpu)
        for dtype in way.dtypes
    ]
    return pytest.mark.parametrize(("way", "dtype"), params)


@pytest.fixture(autouse=True)
def ready(request: pytest.FixtureRequest) -> None:
    """Skips what this machine lacks; kernels that are there and compute something else are an error."""
    way = request.node.callspec.params.get("way") if hasattr(request.node, "callspec") else None
    if way is None:
        return
    if way.device == "cuda" and (not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
        pytest.skip("no GPU here, or Triton interprets")
    if way.device == "cuda" and way.is_flash_attn and flash_attn() is None:
        pytest.skip("flash-attn is not installed")
    if way.is_triton:
        pytest.importorskip("triton")
    if way.level is not None and not (status := selfcheck.cpu_status(way.level)).active:
        try:
            loaded(way.level)
        except Unavailable:
            pytest.skip(status.reason)
        (pytest.fail if switches.is_native_on() else pytest.skip)(status.reason)


def each_case(way: Way, check: Callable[[Options], None]) -> None:
    """Random shapes, fewer where a call takes long, and the large ones."""
    n = settings.default.max_examples if settings.default else 25
    is_compiled = way.is_triton and way.device == "cuda"  # seconds for each shape
    few = max(4, n // (6 if is_compiled else 4 if way.is_slow else 1))
    settings(max_examples=min(n, few))(given(TABLE[way.operation].shapes(way))(check))()
    for options in TABLE[way.operation].large if way.is_native and not way.is_slow else ():
        check(options)
    if (way.name, way.operation) == ("triton", "attend"):
        check({"at": [3, 9, 40, 63], "window": 7})


def test_every_operation_is_in_the_table() -> None:
    assert TABLE.keys() == OPERATIONS.keys() == REAL.keys() == {way.operation for way in WAYS}


@cells(WAYS)
def test_equals_the_formula_and_reads_nothing_unseen(way: Way, dtype: torch.dtype) -> None:
    """What may not be read is NaN, then 7: the outputs are the same to the bit."""
    is_made_for = way.device == "cuda" or not way.is_for_gpu
    row, plain = TABLE[way.operation], OPERATIONS[way.operation].backends[-1]

    def check(options: Options) -> None:
        args = way.args(dtype, options)
        with torch.inference_mode():
            assert way.backend.supports(*args) == is_made_for
        with guarded():
            got = way.run(args)
        compare(way, dtype, args, got)
        for a, b in zip(got, way.run(way.args(dtype, options, fill=7.0)), strict=True):
            hole = a.isnan()
            assert torch.equal(a[~hole], b[~hole])
            assert bool((b[hole] == 7).all())
        if row.is_exact and way.is_native:
            assert all(map(same, got, replace(way, backend=plain, level=None).run(args)))

    each_case(way, check)


def chosen_by_call(way: Way) -> KernelOp[..., Any]:
    """The operation with this backend and the plain form alone."""
    return KernelOp(
        OPERATIONS[way.operation].backends[-1].run, replace(way.backend, unavailable_reason=lambda *_: "")
    )


@cells(WAYS)
def test_real_shapes_call_after_call(way: Way, dtype: torch.dtype) -> None:
    """Each goes to the backend only if that supports it, whatever came before, and every element is written."""
    operation = chosen_by_call(way)
    for options in REAL[way.operation][:: 5 if way.is_slow else 1]:
        if options.get("outs", 0) > 2_000 and (way.is_slow or not way.is_native):
            continue
        args = way.args(dtype, options)
        chosen = replace(way, backend=Backend("by call", operation))
        with torch.inference_mode():
            assert operation.select(*args).supports(*args)
        with guarded():
            got = chosen.run(args)
        compare(replace(way, level=None), dtype, args, got)


@cells(NATIVE)
def test_a_row_is_the_same_alone_and_on_any_number_of_threads(way: Way, dtype: torch.dtype) -> None:
    alone = TABLE[way.operation].alone

    def check(options: Options) -> None:
        args = way.args(dtype, options)
        with threads(4):
            together = way.run(args)
        with threads(1):
            assert all(map(same, way.run(args), together))
            if alone:
                n = together[0].shape[1 if way.operation == "rotate" else 0]
                some, where = alone(args, Draw(dtype, "cpu", options.get("seed", 0), NAN).rows(n, 0.3))
                assert torch.equal(way.run(some)[0], together[0][where])

    each_case(way, check)


SMALL: dict[str, Options] = {
    "attend": {"at": [3, 4, 9, 20, 40]},
    "attend_with_scores": {"at": [3, 4, 9, 20, 40], "absent": 0.2},
    "attend_at": {"at": [9]},
    "attend_chunks": {"lengths": [5, 9]},
    "rotate": {"n": 9},
    "place": {"lengths": [5, 9]},
    "linear": {"rows": 3, "outs": 32, "depth": 32},
    "packed_linear": {"rows": 12, "outs": 32, "depth": 256},
    "take": {"rows": 3, "outs": 32, "depth": 256},
    "correct": {"lengths": [20, 9], "n": 9},
    "add_norm": {"rows": 3, "dim": 16},
    "gated_activation": {"rows": 3, "width": 8},
}


@pytest.mark.parametrize("operation", SMALL)
def test_the_table_sees_what_is_one_position_off(operation: str) -> None:
    """Its own check, on the plain form."""
    way = [way for way in WAYS if way.operation == operation and not way.is_native][-1]
    args = way.args(torch.float32, SMALL[operation])
    compare(way, torch.float32, args, way.run(args))
    with pytest.raises(AssertionError):
        compare(way, torch.float32, args, way.run(TABLE[operation].off(*args)))


# What a backend cannot do


def dims_apart(*at: int) -> Callable[..., Args]:
    """These arguments with their innermost dims apart in memory."""
    return lambda *args: tuple(
        x.mT.contiguous().mT if i in at and isinstance(x, Tensor) else x for i, x in enumerate(args)
    )


def formless(*args: Any) -> Args:
    """A model's module of no form that kernels know."""
    return tuple(Norm(x.own, x.weight, x.eps) if isinstance(x, Norm) else x for x in args)


def last_chunk_apart(chunks: Any, *rest: Any) -> Args:
    """The last chunk alone has its dims apart in memory."""
    at, keys, values = chunks[-1]
    return ([*chunks[:-1], (at, keys.mT.contiguous().mT, values)], *rest)


def fresh_apart(keys: Tensor, values: Tensor, fresh: Any, *rest: Any) -> Args:
    return (keys, values, type(fresh)(fresh.keys, fresh.values.mT.contiguous().mT, *fresh[2:]), *rest)


REFUSED: dict[str, list[Options | Callable[..., Args]]] = {
    "attend": [{"dim": 40}, {"dim": 320}, dims_apart(0, 1, 2), lambda q, *rest: (q.clone().requires_grad_(), *rest)],
    "attend_with_scores": [{"dim": 40}, {"dim": 320}, dims_apart(0, 1, 2)],
    "rotate": [{"width": 16}, {"dim": 288, "width": 32}, dims_apart(0), {"form": INTERLEAVED}],
    "place": [{"width": 16}, {"form": INTERLEAVED}, {"value_dim": 96}, last_chunk_apart],
    "linear": [lambda x, *rest: (x[None], *rest), dims_apart(1)],
    "packed_linear": [lambda x, *rest: (x[None], *rest), dims_apart(0)],
    "take": [lambda weight, rows: (weight, rows.int())],
    "correct": [{"dim": 48, "width": 32}, {"width": 16}, dims_apart(0, 1), {"form": INTERLEAVED}, fresh_apart],
    "add_norm": [{"dim": 7}, formless],
    "gated_activation": [dims_apart(1), lambda gate, up, _: (gate, up, partial(F.silu))],
}  # fmt: skip


@pytest.mark.parametrize("way", NATIVE, ids=word)
@torch.inference_mode()
def test_says_what_it_cannot_do(way: Way) -> None:
    """Another backend serves, and gives the formula's numbers."""
    dtype, small, operation = way.dtypes[0], SMALL.get(way.operation, {}), chosen_by_call(way)
    assert operation.select(*way.args(dtype, small)).name == way.backend.name
    for refused in REFUSED[way.operation]:
        args = way.args(dtype, {**small, **refused} if isinstance(refused, dict) else small)
        args = args if isinstance(refused, dict) else refused(*args)
        assert not way.backend.supports(*args)
        other = replace(way, level=None, backend=OPERATIONS[way.operation].select(*args))
        assert other.backend.name != way.backend.name
        assert operation.select(*args).name != way.backend.name
        if refused is not formless:
            compare(other, dtype, args, other.run(args))
    for wrong in set(DTYPES) - set(way.dtypes) if small else ():
        assert not way.backend.supports(*way.args(wrong, small))
    if way.operation == "linear" and dtype == torch.bfloat16:  # no whole words
        for odd in ("outs", "depth"):
            assert not way.backend.supports(*way.args(dtype, {**small, odd: 31}))
    with torch.inference_mode(False):
        if way.operation in {"rotate", "linear", "packed_linear", "add_norm", "gated_activation"}:
            assert not way.backend.supports(*way.args(dtype, small)), "gradients would be lost"


def test_kernels_without_sinks_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of call with sinks is another kind: what is bound for calls without does not serve it."""
    for name in ("capability", "are_supported", "flash_attn"):
        monkeypatch.setattr(flash, name, lambda *_: (9, 0))
    q, keys, values, with_sinks, plan = WAYS[0].args(torch.float32, {"at": [5, 6], "sinks": True})
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    without = replace(with_sinks, sinks=None)
    for spec, serve in ((with_sinks, False), (without, True)):
        assert sdpa.supports(q, keys, values, spec, plan) == serve
        assert flash.supports(on_gpu, keys, values, spec, plan) == serve
    with plain_torch():
        OPERATIONS["attend"](q, keys, values, without, plan)
        found = OPERATIONS["attend"](q, keys, values, with_sinks, plan)
        compare(WAYS[0], torch.float32, (q, keys, values, with_sinks, plan), [found])
    assert Kind.of(q, keys, values, with_sinks).options["sinks"]


# Activations


@pytest.mark.parametrize("activation", [F.silu, gelu_tanh])
def test_gates_have_the_bits_of_torch_for_every_number_of_bf16(activation: Activation) -> None:
    level = selfcheck.widest("silu_and_mul", torch.bfloat16)
    if level is None:
        pytest.skip("no kernels in bf16")
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)[None]
    up = torch.ones_like(gate)
    wanted = reference.gated_activation(gate, up, activation)
    found = bindings.gated_activation(level, gate.clone(), up, activation)
    for x in (wanted, found):
        x[x.abs() < selfcheck.TINY] = 0
    assert same(found, wanted)


# Triton


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 7, scattered.MOST_SPLITS])
def test_triton_splits_keys_among_programs(splits: int, sinks: bool) -> None:
    """Some get none; a wider tile goes as far; a sink counts once."""
    pytest.importorskip("triton")
    way = next(way for way in WAYS if way.name == "triton")
    options = {"at": [0, 1, 3, 25, 40, 129], "window": 30, "n_kv": 1, "group": 4, "dim": 32, "sinks": sinks}
    q, keys, values, spec, plan = args = way.args(torch.float32, options)
    for tile in (scattered.Tile(16, 16, 4, 1), scattered.Tile(32, 32, 4, 1)):
        got = scattered.run(q, keys, values, spec, plan.positions, tile, splits)
        compare(way, torch.float32, args, [got])


def test_triton_says_what_it_cannot_do() -> None:
    q, keys, values, *_ = WAYS[0].args(torch.float32, {"at": [5, 6], "dim": 16})
    assert scattered.is_made_for(q, keys, values)
    assert not scattered.is_made_for(q.half(), keys, values)
    assert not scattered.is_made_for(q, keys[..., ::2], values)
    assert not scattered.is_made_for(q.double(), keys.double(), values.double())
    assert not scattered.is_made_for(*(x.new_zeros(2, 2, 512) for x in (q, keys, values)))


def test_triton_refuses_a_chunk_that_does_not_fit_and_places_none() -> None:
    pytest.importorskip("triton")
    cache = torch.ones(2, 4, 16)
    rope = Rope(cache[0], cache[0])
    with pytest.raises(ValueError):  # noqa: PT011
        place([(1, cache, cache)], cache, cache, rope, HALVES)
    for chunks in ([], [(0, cache[:, :0], cache[:, :0])]):
        place(chunks, cache, cache, rope, HALVES)
    assert bool((cache == 1).all())


# selfcheck.py refuses what is one position off

# Compared with the layer loop by models/native.py and runner.py; the codec checks its own; tests/kernels/test_strips.py.
CHECKED_ELSEWHERE = {
    "pack",
    "packed_linear",
    "take",
    "layer_qkv",
    "layer_out",
    "decode_step",
    "rans_encode",
    "rans_decode",
    "dequantize",
}


@pytest.mark.parametrize("way", {way.name: way for way in NATIVE}.values(), ids=lambda way: way.name)
def test_the_self_check_refuses_what_is_one_position_off(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    assert way.level is not None
    selfcheck.check_level(way.level)
    for function in set(way.level.sources) - CHECKED_ELSEWHERE:
        off, right = TABLE[selfcheck.CHECKS[function].operation].off, getattr(bindings, function)
        with monkeypatch.context() as patch:
            patch.setattr(bindings, function, lambda level, *args, f=right, off=off: f(level, *off(*args)))
            with pytest.raises(Unavailable):
                selfcheck.check_level(way.level)
