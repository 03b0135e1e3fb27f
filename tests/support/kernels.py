"""Every kernel operation as float64 loops, random calls of it, and the backends that can run it on this machine."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from blendserve.core import Span
from blendserve.kernels.activation import Activation
from blendserve.kernels.cases import CASES, NAN, RIDGE, SHIFT, Args, Draw
from blendserve.kernels.chunks import ChunkStack
from blendserve.kernels.cpu import bindings
from blendserve.kernels.cpu.isa import LEVELS, Level
from blendserve.kernels.cpu.library import dtype_of
from blendserve.kernels.cuda import dense, packed, scattered
from blendserve.kernels.dispatch import Backend
from blendserve.kernels.norm import Norm
from blendserve.kernels.ops import OPERATIONS
from blendserve.kernels.rotary import FORMS, HALVES, Rotary, RotaryForm
from blendserve.kernels.rows import AttentionPlan, plan_rows
from blendserve.kernels.types import AttentionSpec, CorrectionParams, Prior, RecomputedTokens, Rope

Options = dict[str, Any]


# Attention


def visible_keys(at: Sequence[int], window: int | None, absent: Sequence[int] = ()) -> list[list[int]]:
    """The keys that each row sees."""
    return [[j for j in range(max(0, p + 1 - (window or p + 1)), p + 1) if j not in absent] for p in at]


def attention(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, seen: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Row after row over the keys that it sees -> [S, H * D], and each key's score [T]."""
    q, keys, values = (x.detach().double().cpu() for x in (q, keys, values))
    n_kv, total, dim = keys.shape
    out, scores = [], torch.zeros(total, dtype=torch.float64)
    for s, visible in enumerate(seen):
        k, v = keys[:, visible], values[:, visible]
        logits = spec.scale * torch.einsum("kgd,knd->kgn", q[:, s].view(n_kv, -1, dim), k)
        if spec.softcap is not None:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)
        weights = torch.exp(logits - logits.amax(-1, keepdim=True))
        weights /= weights.sum(-1, keepdim=True)
        out.append(torch.einsum("kgn,knd->kgd", weights, v).flatten())
        scores[list(visible)] += (weights * v.norm(dim=-1)[:, None]).flatten(0, 1).mean(0) ** 2
    return [torch.stack(out), scores.sqrt()]


def attend_formula(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan
) -> list[Tensor]:
    absent = [] if plan.masked_keys is None else plan.masked_keys.nonzero()[:, 0].tolist()
    found = attention(q, keys, values, spec, visible_keys(plan.positions.tolist(), spec.window, absent))
    return found[: 1 if plan.masked_keys is None else 2]


def some_rows(args: Args, rows: list[int]) -> tuple[Args, Any]:
    q, keys, values, spec, plan = args
    at = plan.positions.cpu()[rows]
    here = plan_rows(at.to(q.device), plan.group, plan.window, at, plan.masked_keys)
    return (q[:, rows], keys, values, spec, here), rows


