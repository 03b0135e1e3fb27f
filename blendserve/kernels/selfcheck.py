"""Checks that a kernel computes its formula on this machine before it serves: against reference.py, on cases of cases.py.

The CPU's compiled kernels are checked once a process, all of an instruction set together. A GPU's kernels are checked
for each kind of heads before their first use; that compiles them, seconds at the first time on a machine (Triton keeps
what it compiled on disk).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from blendserve.kernels import reference, switches
from blendserve.kernels.cases import CASES, RIDGE, SHIFT, Draw
from blendserve.kernels.cpu import bindings
from blendserve.kernels.cpu.build import Unavailable, build
from blendserve.kernels.cpu.isa import LEVELS, Level
from blendserve.kernels.cpu.library import dtype_of, loaded
from blendserve.kernels.cuda import flash
from blendserve.kernels.cuda import place as cuda_place
from blendserve.kernels.rotary import Rotary
from blendserve.kernels.types import AttentionSpec, Rope, gelu_tanh

P = ParamSpec("P")
R = TypeVar("R")
Attend = Callable[..., Any]
Options = dict[str, Any]  # of a call of cases.py


class Once(Generic[P, R]):
    """A function that is called once for the same arguments in a process; other threads wait for that call."""

    def __init__(self, function: Callable[P, R]) -> None:
        self.__wrapped__ = function
        self._found: dict[Any, R] = {}
        self._lock = Lock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if args not in self._found:
            with self._lock:
                if args not in self._found:
                    self._found[args] = self.__wrapped__(*args, **kwargs)
        return self._found[args]

    def cache_clear(self) -> None:
        self._found.clear()


WRITES = {"place": (1, 2), "correct": (0, 1)}  # operations that write to arguments
TINY = 1e-37  # smaller results may be 0


@torch.inference_mode()
def largest_error(
    run: Callable[..., Any], operation: str, options: Options, dtype: torch.dtype,
    device: torch.device | str = "cpu", is_exact: bool = False, relative: float = 0.0,
) -> float:  # fmt: skip
    """The largest difference of `run` to the plain form; infinite where one of both is NaN.

    The plain form computes in float64 on the CPU; is_exact: in the same dtype on the same device. relative: of the
    result, that is no error.
    """
    make = CASES[operation]
    plain = getattr(reference, operation)
    wanted_args = make(Draw(dtype, device if is_exact else "cpu"), **options)
    got = outputs(operation, run, make(Draw(dtype, device), **options))
    wanted = outputs(operation, plain, wanted_args if is_exact else in_fp64(wanted_args))
    return max(_difference(a.cpu(), b.cpu(), relative) for a, b in zip(got, wanted, strict=True))


def outputs(operation: str, run: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor]:
    """What a call returns, or the arguments that it writes to."""
    out = run(*args)
    if operation in WRITES:
        return [args[i] for i in WRITES[operation]]
    return list(out) if isinstance(out, tuple) else [out]


def in_fp64(x: Any) -> Any:
    """Arguments with all of their numbers in float64."""
    if isinstance(x, Tensor):
        return x.double() if x.is_floating_point() else x
    if isinstance(x, Rope):
        return Rope(x.cos.double(), x.sin.double())
    if isinstance(x, (list, tuple)):
        parts = map(in_fp64, x)
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)  # NamedTuples take fields
    return x


def _difference(got: Tensor, wanted: Tensor, relative: float) -> float:
    if not torch.equal(got.isnan(), wanted.isnan()):
        return float("inf")
    off = (got.double() - wanted.double()).abs() - relative * wanted.double().abs()
    return float(off.nan_to_num(0.0).max())


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
    return checked(level)


def widest(function: str, dtype: torch.dtype) -> Level | None:
    """The widest instruction set whose kernels have the function for this dtype, and serve."""
    levels = [x for x in LEVELS.values() if dtype_of(x) == dtype and function in x.sources]
    return next((x for x in reversed(levels) if cpu_status(x).active), None)


@Once
def checked(level: Level) -> Status:
    """The same, whatever the switch says."""
    try:
        check_level(level)
    except Unavailable as error:
        return Status(False, str(error))
    return Status(True, f"compiled kernels from {build(level)}")


@dataclass(frozen=True, slots=True)
class Check:
    """How a kernel is checked: by calls of an operation."""

    operation: str
    calls: Sequence[Options]
    bounds: Mapping[torch.dtype, float]  # of the largest error
    relative: Mapping[torch.dtype, float] = field(default_factory=dict)  # of the result, that is no error
    is_exact: bool = False  # against the plain form in the same dtype

    def trouble(self, run: Callable[..., Any], dtype: torch.dtype, device: torch.device | str = "cpu") -> str:
        """Why the kernel is wrong, "" if it is right."""
        relative = self.relative.get(dtype, 0.0)
        for call in self.calls:
            error = largest_error(run, self.operation, call, dtype, device, self.is_exact, relative)
            if not error <= self.bounds[dtype]:
                return f"off by {error:.3g} with {call}"
        return ""


POSITIONS = (0, 1, 2, 3, 17, 63, 64, 65, 255, 256, 257, 400, 401, 402, 511, 512, 600, 700, 701)
# Rounding of values that reach 4, of the weights and of the output; sums are kept in fp32. tf32 would fail the last one.
ATTENTION_BOUNDS = {torch.bfloat16: 0.03, torch.float16: 0.005, torch.float32: 2e-5}
EXACT = {torch.bfloat16: 0.0, torch.float32: 0.0}
_FEATURES = {"lengths": (31, 50), "n": 27, "dim": 32, "width": 32}  # fewer recomputed tokens than features
_RIDGE = RIDGE._replace(penalty=5.0)
CHECKS = {  # by function of kernels.h
    "attention": Check(  # outputs reach 4 and 5; they and the weights are rounded
        "attend",
        [
            {"at": POSITIONS, "group": 3, "window": window, "softcap": softcap, "size": 2.0, "sinks": sinks}
            for window, softcap, sinks in (
                *((None, None, False), (70, None, False), (None, 2.0, False), (300, 2.0, False)),
                (70, None, True),
            )
        ],
        ATTENTION_BOUNDS,
    ),
    "linear": Check(  # few rows and many, and sizes that fill no vector
        "linear",
        [{"rows": rows, "outs": 142, "depth": 90} for rows in (1, 7, 150)],
        {torch.bfloat16: 1e-4, torch.float32: 1e-4},
        {torch.bfloat16: 2**-8, torch.float32: 2**-20},
    ),
    "scatter_kv": Check(  # a part of each head is rotated, or all of it
        "place",
        [{"lengths": (31, 50), "dim": 96, "width": width} for width in (32, 96)],
        EXACT,
        is_exact=True,
    ),
    "correct_kv": Check(
        "correct",
        [
            {**_FEATURES, "params": params, "has_prior": has_prior}
            for params, has_prior in ((SHIFT, False), (_RIDGE, False), (_RIDGE, True))
        ],
        {torch.bfloat16: 0.05, torch.float32: 1e-4},
    ),
    "add_rms_norm": Check(  # sizes that fill no vector, and that torch sums in cascades
        "add_norm",
        [{"rows": 16, "dim": dim, "form": form} for dim in (90, 2080) for form in range(3)],
        EXACT,
        is_exact=True,
    ),
    "silu_and_mul": Check(
        "gated_activation", [{"rows": 40, "width": 100}], dict.fromkeys(EXACT, TINY), is_exact=True
    ),
    "gelu_and_mul": Check(  # 1 + tanh is rounded to 2^-24, and multiplied by x up to 9 and by `up`
        "gated_activation",
        [{"rows": 40, "width": 100, "activation": gelu_tanh}],
        dict.fromkeys(EXACT, 2e-6),
        {torch.bfloat16: 2**-7, torch.float32: 2**-20},
    ),
}


def check_level(level: Level) -> None:
    """Raises Unavailable unless every kernel of the instruction set is right."""
    loaded(level)
    for function, check in CHECKS.items():
        run = partial(getattr(bindings, function), level)
        if function in level.sources and (reason := check.trouble(run, dtype_of(level))):
            raise Unavailable(f"wrong on this machine: {function} is {reason}")


@Once
def packed_trouble(level: Level, kind: str) -> str:
    """Why these kernels may not read quantised weights of a kind, "" if they may."""
    sizes = {"outs": 34, "depth": 256, "kind": kind}
    linear = CHECKS["linear"]
    calls = [{**sizes, "rows": n} for n in (7, 20)]
    checks = (
        (bindings.packed_linear, Check("packed_linear", calls, linear.bounds, linear.relative)),
        (bindings.take, Check("take", calls, EXACT, is_exact=True)),
    )
    dtype = dtype_of(level)
    return next(filter(None, (check.trouble(partial(run, level), dtype) for run, check in checks)), "")


# A GPU's kernels

KEYS = 700
ONE_ROW, SCATTERED = ((0,), (KEYS - 1,)), (tuple(range(1, KEYS - 2, 3)),)
DENSE = (tuple(range(130)), tuple(range(KEYS - 200, KEYS)))


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kernel is compiled for."""

    device: torch.device
    dtype: torch.dtype
    group: int
    dim: int  # of queries and keys
    value_dim: int
    windowed: bool
    softcapped: bool
    has_sinks: bool = False

    @classmethod
    def of(cls, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Kind:
        group = q.shape[0] // keys.shape[0]
        has = (spec.window, spec.softcap, spec.sinks)
        return cls(q.device, q.dtype, group, q.shape[2], values.shape[2], *(x is not None for x in has))

    @property
    def options(self) -> Options:
        """The options of a call with such heads."""
        window = 70 if self.windowed else None
        softcap = 2.0 if self.softcapped else None
        heads = {"group": self.group, "dim": self.dim, "value_dim": self.value_dim, "sinks": self.has_sinks}
        return {**heads, "window": window, "softcap": softcap}


@Once
def attention_trouble(forms: tuple[Attend, ...], kind: Kind, rows: tuple[tuple[int, ...], ...]) -> str:
    """Why an attention kernel may not serve, "" if it may. forms: all that is compiled; rows: positions below KEYS."""
    calls = [{**kind.options, "size": 2.0, "at": positions} for positions in rows]
    return _trouble(forms, Check("attend", calls, ATTENTION_BOUNDS), kind.dtype, kind.device)


@Once
def packed_chunks_trouble(kind: Kind) -> str:
    """Why flash-attn's packed chunks may not serve, "" if they may."""
    calls = [{**kind.options, "lengths": (130, 9, 80), "prefix": n} for n in (0, 100)]
    check = Check("attend_chunks", calls, ATTENTION_BOUNDS)
    return _trouble((flash.attend_chunks,), check, kind.dtype, kind.device)


@Once
def placing_trouble(form: Rotary, device: torch.device, dtype: torch.dtype, dim: int, width: int) -> str:
    """Why a GPU's placement of such heads may not serve, "" if it may. Compiles it. width: rotated dims of a head."""
    heads = {"lengths": (40, 33), "dim": dim, "width": width, "form": form}
    calls = [{**heads, "apart": apart} for apart in (0, 6)]  # addresses that are multiples of 16, and others
    check = Check("place", calls, {dtype: 2 * torch.finfo(dtype).eps}, is_exact=True)
    return _trouble((cuda_place.place,), check, dtype, device)


def _trouble(forms: Sequence[Attend], check: Check, dtype: torch.dtype, device: torch.device) -> str:
    try:
        return next(filter(None, (check.trouble(form, dtype, device) for form in forms)), "")
    except Exception as failure:  # of a compiler, a driver or a GPU without room for the tile
        return f"{type(failure).__name__}: {str(failure).strip() or 'no reason given'}".splitlines()[0]
