"""Random calls of every kernel operation, what its backends must give, and the backends that can run on this machine."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from blendserve.kernels import ops, reference, selfcheck
from blendserve.kernels.cases import CASES, NAN, RIDGE, SHIFT, Args, Draw
from blendserve.kernels.cpu import bindings
from blendserve.kernels.cpu.bindings import FEW
from blendserve.kernels.cpu.isa import LEVELS, Level
from blendserve.kernels.cpu.library import dtype_of
from blendserve.kernels.cuda import flash, scattered
from blendserve.kernels.dispatch import Backend
from blendserve.kernels.packed import KINDS
from blendserve.kernels.rotary import FORMS, HALVES
from blendserve.kernels.rows import AttentionPlan, plan_rows
from blendserve.kernels.types import AttentionSpec, CorrectionParams, Rope, gelu_tanh
from tests.support import kernel_formulas as formulas

Options = dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """How an operation is called with random arguments, and what its backends must give.

    alone: arguments and some rows -> the arguments of these rows alone, and their places in the output.
    """

    formula: Callable[..., list[Tensor]]
    shapes: Callable[[Way], st.SearchStrategy[Options]]
    bounds: Callable[[float], tuple[float, float]]  # a dtype's eps -> relative, absolute
    off: Callable[..., Args]  # a call that is one position off
    large: Sequence[Options] = ()
    alone: Callable[..., tuple[Args, Any]] | None = None
    changes: Sequence[int] = ()  # arguments that are written to, and are the result unless there is one
    is_exact: bool = False  # native backends give the plain form's bits


@dataclass(frozen=True)
class Way:
    """A backend of an operation on a device."""

    operation: str
    backend: Backend
    name: str  # the first word of a test's id
    level: Level | None = None
    device: str = "cpu"

    @property
    def is_native(self) -> bool:
        return self.level is not None

    @property
    def is_flash_attn(self) -> bool:
        return self.name.startswith("flash_attn")

    @property
    def is_triton(self) -> bool:
        return self.name.startswith("triton")

    @property
    def is_for_gpu(self) -> bool:
        """Whether it refuses tensors on a CPU."""
        return self.is_triton or self.is_flash_attn or self.name == "torch_s_fused_norm"

    @property
    def is_contiguous(self) -> bool:
        """Whether it serves contiguous rows alone."""
        return self.is_flash_attn or (self.device == "cuda" and self.name == "torch_s_sdpa")

    @property
    def has_sinks(self) -> bool:
        return not (self.is_flash_attn or self.name == "torch_s_sdpa")

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        if self.level is not None:
            return (dtype_of(self.level),)
        if self.is_triton and self.device == "cpu":  # Triton's interpreter multiplies the bits of bf16
            return (torch.float32,) if self.name != "triton" else (torch.float32, torch.float16)
        return (torch.bfloat16, torch.float16) if self.is_contiguous else DTYPES

    @property
    def is_slow(self) -> bool:
        """Interpreted or emulated."""
        return self.device == "cpu" and (self.is_triton or self.name == "amx_emulated")

    def args(self, dtype: torch.dtype, options: Options, fill: float = NAN) -> Args:
        options = {**options}
        return CASES[self.operation](Draw(dtype, self.device, options.pop("seed", 0), fill), **options)

    def run(self, args: Args) -> list[Tensor]:
        """Its outputs, on the CPU; what an operation writes to is copied before."""
        changes = TABLE[self.operation].changes
        args = tuple(deepcopy(x) if i in changes else x for i, x in enumerate(args))
        with torch.inference_mode(), off_gpu(self):
            out = self.backend.run(*args)
        if out is None:
            out = tuple(args[i] for i in changes)
        return [x.cpu() for x in (out if isinstance(out, tuple) else (out,))]


def compare(way: Way, dtype: torch.dtype, args: Args, got: Sequence[Tensor]) -> None:
    """Raises AssertionError where an output is further from the formula than rounding explains."""
    wanted = TABLE[way.operation].formula(*args)
    assert len(got) == len(wanted)
    relative, absolute = TABLE[way.operation].bounds(torch.finfo(dtype).eps)
    wider = 1.0 if way.is_native else 2.5
    for found, right in zip(got, wanted, strict=True):
        assert found.shape == right.shape
        off, hole = (found.double() - right.double()).abs(), right.isnan()  # memory that must stay as it is
        assert torch.equal(found.isnan(), hole)
        beyond = (off - wider * (relative * right.double().abs() + absolute))[~hole]
        assert bool((beyond <= 0).all()), f"off by {float(beyond.max()):.3g} beyond rounding"


def same(a: Tensor, b: Tensor) -> bool:
    """The same bits; memory that must stay as it is may be NaN in both."""
    return np.array_equal(a.double(), b.double(), equal_nan=True)


@contextmanager
def off_gpu(way: Way) -> Iterator[None]:
    """What a backend for a GPU asks of one is said by a double; nothing changes where there is one."""
    if way.device == "cuda" or not (way.is_triton or way.is_flash_attn):
        yield
        return
    with (
        patch.object(flash, "flash_attn", lambda: formulas.FlashAttn),
        patch.object(scattered, "capability", lambda _: (9, 0)),
        patch.object(scattered, "processors", lambda _: 6),
    ):
        yield


# Shapes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORM = st.sampled_from(FORMS)


def options(**parts: Any) -> st.SearchStrategy[Options]:
    fixed = {k: v if isinstance(v, st.SearchStrategy) else st.just(v) for k, v in parts.items()}
    return st.fixed_dictionaries({**fixed, "seed": st.integers(0, 999)})


def attention_shapes(way: Way, **more: Any) -> st.SearchStrategy[Options]:
    """Vectors, strips and blocks end at these totals; a window of 1 or of all keys hides most or nothing."""
    totals = [1, 2, 15, 16, 17, 63, 64, 65, 130, *(() if way.is_slow else (128, 129, 256, 257, 300, 600))]
    dims = [16, 32, 48, 64, 80, 96, 112, 128] if way.is_native else [2, 16, 24, 64, 80, 128]
    most_kv = 2 if way.is_slow else 3

    def of(total: int) -> st.SearchStrategy[Options]:
        windows = st.none() | st.sampled_from([1, 2, total, total + 5]) | st.integers(1, total)
        if way.is_contiguous and way.name == "torch_s_sdpa":
            windows = st.sampled_from([None, total, total + 5])
        shares = [0.02, 0.3] if way.is_slow and total > 17 else [0.02, 0.3, 1.0]
        return options(
            total=total, share=st.sampled_from(shares), n_kv=st.integers(1, most_kv), window=windows,
            group=st.sampled_from([1, 2, 3, 4, 7, 8]), dim=st.sampled_from(dims),
            softcap=st.none() if way.name == "torch_s_sdpa" else st.sampled_from([None, 0.7, 20.0]),
            dense=way.is_contiguous or st.booleans(), sinks=way.has_sinks and st.booleans(), **more,
        )  # fmt: skip

    return st.sampled_from(totals).flatmap(of)


def rope_shapes(way: Way, **more: Any) -> st.SearchStrategy[Options]:
    """Native kernels rotate halves, in steps of 32 dims."""
    pairs = [(32, 32), (64, 64), (80, 32), (100, 64), (128, 128), (256, 224)]
    if not way.is_native:
        pairs += [(16, 16), (64, 16), (80, 80)]
    form = HALVES if way.is_native else FORM
    return st.sampled_from(pairs).flatmap(lambda p: options(dim=p[0], width=p[1], form=form, **more))


def correction_shapes(way: Way) -> st.SearchStrategy[Options]:
    """A prior is for the ridge alone."""

    def of(pair: tuple[int, int], params: CorrectionParams) -> st.SearchStrategy[Options]:
        return options(
            dim=pair[0], width=pair[1], form=HALVES if way.is_native else FORM, heads=st.integers(1, 3),
            lengths=st.lists(st.sampled_from([1, 5, 6, 7, 16, 17, 96, 130]), min_size=1, max_size=3),
            n=st.sampled_from([1, 2, 3, 31, 40, 150] + [0] * (params is RIDGE)), params=params,
            has_prior=params is RIDGE and st.booleans(),
        )  # fmt: skip

    pairs = st.sampled_from([(32, 32), (64, 64), (96, 32), (128, 128), (160, 96)])
    return st.tuples(pairs, st.sampled_from([SHIFT, RIDGE])).flatmap(lambda x: of(*x))


def linear_shapes(way: Way) -> st.SearchStrategy[Options]:
    whole = 4 // way.dtypes[0].itemsize if way.is_native else 1  # words of 4 bytes
    rows = st.integers(1, bindings.FEW + 4) | st.sampled_from([16, 17, 40, 63, 64, 65, 130])
    sizes = st.integers(1, 70).map(lambda n: n * whole)
    return options(rows=rows, outs=sizes, depth=sizes, bias=st.booleans(), apart=st.sampled_from([0, 2, 6]))


def packed_shapes(way: Way) -> st.SearchStrategy[Options]:
    rows = st.integers(1, bindings.FEW + 4) | st.sampled_from([16, 17, 40, 63, 64, 65, 130])
    if way.name.startswith("amx"):
        rows = st.sampled_from([9, 16, 17, 40, 63, 65, 130])
    outs = st.integers(1, 35).map(lambda n: 2 * n)
    kinds = st.sampled_from([*KINDS])
    return options(
        rows=rows, outs=outs, depth=st.sampled_from([256, 512]), kind=kinds, bias=st.booleans(),
        apart=st.sampled_from([0, 2, 6]),
    )  # fmt: skip


# Some rows of a call, and calls that are one position off


def at_rows(plan: AttentionPlan, at: Tensor) -> AttentionPlan:
    return plan_rows(at, plan.group, plan.window, masked_keys=plan.masked_keys)


def some_rows(args: Args, rows: list[int]) -> tuple[Args, Any]:
    q, keys, values, spec, plan = args
    return (q[:, rows], keys, values, spec, at_rows(plan, plan.positions[rows])), rows


def moved_rows(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Args:
    return q, keys, values, spec, at_rows(plan, (plan.positions - 1).clamp(min=0))


def some_of(index: int) -> Callable[[Args, list[int]], tuple[Args, Any]]:
    """Rows of the first arguments, which are those of the output."""
    return lambda args, rows: ((*(x if x is None else x[rows] for x in args[:index]), *args[index:]), rows)


def some_packed(args: Args, rows: list[int]) -> tuple[Args, Any]:
    """Some rows of quantised weights' product: as many as are multiplied the same way, by numbers rounded or not."""
    if rows and len(args[0]) > FEW:
        rows = [rows[i % len(rows)] for i in range(max(len(rows), FEW + 1))]
    return some_of(1)(args, rows)


