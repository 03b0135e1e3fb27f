"""Is a kernel right on this very machine? It serves only after it gave the formula's numbers here.

The compiled kernels of the CPU are checked an instruction set at a time, once a process. A GPU's are checked for each
kind of heads, before the first real rows: what would be compiled in the middle of a request is compiled here (seconds at
the first time on a machine; triton and inductor keep what they compiled on disk).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blendserve.kernels import coding
from blendserve.kernels.cpu import attend as cpu_attend
from blendserve.kernels.cpu import coding as cpu_coding
from blendserve.kernels.cpu import correct as cpu_correct
from blendserve.kernels.cpu import gate as cpu_gate
from blendserve.kernels.cpu import linear as cpu_linear
from blendserve.kernels.cpu import norm as cpu_norm
from blendserve.kernels.cpu import place as cpu_place
from blendserve.kernels.cpu.build import Unavailable, build
from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.cpu.library import dtype_of, loaded
from blendserve.kernels.cuda import place as cuda_place
from blendserve.kernels.cuda.available import has_triton
from blendserve.kernels.norm import FORMS
from blendserve.kernels.reference import correct_reference, formula
from blendserve.kernels.rotary import HALVES, OwnFunction, Rotary, RotaryForm
from blendserve.kernels.rows import RowPlan, plan_rows
from blendserve.kernels.types import (
    AttentionSpec,
    CorrectionParams,
    Prior,
    RecomputedTokens,
    RecordView,
    Rope,
)

SWITCH = "BLENDSERVE_NATIVE"  # "0" in the environment: plain torch

Attend = Callable[[Tensor, Tensor, Tensor, AttentionSpec, RowPlan], Tensor]


# The CPU's compiled kernels


@dataclass(frozen=True, slots=True)
class Status:
    """Whether compiled kernels are in use in this process, and why or why not."""

    active: bool
    reason: str


def cpu_status(level: Level) -> Status:
    """Of an instruction set; compiles and checks its kernels when nobody has asked before. Raises ConfigError alone."""
    if is_switched_off():
        return Status(False, f"switched off by {SWITCH}=0")
    return _cpu_status(level)


def forget() -> None:
    """Build, load and check anew when next asked, as a new process would."""
    _cpu_status.cache_clear()
    loaded.cache_clear()


def is_switched_off() -> bool:
    return os.environ.get(SWITCH) == "0"


@cache
def _cpu_status(level: Level) -> Status:
    try:
        check_cpu(level, loaded(level))
    except Unavailable as error:
        return Status(False, str(error))
    return Status(True, f"compiled kernels from {build(level)}")


@dataclass(frozen=True, slots=True)
class _Bounds:
    """How far off kernels in a dtype may be."""

    attend: float  # its outputs reach 4; they and the weights are rounded
    correct: float  # its outputs reach 5; they and the weights are rounded
    rounding: float  # of a linear layer's output, relative


CPU_BOUNDS = {torch.bfloat16: _Bounds(0.03, 0.05, 2**-8), torch.float32: _Bounds(2e-5, 1e-4, 2**-20)}
CPU_POSITIONS = (0, 1, 2, 3, 17, 63, 64, 65, 255, 256, 257, 400, 401, 402, 511, 512, 600, 700, 701)


@torch.inference_mode()
def check_cpu(level: Level, library: ctypes.CDLL) -> None:
    """Raises Unavailable unless everything that the instruction set computes comes out right."""
    checks = {
        "attend": _check_attend,
        "linear": _check_linear,
        "place": _check_place,
        "correct": _check_correct,
        "norm": _check_norm,
        "gate": _check_gate,
        "pack": _check_symbols,
        "decode": _check_symbols,
        "reconstruct": _check_reconstruct,
    }
    named = [
        name for name in level.sources if name in checks
    ]  # models/native.py compares decode_step with the model
    for check in dict.fromkeys(checks[name] for name in named):
        check(library, dtype_of(level))


def _check_attend(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """With and without window and softcap; memory behind the last key holds NaN."""
    generator, end = torch.Generator().manual_seed(0), CPU_POSITIONS[-1] + 1
    shapes = ((6, len(CPU_POSITIONS), 64), (2, 720, 64), (2, 720, 64))
    q, keys, values = (_random(shape, generator, dtype) for shape in shapes)
    keys[:, end:] = values[:, end:] = float("nan")
    at = torch.tensor(CPU_POSITIONS)
    for window, softcap in ((None, None), (70, None), (None, 2.0), (300, 2.0)):
        spec = AttentionSpec(0.25, window, softcap)
        got = cpu_attend.run(library, q, keys, values, spec, at)
        off = float((got.double() - formula(q, keys[:, :end], values[:, :end], at, spec)).abs().max())
        if not off < CPU_BOUNDS[dtype].attend:  # NaN is not
            raise Unavailable(
                f"attention is wrong here: off by {off:.3g} with window {window} and softcap {softcap}"
            )


def _check_linear(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """For few rows and for many, with sizes that fill no vector."""
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 7, 150):
        x, weight, bias = (_random(shape, generator, dtype) for shape in ((rows, 90), (142, 90), (142,)))
        wanted = x.double() @ weight.double().T + bias.double()
        got = cpu_linear.run(library, x, weight, bias)
        off = float(((got - wanted).abs() - CPU_BOUNDS[dtype].rounding * wanted.abs()).max())
        if not off < 1e-4:
            raise Unavailable(f"linear is wrong here: off by {off:.3g} beyond rounding at {rows} rows")


def _check_place(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Two chunks with a hole between them, to the bit, where a part of each head is rotated and where all of it is."""
    generator = torch.Generator().manual_seed(0)
    for width in (32, 96):
        rope = some_rope(90, width, 1.0, generator, dtype)
        chunks: list[RecordView] = []
        wanted = torch.zeros(2, 2, 90, 96, dtype=dtype)
        for here in (slice(0, 31), slice(40, 90)):
            k, v = (_random((2, here.stop - here.start, 96), generator, dtype) for _ in "kv")
            wanted[0, :, here], wanted[1, :, here] = PLAIN_HALVES.rotate(k, rope.at(here)), v
            chunks.append((here.start, k, v))
        keys, values = torch.zeros(2, 2, 90, 96, dtype=dtype)
        cpu_place.run(library, chunks, keys, values, rope)
        if not (torch.equal(keys, wanted[0]) and torch.equal(values, wanted[1])):
            raise Unavailable(f"placing is wrong here, where {width} of 96 numbers are rotated")