def moved_rows(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Args:
    at = plan.positions - 1
    return (
        q,
        keys,
        values,
        spec,
        plan_rows(at.clamp(min=0), plan.group, plan.window, masked_keys=plan.masked_keys),
    )


def attend_chunks_formula(
    q: Tensor, k: Tensor, v: Tensor, front: tuple[Tensor, Tensor], spec: AttentionSpec, stack: ChunkStack
) -> list[Tensor]:
    out = []
    for span in stack.spans:
        here = slice(span.start, span.stop)
        keys, values = (torch.cat([x, own[:, here]], dim=1) for x, own in zip(front, (k, v), strict=True))
        seen = visible_keys(range(stack.n_prefix, stack.n_prefix + len(span)), spec.window)
        out.append(attention(q[:, here], keys, values, spec, seen)[0])
    return [torch.cat(out)]


def last_chunk(args: Args, _: list[int]) -> tuple[Args, Any]:
    q, k, v, front, spec, stack = args
    rows = slice(stack.spans[-1].start, stack.spans[-1].stop)
    alone = ChunkStack([Span(0, len(stack.spans[-1]))], stack.n_prefix, stack.group, stack.device)
    return (q[:, rows], k[:, rows], v[:, rows], front, spec, alone), rows


# RoPE, placement and corrections


def turned(x: Tensor, rope: Rope, form: RotaryForm, inverse: bool = False) -> Tensor:
    """x [..., S, D] in float64, pair after pair of dims."""
    out, cos, sin = x.detach().double().cpu().clone(), rope.cos.double().cpu(), rope.sin.double().cpu()
    half = cos.shape[-1] // 2
    for i in range(half):
        c, s = cos[:, i * form.step], sin[:, i * form.step]
        if inverse:
            length = c**2 + s**2
            c, s = c / length, -s / length
        a, b = (2 * i, 2 * i + 1) if form.neighbours else (i, i + half)
        one, other = out[..., a].clone(), out[..., b].clone()
        out[..., a], out[..., b] = one * c - other * s, other * c + one * s
    return out


def place_formula(
    parts: Sequence[Any], keys: Tensor, values: Tensor, rope: Rope, rotary: Rotary
) -> list[Tensor]:
    wanted = [keys.double().cpu(), values.double().cpu()]
    assert rotary.form is not None
    for start, k, v in parts:
        here = slice(start, start + k.shape[1])
        wanted[0][:, here], wanted[1][:, here] = turned(k, rope.at(here), rotary.form), v
    return wanted


def correct_formula(
    keys: Tensor, values: Tensor, fresh: RecomputedTokens, rope: Rope, rotary: Rotary,
    params: CorrectionParams, prior: Prior | None = None,
) -> list[Tensor]:  # fmt: skip
    """Head after head, token after token; the ridge by least squares with rows added for the penalty."""
    assert rotary.form is not None
    at, others, n, dim = (
        fresh.recomputed_index,
        fresh.reused_index,
        len(fresh.recomputed_index),
        keys.shape[-1],
    )
    old = torch.cat([turned(keys, rope, rotary.form, inverse=True), values.double()], dim=-1)
    new_keys = turned(fresh.keys[:, fresh.row_index], rope.at(at), rotary.form, inverse=True)
    new = torch.cat([new_keys, fresh.values[:, fresh.row_index].double()], dim=-1)
    which, which_other = (
        torch.tensor([c for c, k in enumerate(sizes) for _ in range(k)], dtype=torch.long)
        for sizes in (fresh.recomputed_per_chunk, fresh.reused_per_chunk)
    )
    foreign = torch.tensor(fresh.context_weight, dtype=torch.float64)[:, None]

    def halves(key: Any, value: Any) -> Tensor:
        return torch.tensor([key] * dim + [value] * dim, dtype=torch.float64)

    scale, out = halves(params.key_scale, params.value_scale), [keys.double(), values.double()]
    for head in range(len(keys)):
        stored, rest = old[head], old[head][others]
        moved, shift = new[head] - stored[at], torch.zeros(len(others), 2 * dim, dtype=torch.float64)
        if prior is not None:
            expected = foreign[which] * (stored[at] @ prior.weights[head].double() + prior.constant[head])
            shares = []
            for e, m in zip(expected.chunk(2, -1), moved.chunk(2, -1), strict=True):
                trust = params.prior_shrinkage / max(1, n)
                slope = (float((e * m).sum() / (e * e).sum()) + trust) / (1 + trust) if e.any() else 1.0
                shares.append(min(1.0, max(0.0, slope)))
            moved = moved - halves(*shares) * expected
            said = foreign[which_other] * (rest @ prior.weights[head].double() + prior.constant[head])
            shift += halves(*shares) * halves(params.prior_key_scale, params.prior_value_scale) * said
        overall = moved.sum(0) / (n + params.zero_shrinkage)
        means = []
        for c, k in enumerate(fresh.recomputed_per_chunk):
            beyond = (moved[which == c] - overall).sum(0)
            means.append(overall + beyond / (k + params.chunk_shrinkage))
        mean = torch.stack(means)
        shift += scale * mean[which_other]
        if params.penalty is not None and n:
            centre = stored[at].mean(0)
            x, x_other = foreign[which] * (stored[at] - centre), foreign[which_other] * (rest - centre)
            sizes = []
            for centred, whole in zip(
                x.chunk(2, -1), (foreign[which] * stored[at]).chunk(2, -1), strict=True
            ):
                spread, length = float(centred.square().mean()), float(whole.square().mean())
                sizes.append(max(spread, length / 4096, 1e-12) ** 0.5)
            x, x_other = x / halves(*sizes), x_other / halves(*sizes)
            added = params.penalty**0.5 * torch.eye(2 * dim, dtype=torch.float64)
            y = torch.cat([moved - mean[which], torch.zeros_like(added)])
            shift += scale * (x_other @ torch.linalg.lstsq(torch.cat([x, added]), y).solution)
        out[0][head, others] += turned(shift[:, :dim], rope.at(others), rotary.form)
        out[1][head, others] += shift[:, dim:]
    return out


# Layers


def linear_formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    total = x.double().cpu() @ weight.double().cpu().T
    return [total if bias is None else total + bias.double().cpu()]


def add_norm_formula(x: Tensor, add: Tensor | None, norm: Norm) -> list[Tensor]:
    assert norm.weight is not None
    assert norm.form is not None
    total = (x if add is None else x + add).double().cpu()  # the sum is rounded before it is normed
    rows = [row / math.sqrt(float(row.square().mean()) + norm.eps) for row in total]
    return [total, torch.stack(rows) * (norm.weight.double().cpu() + norm.form.offset)]


def gate_formula(gate: Tensor, up: Tensor, activation: Activation) -> list[Tensor]:
    g = gate.double().cpu()
    return [g / (1 + torch.exp(-g)) * up.double().cpu()]


# The table


@dataclass(frozen=True)
class Operation:
    """How an operation is called with random arguments, and what its backends must give."""

    formula: Callable[..., list[Tensor]]
    shapes: Callable[[Way], st.SearchStrategy[Options]]
    bounds: Callable[[float], tuple[float, float]]  # a dtype's eps -> relative, absolute
    large: Sequence[Options] = ()
    alone: Callable[[Args, list[int]], tuple[Args, Any]] | None = (
        None  # some rows, their places in the output
    )
    off: Callable[..., Args] | None = None  # a call that is one position off
    changes: Sequence[int] = ()  # arguments that are written to, and are the result unless there is one
    is_exact: bool = False  # native backends give the plain form's bits


@dataclass(frozen=True)
class Way:
    """A backend of an operation on a device."""

    operation: str
    backend: Backend[..., Any]
    name: str  # the first word of a test's id
    level: Level | None = None
    device: str = "cpu"

    @property
    def is_native(self) -> bool:
        return self.level is not None

    @property
    def is_for_gpu(self) -> bool:
        return getattr(self.backend.supports, "__module__", "").startswith("blendserve.kernels.cuda.")

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        if self.level is not None:
            return (dtype_of(self.level),)
        if self.name.startswith("triton_"):
            return (torch.float32,)
        return HALF_DTYPES if self.name in DENSE else DTYPES

    @property
    def is_slow(self) -> bool:
        """Interpreted or emulated."""
        return self.device == "cpu" and (self.name.startswith("triton") or self.name == "amx_emulated")

    def args(self, dtype: torch.dtype, options: Options, fill: float = NAN) -> Args:
        options = {**options}
        return CASES[self.operation](Draw(dtype, self.device, options.pop("seed", 0), fill), **options)

    def run(self, args: Args) -> list[Any]:
        """Its outputs, on the CPU; what an operation writes to is copied before."""
        row, args = TABLE[self.operation], tuple(args)
        for i in row.changes:
            args = (*args[:i], copied(args[i]), *args[i + 1 :])
        with torch.inference_mode(), off_gpu(self):
            out = self.backend.run(*args)
        if out is None:
            out = [args[i] for i in row.changes]
        found = list(out) if isinstance(out, (tuple, list)) else [out]
        return [x.cpu() if isinstance(x, Tensor) else x for x in found]


def copied(x: Tensor) -> Tensor:
    """The same numbers at the same strides, in memory of their own."""
    whole = x.new_empty(1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)))
    made = whole.as_strided(x.shape, x.stride())
    made.copy_(x)
    return made