def rolled(index: int) -> Callable[..., Args]:
    """The argument at `index` moved by one along its rows."""

    def off(*args: Any) -> Args:
        x = args[index]
        moved = Rope(x.cos.roll(1, 0), x.sin.roll(1, 0)) if isinstance(x, Rope) else x.roll(1, 0)
        return (*args[:index], moved, *args[index + 1 :])

    return off


# The table


def plain(operation: str) -> Callable[..., list[Tensor]]:
    """The plain form in float64, where it is torch's own or other tests compare it: with models, or with loops."""
    run = getattr(reference, operation)
    return lambda *args: [x.cpu() for x in selfcheck.outputs(operation, run, selfcheck.in_fp64(args))]


attention_bounds = lambda eps: (0.0, 5 * eps + 1e-5)  # noqa: E731  values reach about 4; weights are rounded, too
LARGE: Sequence[Options] = (
    {"at": [2999]},
    {"at": list(range(1300)), "n_kv": 1, "group": 1},
    {"at": list(range(0, 1300, 3)), "group": 3},
    {"at": [0, 5, 300, 599], "size": 300.0},
    {"at": [0, 5, 300, 599], "size": 300.0, "softcap": 5.0},
    {"at": list(range(0, 1300, 3)), "group": 3, "window": 200, "sinks": True},
)
TABLE: dict[str, Operation] = {
    "attend": Operation(
        formulas.attend, attention_shapes, attention_bounds, moved_rows, LARGE, some_rows
    ),
    "attend_with_scores": Operation(
        formulas.attend, partial(attention_shapes, absent=st.sampled_from([0.0, 0.3])),
        lambda eps: (1.3 * eps + 1e-5, 5 * eps + 1e-5), moved_rows,
        [{"at": list(range(900, 1031)), "absent": 0.4}],  # more rows than are watched at once
        some_rows,
    ),
    "attend_at": Operation(
        formulas.attend_at, attention_shapes, attention_bounds, lambda *args: (*args[:4], args[4] - 1)
    ),
    "attend_chunks": Operation(
        plain("attend_chunks"),
        lambda way: options(
            lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5), prefix=st.sampled_from([0, 1, 9]),
            window=st.none() | st.integers(1, 12), softcap=st.sampled_from([None, 0.7]), group=st.integers(1, 3),
            sinks=way.has_sinks and st.booleans(),
        ),
        attention_bounds, lambda q, k, v, prefix, *rest: (q, k, v, (prefix[0].roll(1, 1), prefix[1]), *rest),
    ),
    "rotate": Operation(
        lambda x, rope, form: [formulas.turned(x, rope, form)],
        partial(rope_shapes, n=st.sampled_from([1, 5, 130]), heads=st.sampled_from([1, 3])),
        lambda eps: (0.0, 8 * eps), rolled(1),
        alone=lambda args, rows: ((args[0][:, rows], args[1].at(torch.tensor(rows)), args[2]), (slice(None), rows)),
        is_exact=True,
    ),
    "place": Operation(
        formulas.place,
        partial(rope_shapes, lengths=st.lists(st.sampled_from([1, 5, 40, 130]), max_size=3), heads=st.integers(1, 3)),
        lambda eps: (0.0, 8 * eps), rolled(3), changes=(1, 2), is_exact=True,
    ),
    "linear": Operation(
        plain("linear"), linear_shapes, lambda eps: (eps / 2 + 1e-6, 5e-4), rolled(1),
        [{"rows": n, "outs": o, "depth": d} for n in (1, 40, 100) for o, d in ((576, 576), (112, 1536))],
        some_of(1),
    ),
    "packed_linear": Operation(
        plain("packed_linear"), packed_shapes, lambda eps: (eps / 2 + 1e-6, 5e-4), rolled(0),
        [{"rows": n, "outs": 576, "depth": 1536, "kind": kind} for n in (40, 100) for kind in ("Q8_0", "Q6_K")],
        some_packed,
    ),
    "take": Operation(
        plain("take"),
        lambda way: options(
            rows=st.sampled_from([1, 3, 40]), outs=st.integers(1, 70), depth=st.sampled_from([256, 512]),
            kind=st.sampled_from([*KINDS]),
        ),
        lambda eps: (0.0, 0.0), rolled(1), is_exact=True,
    ),
    "correct": Operation(
        formulas.correct, correction_shapes, lambda eps: (0.0, 5 * eps + 2e-4),
        lambda k, v, new, *rest: (k, v, type(new)(*new[:2], new.row_index.roll(1, 0), *new[3:]), *rest),
        [{"lengths": [300, 200], "n": 100, "heads": 3, "params": RIDGE}], changes=(0, 1),
    ),
    "add_norm": Operation(
        plain("add_norm"),
        lambda way: options(
            rows=st.sampled_from([1, 3, 40]), dim=st.sampled_from([8, 16, 31, 90, 576, 1000, 2080, 8192]),
            form=st.just(0) if way.is_for_gpu else st.integers(0, 2), adds=st.booleans(), apart=st.sampled_from([0, 6]),
        ),
        lambda eps: (2 * eps + 2e-6, 1e-6), rolled(1), [{"rows": 3000, "dim": 576}], some_of(2), is_exact=True,
    ),
    "gated_activation": Operation(
        plain("gated_activation"),
        lambda way: options(
            rows=st.sampled_from([1, 3, 40]), width=st.sampled_from([1, 53, 60, 128]), apart=st.sampled_from([0, 7]),
            activation=st.sampled_from([F.silu, gelu_tanh]),
        ),
        lambda eps: (2 * eps + 2e-6, 1e-6), rolled(1), alone=some_of(2), changes=(0,),
    ),
}  # fmt: skip