def _check_correct(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Two chunks with a hole between them, and fewer recomputed tokens than features."""
    generator = torch.Generator().manual_seed(0)
    keys, values, fresh_keys, fresh_values = (_random((2, n, 32), generator, dtype) for n in (90, 90, 40, 40))
    at = torch.tensor([*range(1, 31, 3), *range(40, 90, 3)])
    others = torch.tensor([i for i in (*range(31), *range(40, 90)) if i not in at.tolist()])
    rope = some_rope(90, 32, 1.0, generator, dtype)
    prior = Prior(
        0.1 * _random((2, 64, 64), generator, torch.float32), _random((2, 64), generator, torch.float32)
    )
    means, ridge = (
        CorrectionParams(16.0, 0.0, 0.5, 0.6, None),
        CorrectionParams(16.0, 40.0, 0.8, 0.9, 5.0, 20.0, 0.6, 0.7),
    )
    for params, known in ((means, None), (ridge, None), (ridge, prior)):
        given, wide = (keys.clone(), values.clone()), (keys.double(), values.double())
        which = torch.arange(2, 29), at, (10, 17), others, (21, 33), (0.4, 0.7)
        fresh = RecomputedTokens(fresh_keys, fresh_values, *which)
        cpu_correct.run(library, *given, fresh, rope, params, known)
        exact = RecomputedTokens(fresh_keys.double(), fresh_values.double(), *which)
        exact_rope = Rope(rope.cos.double(), rope.sin.double())
        correct_reference(*wide, exact, exact_rope, PLAIN_HALVES, params, known)
        off = max(float((a.double() - b).abs().max()) for a, b in zip(given, wide, strict=True))
        if not off < CPU_BOUNDS[dtype].correct:
            raise Unavailable(
                f"correcting is wrong here: off by {off:.3g} with {params}{'' if known is None else ' and a prior'}"
            )


def _check_norm(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """To the bit in every form, with sizes that fill no vector and sizes that make torch add up in cascades."""
    generator = torch.Generator().manual_seed(0)
    for dim in (90, 2080):
        x, add, weight = (_random(shape, generator, dtype) for shape in ((16, dim), (16, dim), (dim,)))
        for form in FORMS:
            total, normed = cpu_norm.run(library, x, add, weight, 1e-5, form)
            if not (torch.equal(total, x + add) and torch.equal(normed, form.normed(total, weight, 1e-5))):
                raise Unavailable(f"norms are wrong here, of {dim} numbers")


def _check_gate(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """To the bit, over all that does not become too small for the dtype."""
    generator = torch.Generator().manual_seed(0)
    gate = torch.linspace(-80.0, 80.0, 4000).view(40, 100).to(dtype)
    up = _random(gate.shape, generator, dtype)
    if not torch.equal(cpu_gate.run(library, gate.clone(), up), F.silu(gate) * up):
        raise Unavailable("gated activations are wrong here")


def _check_symbols(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """To the byte, and back with what they are worth."""
    model, generator = coding.some_model(), np.random.default_rng(0)
    layer, codes, seen = coding.some_map(64, 20), coding.some_codes(40, 64), coding.some_codes(40, 37).numpy()
    values = (generator.laplace(size=(40, 20)) * np.linspace(0.01, 9.0, 20)).clip(-128, 127).astype(np.int8)
    means = np.full(20, coding.ONE // 3)
    for below in (seen, None):
        contexts = coding.contexts_of(below, 40)
        wanted = coding.pack_reference(values, contexts, means, model)
        if cpu_coding.run_pack(library, values, contexts, means, model) != wanted:
            raise Unavailable("coding symbols is wrong here")
        given = memoryview(wanted), (below, codes), means, model, layer, 16, dtype
        heads, found, above = cpu_coding.run_decode(library, *given)
        worth = coding.reconstruct_reference(codes, torch.from_numpy(values), layer, 16, dtype)
        if not (np.array_equal(found, values) and all(map(torch.equal, (heads, above), worth))):
            raise Unavailable("decoding symbols is wrong here")


def _check_reconstruct(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """To the bit, with integers as large as they may be."""
    for dim, n_tokens in ((8, 3), (16, 19)):
        layer = coding.some_map(64, 12)
        below, symbols = (coding.some_codes(n_tokens, n, seed=n) for n in (64, 12))
        for given in (symbols, None):
            got = cpu_coding.run_reconstruct(library, below, given, layer, dim, dtype)
            wanted = coding.reconstruct_reference(below, given, layer, dim, dtype)
            if not all(map(torch.equal, got, wanted)):
                raise Unavailable("predicting KV is wrong here")


def _random(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def _plain_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """A head [x1 | x2] becomes x cos + [-x2 | x1] sin: the function of most families."""
    first, second = q.chunk(2, dim=-1)
    return q * cos + torch.cat([-second, first], dim=-1) * sin, k


_own: OwnFunction = _plain_halves
PLAIN_HALVES = Rotary(_own, HALVES)


def some_rope(
    n: int, width: int, length: float, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16
) -> Rope:
    """cos and sin [n, width] of some angles, `length` long as YaRN's."""
    angles = torch.rand((n, width // 2), generator=generator).mul(6.0).repeat(1, 2)
    return Rope((length * angles.cos()).to(dtype), (length * angles.sin()).to(dtype))


# A GPU's kernels

# Rounding of values that reach 4, of the weights and of the output; sums are kept in fp32. tf32 would fail the last one.
BOUNDS = {torch.bfloat16: 0.03, torch.float16: 0.005, torch.float32: 2e-5}
KEYS, SCALE = 700, 0.25
ONE_ROW, SCATTERED = ((0,), (KEYS - 1,)), (tuple(range(1, KEYS - 2, 3)),)
SIDE_BY_SIDE = (tuple(range(130)), tuple(range(KEYS - 200, KEYS)))


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
def attention_trouble(attends: tuple[Attend, ...], kind: Kind, rows: tuple[tuple[int, ...], ...]) -> str:
    """What is wrong with a kernel, "" if nothing. attends: its forms; rows: positions below KEYS to try each with."""
    try:
        for attend in attends:
            for positions in rows:
                off = _off(attend, kind, positions)
                if not off < BOUNDS[kind.dtype]:  # NaN is not
                    return f"off by {off:.3g} for {kind}"
    except Exception as error:  # whatever a compiler, a driver or a GPU without room for the tile may say
        return _first_line(error)
    return ""


def triton_trouble(attends: tuple[Attend, ...], kind: Kind, rows: tuple[tuple[int, ...], ...]) -> str:
    """The same for what needs triton."""
    if not has_triton():
        return "triton is not installed: pip install triton"
    return attention_trouble(attends, kind, rows)


@torch.inference_mode()
def _off(attend: Attend, kind: Kind, positions: tuple[int, ...]) -> float:
    """The largest difference to the formula; memory behind the last key holds NaN."""
    generator = torch.Generator().manual_seed(0)
    at = torch.tensor(positions)
    end = positions[-1] + 1
    q, keys, values = (
        torch.randn(shape, generator=generator).to(kind.dtype)
        for shape in ((2 * kind.group, len(at), kind.dim), (2, KEYS, kind.dim), (2, KEYS, kind.dim))
    )
    scale = SCALE * (64 / kind.dim) ** 0.5  # scores spread alike in heads of every size
    spec = AttentionSpec(scale, 70 if kind.windowed else None, 2.0 if kind.softcapped else None)
    wanted = formula(q, keys[:, :end], values[:, :end], at, spec)
    keys[:, end:] = values[:, end:] = float("nan")
    plan = plan_rows(at.to(kind.device), kind.group, spec.window, at)
    got = attend(q.to(kind.device), keys.to(kind.device), values.to(kind.device), spec, plan)
    return float((got.cpu().double() - wanted).abs().max())


@cache
@torch.inference_mode()
def placing_trouble(form: RotaryForm, device: torch.device, dtype: torch.dtype, dim: int) -> str:
    """What is wrong with a GPU's placing of such heads, "" if nothing. Compiles it, once a machine."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    try:
        for width in {dim, dim // 4 * 2}:  # all of a head, or a part
            angles = draw(90, width // 2)
            twice = angles.repeat_interleave(2, dim=-1) if form.step == 2 else torch.cat([angles] * 2, dim=-1)
            rope = Rope(twice.cos(), twice.sin())
            chunks = [(5, draw(2, 40, dim), draw(2, 40, dim)), (50, draw(2, 33, dim), draw(2, 33, dim))]
            keys, values = draw(2, 90, dim), draw(2, 90, dim)
            wanted, plain = keys.clone(), values.clone()
            for start, k, v in chunks:
                here = slice(start, start + k.shape[1])
                wanted[:, here], plain[:, here] = form.rotated(k, rope.at(here)), v
            cuda_place.run(chunks, keys, values, rope, form)
            off = float((keys.float() - wanted.float()).abs().max())
            if not off <= 2 * torch.finfo(dtype).eps or not torch.equal(values, plain):
                return f"off by {off:.3g}"
    except Exception as error:  # whatever a compiler or driver may say
        return _first_line(error)
    return ""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no reason given'}".splitlines()[0]