def compare(way: Way, dtype: torch.dtype, args: Args, got: Sequence[Any]) -> None:
    """Raises AssertionError where an output is further from the formula than rounding explains."""
    wanted = TABLE[way.operation].formula(*args)
    assert len(got) == len(wanted)
    relative, absolute = TABLE[way.operation].bounds(torch.finfo(dtype).eps)
    wider = 1.0 if way.is_native else 2.5
    for found, right in zip(got, wanted, strict=True):
        found = torch.as_tensor(found)
        assert found.shape == right.shape
        off = (found.double() - right.double()).abs()
        hole = right.isnan()  # memory that must stay as it is
        assert torch.equal(found.isnan() if found.is_floating_point() else hole, hole)
        bound = wider * (relative * right.double().abs() + absolute)
        if found.dtype == torch.int8:
            bound = torch.full_like(off, 0.501)
        off, bound = off[~hole], bound[~hole]
        assert bool((off <= bound).all()), f"off by {float((off - bound).max()):.3g} beyond rounding"


def same(a: Any, b: Any) -> bool:
    """The same bits; memory that must stay as it is may be NaN in both."""
    if isinstance(a, bytes):
        return bool(a == b)
    one, other = (torch.as_tensor(x).double().numpy() for x in (a, b))
    return np.array_equal(one, other, equal_nan=True)


