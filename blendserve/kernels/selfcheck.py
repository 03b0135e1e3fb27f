"""Checks that a kernel computes its formula on this machine, before it serves.

The CPU's compiled kernels are checked once a process, all of an instruction set together. A GPU's kernels are checked
for each kind of heads before their first use; that compiles them, seconds at the first time on a machine (Triton keeps
what it compiled on disk).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blendserve.kernels import cases, reference, switches
from blendserve.kernels.activation import Activation
from blendserve.kernels.cases import Draw, rotary_of
from blendserve.kernels.cpu import bindings
from blendserve.kernels.cpu.build import Unavailable, build
from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.cpu.library import dtype_of, loaded
from blendserve.kernels.cuda import place as cuda_place
from blendserve.kernels.cuda.available import has_triton
from blendserve.kernels.norm import FORMS
from blendserve.kernels.rotary import RotaryForm
from blendserve.kernels.rows import AttentionPlan
from blendserve.kernels.types import AttentionSpec, RecomputedTokens, Rope

Attend = Callable[[Tensor, Tensor, Tensor, AttentionSpec, AttentionPlan], Tensor]


# The CPU's compiled kernels


@dataclass(frozen=True, slots=True)
class Status:
    """Whether the compiled kernels of an instruction set serve in this process, and why or why not."""

    active: bool
    reason: str


def cpu_status(level: Level) -> Status:
    """Compiles and checks the kernels at the first call. Raises nothing but ConfigError, for an unknown cap."""
    if not switches.is_native_on():
        return Status(False, f"switched off by {switches.NATIVE}=0")
    return _cpu_status(level)


def forget() -> None:
    """Build, load and check at the next call, as a new process does."""
    switches.read_again()
    _cpu_status.cache_clear()
    loaded.cache_clear()


@cache
def _cpu_status(level: Level) -> Status:
    try:
        check_level(level)
    except Unavailable as error:
        return Status(False, str(error))
    return Status(True, f"compiled kernels from {build(level)}")


POSITIONS = (0, 1, 2, 3, 17, 63, 64, 65, 255, 256, 257, 400, 401, 402, 511, 512, 600, 700, 701)
# Outputs reach 4 and 5; they and the weights are rounded.
ATTENTION_BOUND = {torch.bfloat16: 0.03, torch.float32: 2e-5}
CORRECTION_BOUND = {torch.bfloat16: 0.05, torch.float32: 1e-4}
ROUNDING = {torch.bfloat16: 2**-8, torch.float32: 2**-20}  # of a linear layer's output, relative
GATED = Activation(F.silu, True)


@torch.inference_mode()
def check_level(level: Level) -> None:
    """Raises Unavailable unless every kernel of the instruction set is right."""
    loaded(level)
    for function, check in _CHECKS.items():
        if function in level.sources:
            check(level, Draw(dtype_of(level)))


def _check_attention(level: Level, draw: Draw) -> None:
    for window, softcap in ((None, None), (70, None), (None, 2.0), (300, 2.0)):
        q, keys, values, spec, plan = cases.attention(
            draw, POSITIONS, group=3, window=window, softcap=softcap, size=2.0
        )
        got = bindings.attention(level, q, keys, values, spec, plan)
        end = plan.kv_len
        wanted = reference.formula(q, keys[:, :end], values[:, :end], plan.positions, spec)
        _require(
            _worst(got, wanted), ATTENTION_BOUND[draw.dtype], f"attention, window {window}, softcap {softcap}"
        )


def _check_linear(level: Level, draw: Draw) -> None:
    """Few rows and many, and sizes that fill no vector."""
    for rows in (1, 7, 150):
        x, weight, bias = cases.linear(draw, rows, outs=142, depth=90)
        wanted = x.double() @ weight.double().T + bias.double()
        got = bindings.linear(level, x, weight, bias)
        error = float(((got - wanted).abs() - ROUNDING[draw.dtype] * wanted.abs()).max())
        _require(error, 1e-4, f"linear, {rows} rows")


def _check_scatter(level: Level, draw: Draw) -> None:
    """To the bit, where a part of each head is rotated and where all of it is."""
    for width in (32, 96):
        chunks, keys, values, rope, rotary = cases.placement(draw, (31, 50), dim=96, width=width)
        got, wanted = [(keys.clone(), values.clone()) for _ in "ab"]
        bindings.scatter_kv(level, chunks, *got, rope, rotary)
        reference.place_reference(chunks, *wanted, rope, rotary)
        _require(max(map(_worst, got, wanted)), 0.0, f"KV placement, {width} of 96 dimensions rotated")


def _check_correction(level: Level, draw: Draw) -> None:
    """Fewer recomputed tokens than features."""
    ridge = cases.RIDGE._replace(penalty=5.0)
    for params, has_prior in ((cases.SHIFT, False), (ridge, False), (ridge, True)):
        keys, values, fresh, rope, rotary, *how = cases.correction(
            draw, (31, 50), n=27, dim=32, width=32, params=params, has_prior=has_prior
        )
        got, wanted = (keys.clone(), values.clone()), (keys.double(), values.double())
        bindings.correct_kv(level, *got, fresh, rope, rotary, *how)
        exact = RecomputedTokens(fresh.keys.double(), fresh.values.double(), *fresh[2:])
        reference.correct_reference(*wanted, exact, Rope(rope.cos.double(), rope.sin.double()), rotary, *how)
        error = max(map(_worst, got, wanted))
        _require(error, CORRECTION_BOUND[draw.dtype], f"correction, {params}, prior: {has_prior}")


def _check_norm(level: Level, draw: Draw) -> None:
    """To the bit in every form, with sizes that fill no vector, and that torch sums in cascades."""
    for dim in (90, 2080):
        for form in range(len(FORMS)):
            args = cases.norm(draw, 16, dim, form)
            pairs = bindings.add_rms_norm(level, *args), reference.add_norm_reference(*args)
            _require(max(map(_worst, *pairs)), 0.0, f"norm of {dim} numbers")


def _check_silu(level: Level, draw: Draw) -> None:
    """To the bit, for all gates whose result is not too small for the dtype."""
    gate = torch.linspace(-80.0, 80.0, 4000).view(40, 100).to(draw.dtype)
    up = draw(40, 100)
    got = bindings.silu_and_mul(level, gate.clone(), up, GATED)
    _require(_worst(got, F.silu(gate) * up), 0.0, "gated activation")


_CHECKS: dict[str, Callable[[Level, Draw], None]] = {  # by function of kernels.h
    "attention": _check_attention,
    "linear": _check_linear,
    "scatter_kv": _check_scatter,
    "correct_kv": _check_correction,
    "add_rms_norm": _check_norm,
    "silu_and_mul": _check_silu,
}


def _worst(got: Tensor, wanted: Tensor) -> float:
    """The largest difference; infinite where one of both is NaN."""
    if not torch.equal(got.isnan(), wanted.isnan()):
        return float("inf")
    return float((got.double() - wanted.double()).abs().nan_to_num(0.0).max())


def _require(error: float, bound: float, what: str) -> None:
    if not error <= bound:
        raise Unavailable(f"wrong on this machine: {what} is off by {error:.3g}")


# A GPU's kernels

# Rounding of values that reach 4, of the weights and of the output; sums are kept in fp32. tf32 would fail the last one.
BOUNDS = {torch.bfloat16: 0.03, torch.float16: 0.005, torch.float32: 2e-5}
KEYS = 700
ONE_ROW, SCATTERED = ((0,), (KEYS - 1,)), (tuple(range(1, KEYS - 2, 3)),)
DENSE = (tuple(range(130)), tuple(range(KEYS - 200, KEYS)))


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kernel is compiled for."""

    device: torch.device
    dtype: torch.dtype
    group: int
    dim: int
    windowed: bool
    softcapped: bool

    @classmethod
    def of(cls, q: Tensor, keys: Tensor, spec: AttentionSpec) -> Kind:
        group = q.shape[0] // keys.shape[0]
        return cls(q.device, q.dtype, group, q.shape[2], spec.window is not None, spec.softcap is not None)