# The backends

BF16 = LEVELS["avx512_bf16"]
EMULATION = Path(__file__).parents[1] / "kernels" / "cpu" / "emulated_amx.h"
HEADER = zlib.crc32(EMULATION.read_bytes())
TILES = (*BF16.compile, "-O1", "-include", str(EMULATION), f"-DEMULATION={HEADER}")  # -O3 takes long
EMULATED = replace(BF16, title="AMX, emulated", compile=TILES, sources=LEVELS["amx"].sources)


def ways() -> Iterator[Way]:
    """Every backend of every operation, and native kernels that no operation has: emulated, or of another dtype."""
    levels = {f"{level.title} kernel": level for level in LEVELS.values()}
    for name, operation in ops.OPERATIONS.items():
        for backend in operation.backends:
            level = levels.get(backend.name)
            word = re.sub(r"\W+", "_", backend.name.removesuffix(" kernel").lower())
            yield Way(name, backend, level.name if level else word, level)
    for i, form in enumerate(scattered.FORMS[1:], 1):  # each is compiled alone on a GPU
        yield Way("attend", Backend(f"Triton kernel, form {i}", form, scattered.supports), f"triton_{i}")
    emulated: dict[str, tuple[Any, Any]] = {
        "attend": (bindings.attention, bindings.supports_attention),
        "attend_with_scores": (bindings.attention_with_key_scores, bindings.supports_attention),
        "linear": (bindings.linear, bindings.supports_linear),
    }
    for level in (EMULATED, LEVELS["avx2"], LEVELS["avx512"]):
        word = "amx_emulated" if level is EMULATED else level.name
        for name in emulated if level is EMULATED else ["linear"]:
            run, supports = (partial(function, level) for function in emulated[name])
            yield Way(name, Backend(f"{level.title} kernel", run, supports), word, level)