@contextmanager
def guarded() -> Iterator[None]:
    """Inside, memory that is asked of torch.empty holds NaN, and what lies around it must stay as it is."""
    plain, made = torch.empty, list[tuple[Tensor, int]]()

    def empty(*shape: Any, **options: Any) -> Tensor:
        size = torch.Size(shape if not shape or isinstance(shape[0], int) else shape[0])
        whole = plain(size.numel() + 128, **options)
        whole.fill_(NAN if whole.is_floating_point() else 77)
        made.append((whole, size.numel()))
        return whole[64 : 64 + size.numel()].view(size)

    with patch.object(torch, "empty", empty):
        yield
    for whole, n in made:
        around = torch.cat([whole[:64], whole[64 + n :]])
        assert bool((around.isnan() if around.is_floating_point() else around == 77).all())


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# What stands for a GPU


class FlashAttn:
    """The functions of flash-attn as its documentation has them: causal is aligned at the bottom right."""

    @staticmethod
    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, window_size: tuple[int, int],
        softcap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        assert causal
        assert window_size[1] == (-1 if window_size[0] < 0 else 0)
        n, end = q.shape[1], k.shape[1]
        spec = AttentionSpec(softmax_scale, window_size[0] + 1 or None, softcap or None)
        seen = visible_keys(range(end - n, end), spec.window)
        heads, keys, values = (x[0].transpose(0, 1) for x in (q, k, v))
        return attention(heads, keys, values, spec, seen)[0].view(1, *q.shape[1:]).to(q.dtype)

    @classmethod
    def flash_attn_varlen_func(
        cls, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, **options: Any,
    ) -> Tensor:  # fmt: skip
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        q_parts, k_parts, v_parts = (
            x.tensor_split(ends.tolist()[1:-1])
            for x, ends in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))
        )
        assert max(map(len, q_parts)) == max_seqlen_q
        assert max(map(len, k_parts)) == max_seqlen_k
        parts = zip(q_parts, k_parts, v_parts, strict=True)
        return torch.cat([cls.flash_attn_func(a[None], b[None], c[None], **options)[0] for a, b, c in parts])


@contextmanager
def bf16_products() -> Iterator[None]:
    """Triton's interpreter keeps bf16 as bits in uint16 and would multiply those: here they are widened first."""
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    narrow = builder.create_dot

    def wide(handle: Any) -> Any:
        if handle.data.dtype != np.uint16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)

    with patch.object(builder, "create_dot", lambda self, a, b, *rest: narrow(self, wide(a), wide(b), *rest)):
        yield


@contextmanager
def off_gpu(way: Way) -> Iterator[None]:
    """What a backend for a GPU asks of one is said by a double; nothing changes where there is one."""
    with ExitStack() as stack:
        if way.is_for_gpu and way.device == "cpu":
            for module in (dense, packed):
                stack.enter_context(patch.object(module, "flash_attn", lambda: FlashAttn))
            stack.enter_context(patch.object(scattered, "capability", lambda device: (9, 0)))
            stack.enter_context(patch.object(scattered, "processors", lambda device: 6))
            if way.name.startswith("triton"):
                stack.enter_context(bf16_products())
        yield


# Shapes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF_DTYPES = (torch.bfloat16, torch.float16)
DENSE = {"flash_attn", "torch_s_flashattention"}  # rows side by side alone
UNCAPPED = {"torch_s_flashattention", "torch_s_sdpa"}
SEEDS = st.integers(0, 999)
FORM = st.sampled_from(FORMS)