@cache
def attention_trouble(forms: tuple[Attend, ...], kind: Kind, rows: tuple[tuple[int, ...], ...]) -> str:
    """Why an attention kernel may not serve, "" if it may. forms: all that is compiled; rows: positions below KEYS."""

    def largest() -> float:
        return max(_attention_error(form, kind, positions) for form in forms for positions in rows)

    return _trouble(largest, BOUNDS[kind.dtype])


@torch.inference_mode()
def _attention_error(form: Attend, kind: Kind, positions: Sequence[int]) -> float:
    """The largest difference to the formula."""
    window, softcap = 70 if kind.windowed else None, 2.0 if kind.softcapped else None
    shape: dict[str, Any] = {
        "group": kind.group,
        "dim": kind.dim,
        "window": window,
        "softcap": softcap,
        "size": 2.0,
    }
    q, keys, values, spec, plan = cases.attention(Draw(kind.dtype), positions, **shape)
    end = plan.kv_len
    wanted = reference.formula(q, keys[:, :end], values[:, :end], plan.positions, spec)
    there = cases.attention(Draw(kind.dtype, kind.device), positions, **shape)
    return _worst(form(*there).cpu(), wanted)


@cache
@torch.inference_mode()
def placing_trouble(form: RotaryForm, device: torch.device, dtype: torch.dtype, dim: int) -> str:
    """Why a GPU's placement of such heads may not serve, "" if it may. Compiles it."""

    def largest() -> float:
        error = 0.0
        for width in {dim, dim // 4 * 2}:  # all of a head, or a part
            draw = Draw(dtype, device)
            chunks, keys, values, rope, _ = cases.placement(draw, (40, 33), dim=dim, width=width, form=form)
            got, wanted = [(keys.clone(), values.clone()) for _ in "ab"]
            cuda_place.run(chunks, *got, rope, form)
            reference.place_reference(chunks, *wanted, rope, rotary_of(form))
            error = max(error, *map(_worst, got, wanted))
        return error

    return _trouble(largest, 2 * torch.finfo(dtype).eps)


def _trouble(largest: Callable[[], float], bound: float) -> str:
    try:
        error = largest()
    except Exception as failure:  # of a compiler, a driver or a GPU without room for the tile
        return f"{type(failure).__name__}: {str(failure).strip() or 'no reason given'}".splitlines()[0]
    return "" if error <= bound else f"off by {error:.3g}"


def triton_trouble(forms: tuple[Attend, ...], kind: Kind, rows: tuple[tuple[int, ...], ...]) -> str:
    """`attention_trouble` of a kernel that needs Triton."""
    return (
        attention_trouble(forms, kind, rows)
        if has_triton()
        else "triton is not installed: pip install triton"
    )