def options(**parts: Any) -> st.SearchStrategy[Options]:
    fixed = {k: v if isinstance(v, st.SearchStrategy) else st.just(v) for k, v in parts.items()}
    return st.fixed_dictionaries({**fixed, "seed": SEEDS})


def attention_shapes(way: Way, **more: Any) -> st.SearchStrategy[Options]:
    """Vectors, strips and blocks end at these totals; a window of 1 or of all keys hides most or nothing."""
    totals = [1, 2, 15, 16, 17, 63, 64, 65, 130, *(() if way.is_slow else (128, 129, 256, 257, 300, 600))]
    dims = [16, 32, 48, 64, 80, 96, 112, 128] if way.is_native else [2, 16, 24, 64, 80, 128]

    def of(total: int) -> st.SearchStrategy[Options]:
        windows = st.none() | st.sampled_from([1, 2, total, total + 5]) | st.integers(1, total)
        if way.name == "torch_s_flashattention":
            windows = st.sampled_from([None, total, total + 5])
        return options(
            total=total, share=st.sampled_from([0.02, 0.3, 1.0]), n_kv=st.integers(1, 3), window=windows,
            group=st.sampled_from([1, 2, 3, 4, 7, 8]), dim=st.sampled_from(dims),
            softcap=st.none() if way.name in UNCAPPED else st.sampled_from([None, 0.7, 20.0]),
            dense=way.name in DENSE or st.booleans(), **more,
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


def some_of(index: int) -> Callable[[Args, list[int]], tuple[Args, Any]]:
    """Rows of the first arguments, which are those of the output."""
    return lambda args, rows: ((*(x if x is None else x[rows] for x in args[:index]), *args[index:]), rows)


def rolled(index: int) -> Callable[..., Args]:
    """The argument at `index` moved by one along its rows."""

    def off(*args: Any) -> Args:
        x = args[index]
        moved = Rope(x.cos.roll(1, 0), x.sin.roll(1, 0)) if isinstance(x, Rope) else x.roll(1, 0)
        return (*args[:index], moved, *args[index + 1 :])

    return off


def attention_bounds(eps: float) -> tuple[float, float]:
    """Values reach about 4; the output is rounded, and the weights are."""
    return 0.0, 5 * eps + 1e-5


LARGE: Sequence[Options] = (
    {"at": [2999]},
    {"at": list(range(1300)), "n_kv": 1, "group": 1},
    {"at": list(range(0, 1300, 3)), "group": 3},
    {"at": [0, 5, 300, 599], "size": 300.0},
    {"at": [0, 5, 300, 599], "size": 300.0, "softcap": 5.0},
)
TABLE: dict[str, Operation] = {
    "attend": Operation(
        attend_formula, attention_shapes, attention_bounds, LARGE, some_rows, moved_rows
    ),
    "attend_with_scores": Operation(
        attend_formula, partial(attention_shapes, absent=st.sampled_from([0.0, 0.3])),
        lambda eps: (1.3 * eps + 1e-5, 5 * eps + 1e-5),
        [{"at": list(range(900, 1031)), "absent": 0.4}],  # more rows than are watched at once
        some_rows, moved_rows,
    ),
    "attend_at": Operation(
        lambda q, k, v, spec, at: attention(q, k, v, spec, visible_keys(at.tolist(), spec.window))[:1],
        attention_shapes, attention_bounds,
        off=lambda *args: (*args[:4], args[4] - 1),
    ),
    "attend_chunks": Operation(
        attend_chunks_formula,
        lambda way: options(
            lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5), prefix=st.sampled_from([0, 1, 9]),
            window=st.none() | st.integers(1, 12), softcap=st.sampled_from([None, 0.7]), group=st.integers(1, 3),
        ),
        attention_bounds, alone=last_chunk,
        off=lambda q, k, v, front, *rest: (q, k, v, (front[0].roll(1, 1), front[1]), *rest),
    ),
    "rotate": Operation(
        lambda x, rope, rotary: [turned(x, rope, rotary.form)],
        partial(rope_shapes, n=st.sampled_from([1, 5, 130]), heads=st.sampled_from([1, 3])),
        lambda eps: (0.0, 8 * eps),
        alone=lambda args, rows: ((args[0][:, rows], args[1].at(torch.tensor(rows)), args[2]), (slice(None), rows)),
        off=rolled(1), is_exact=True,
    ),
    "place": Operation(
        place_formula,
        partial(rope_shapes, lengths=st.lists(st.sampled_from([1, 5, 40, 130]), max_size=3), heads=st.integers(1, 3)),
        lambda eps: (0.0, 8 * eps), changes=(1, 2), off=rolled(3), is_exact=True,
    ),
    "linear": Operation(
        linear_formula, linear_shapes, lambda eps: (eps / 2 + 1e-6, 5e-4),
        [{"rows": n, "outs": o, "depth": d} for n in (1, 40, 100) for o, d in ((576, 576), (112, 1536))],
        some_of(1), rolled(1),
    ),
    "correct": Operation(
        correct_formula, correction_shapes, lambda eps: (0.0, 5 * eps + 2e-4),
        [{"lengths": [300, 200], "n": 100, "heads": 3, "params": RIDGE}],
        changes=(0, 1), off=lambda k, v, fresh, *rest: (k, v, one_off(fresh), *rest),
    ),
    "add_norm": Operation(
        add_norm_formula,
        lambda way: options(
            rows=st.sampled_from([1, 3, 40]), dim=st.sampled_from([8, 16, 31, 90, 576, 1000, 2080, 8192]),
            form=st.integers(0, 2), adds=st.booleans(), apart=st.sampled_from([0, 6]),
        ),
        lambda eps: (2 * eps + 2e-6, 1e-6), [{"rows": 3000, "dim": 576}],
        some_of(2), rolled(1), is_exact=True,
    ),
    "gated_activation": Operation(
        gate_formula,
        lambda way: options(
            rows=st.sampled_from([1, 3, 40]), width=st.sampled_from([1, 53, 60, 128]), apart=st.sampled_from([0, 7])
        ),
        lambda eps: (2 * eps + 2e-6, 1e-6), alone=some_of(2), off=rolled(1), changes=(0,),
    ),
}  # fmt: skip
FORMULAS = {name: row.formula for name, row in TABLE.items()}


def one_off(fresh: RecomputedTokens) -> RecomputedTokens:
    """The recomputed tokens' fresh rows in the order of their neighbours."""
    return RecomputedTokens(fresh.keys, fresh.values, fresh.row_index.roll(1, 0), *fresh[3:])


BF16 = LEVELS["avx512_bf16"]
EMULATION = Path(__file__).parents[1] / "kernels" / "cpu" / "emulated_amx.h"
TILES = (*BF16.compile, "-include", str(EMULATION), f"-DEMULATION={zlib.crc32(EMULATION.read_bytes())}")
EMULATED = replace(BF16, title="AMX, emulated", compile=TILES, sources=LEVELS["amx"].sources)


def ways() -> Iterator[Way]:
    """Every backend of every operation, and native kernels that no operation has: emulated, or of another dtype."""
    levels = {f"{level.title} kernel": level for level in LEVELS.values()}
    for name, operation in OPERATIONS.items():
        for backend in operation.backends:
            level = levels.get(backend.name)
            word = re.sub(r"\W+", "_", backend.name.removesuffix(" kernel").lower())
            yield Way(name, backend, level.name if level else word, level)
    for i, form in enumerate(scattered.FORMS[1:], 1):  # each is compiled alone on a GPU
        yield Way("attend", Backend(f"Triton kernel, form {i}", form, scattered.fits_gpu), f"triton_{i}")
    linear = "linear", bindings.linear, bindings.supports_linear
    extra: list[tuple[Level, tuple[str, Any, Any]]] = [
        (EMULATED, ("attend", bindings.attention, bindings.supports_attention)),
        (EMULATED, ("attend_with_scores", bindings.attention_with_key_scores, bindings.supports_attention)),
        *((level, linear) for level in (EMULATED, LEVELS["avx2"], LEVELS["avx512"])),
    ]
    for level, (name, run, supports) in extra:
        word = "amx_emulated" if level is EMULATED else level.name
        backend = Backend(f"{level.title} kernel", partial(run, level), partial(supports, level))
        yield Way(name, backend, word, level)
