"""Synthetic calls of every operation: what self-checks compare, autotuning times and tests vary.

`fill` lies in memory that no kernel may read: NaN shows a kernel that does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blendserve.kernels.chunks import ChunkStack
from blendserve.kernels.norm import FORMS as NORM_FORMS
from blendserve.kernels.norm import Norm
from blendserve.kernels.packed import KINDS, STRIP, PackedMatrix
from blendserve.kernels.rotary import HALVES, Rotary
from blendserve.kernels.rows import plan_rows
from blendserve.kernels.types import (
    Activation,
    AttentionSpec,
    CorrectionParams,
    Prior,
    RecomputedTokens,
    Rope,
    gelu_tanh,
)

Args = tuple[Any, ...]
NAN = float("nan")
SHIFT = CorrectionParams(16.0, 0.0, 0.5, 0.6, None)
RIDGE = CorrectionParams(16.0, 40.0, 0.7, 0.9, 800.0, 20.0, 0.5, 0.6)


class Draw:
    """Random tensors of one dtype and device, from a generator of its own."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0, fill: float = NAN
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self.fill = fill
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, apart: int = 0, scale: float = 1.0) -> Tensor:
        """apart: numbers of `fill` between rows."""
        made = scale * torch.randn(shape, generator=self.generator)
        whole = torch.full((*shape[:-1], shape[-1] + apart), self.fill)
        whole[..., : shape[-1]] = made
        return whole.to(self.device, self.dtype)[..., : shape[-1]]

    def rows(self, n: int, share: float) -> list[int]:
        """An ascending, non-empty subset of range(n)."""
        chosen = torch.rand(n, generator=self.generator) < share
        chosen[int(torch.randint(n, (), generator=self.generator))] = True
        return chosen.nonzero()[:, 0].tolist()

    def sinks(self, n_heads: int) -> Tensor:
        """Some below all scores, and some above."""
        drawn = 3 * torch.randn(n_heads, generator=self.generator)
        return drawn.to(self.dtype).to(self.device, torch.float32)

    def rope(self, n: int, width: int, form: Rotary) -> Rope:
        """n random angles, of length 1.1 as YaRN's."""
        angles = 6.0 * torch.rand((n, width // 2), generator=self.generator)
        both = angles.repeat_interleave(2, dim=-1) if form.step == 2 else torch.cat([angles] * 2, dim=-1)
        return Rope(*((1.1 * x).to(self.device, self.dtype) for x in (both.cos(), both.sin())))


def attention(
    draw: Draw, at: Sequence[int] | None = None, total: int = 1, share: float = 1.0, dense: bool = False,
    n_kv: int = 2, group: int = 2, dim: int = 64, window: int | None = None, softcap: float | None = None,
    size: float = 1.0, absent: float | None = None, sinks: bool = False, value_dim: int | None = None,
) -> Args:  # fmt: skip
    """Rows over a slice of a larger cache. absent: share of keys that no row may see. value_dim: `dim` if None."""
    at = list(at or (range(int(total * (1 - share)), total) if dense else draw.rows(total, share)))
    hidden = None
    if absent is not None:
        hidden = torch.rand(at[-1] + 1, generator=draw.generator) < absent
        hidden[at] = False
    key = torch.arange(at[-1] + 1)[None]
    row = torch.tensor(at)[:, None]
    seen = (key <= row) & (key > row - (window or len(key[0])))
    unseen = ~seen.any(dim=0) if hidden is None else ~seen.any(dim=0) | hidden
    width = max(dim, value_dim or dim)
    cache = torch.full((2, n_kv, at[-1] + 10, width), draw.fill)
    cache[:, :, : at[-1] + 1] = torch.randn(2, n_kv, at[-1] + 1, width, generator=draw.generator)
    cache[:, :, : at[-1] + 1][:, :, unseen] = 100.0 if math.isnan(draw.fill) else draw.fill
    if hidden is not None:
        cache[0][:, : len(hidden)][:, hidden] = draw.fill
        cache[1][:, : len(hidden)][:, hidden] = 0.0
        cache = cache[:, :, : len(hidden)]
    keys, values = cache.to(draw.device, draw.dtype)
    keys = keys[..., :dim]
    values = values[..., : value_dim or dim]
    q = draw(len(at), n_kv * group, dim, scale=size).transpose(0, 1)
    spec = AttentionSpec(1 / math.sqrt(dim), window, softcap, draw.sinks(n_kv * group) if sinks else None)
    here = torch.tensor(at)
    return q, keys, values, spec, plan_rows(here.to(draw.device), group, window, here, hidden)


def attention_at(draw: Draw, **options: Any) -> Args:
    """One row; all keys are finite."""
    finite = Draw(draw.dtype, draw.device, 0, 100.0 if math.isnan(draw.fill) else draw.fill)
    finite.generator = draw.generator
    q, keys, values, spec, plan = attention(finite, **options)
    return q[:, -1:], keys, values, spec, plan.positions[-1:]


def attention_chunks(
    draw: Draw, lengths: Sequence[int], prefix: int = 3, n_kv: int = 2, group: int = 2, dim: int = 16,
    window: int | None = None, softcap: float | None = None, sinks: bool = False, value_dim: int | None = None,
) -> Args:  # fmt: skip
    stack = ChunkStack(list(lengths), prefix, draw.device)
    q, k = (draw(n, sum(lengths), dim) for n in (n_kv * group, n_kv))
    v = draw(n_kv, sum(lengths), value_dim or dim)
    prefix_kv = draw(n_kv, prefix, dim), draw(n_kv, prefix, value_dim or dim)
    spec = AttentionSpec(1 / math.sqrt(dim), window, softcap, draw.sinks(n_kv * group) if sinks else None)
    return q, k, v, prefix_kv, spec, stack


def rotation(
    draw: Draw, n: int, heads: int = 2, dim: int = 64, width: int = 64, form: Rotary = HALVES
) -> Args:
    x = draw(n, heads, dim, apart=6).transpose(0, 1)
    return x, draw.rope(n, width, form), form


def placement(
    draw: Draw, lengths: Sequence[int], heads: int = 2, dim: int = 64, width: int = 64, form: Rotary = HALVES,
    value_dim: int | None = None, apart: int = 6,
) -> Args:  # fmt: skip
    """Chunks with two free positions between them. value_dim: `dim` if None."""
    dims = dim, value_dim or dim
    starts = [3 + sum(n + 2 for n in lengths[:i]) for i in range(len(lengths))]
    end = 3 + sum(lengths) + 2 * len(lengths)
    parts = [
        (at, draw(heads, n, dims[0], apart=apart), draw(heads, n, dims[1]))
        for at, n in zip(starts, lengths, strict=True)
    ]
    keys, values = (torch.full((heads, end, d), draw.fill).to(draw.device, draw.dtype) for d in dims)
    return parts, keys, values, draw.rope(end, width, form), form


def correction(
    draw: Draw, lengths: Sequence[int], n: int, heads: int = 2, dim: int = 64, width: int = 64,
    params: CorrectionParams = SHIFT, has_prior: bool = False, form: Rotary = HALVES,
) -> Args:  # fmt: skip
    """Chunks with two free positions after each; n of their tokens are recomputed."""
    starts = [sum(k + 2 for k in lengths[:i]) for i in range(len(lengths) + 1)]
    chunks = [list(range(s, s + k)) for s, k in zip(starts, lengths, strict=False)]
    keys, values = (draw(heads, starts[-1], dim) for _ in "kv")
    inside = [t for chunk in chunks for t in chunk]
    order = torch.randperm(len(inside), generator=draw.generator).tolist()
    at = sorted(inside[i] for i in order[:n])
    for part in (keys, values):
        part[:, sorted(set(range(starts[-1])) - set(inside))] = draw.fill
    here = [[t for t in chunk if t in at] for chunk in chunks]
    rest = [[t for t in chunk if t not in at] for chunk in chunks]
    fresh = RecomputedTokens(
        draw(2 * len(at) + 1, heads, dim).transpose(0, 1), draw(heads, 2 * len(at) + 1, dim),
        2 * torch.arange(len(at)) + 1, torch.tensor(at, dtype=torch.long), [len(x) for x in here],
        torch.tensor([t for x in rest for t in x], dtype=torch.long), [len(x) for x in rest],
        [0.9, 0.3, 0.6][: len(lengths)],
    )  # fmt: skip
    weights, constant = (torch.randn(heads, *s, 2 * dim, generator=draw.generator) for s in ((2 * dim,), ()))
    prior = Prior(weights / (8 * dim) ** 0.5, constant) if has_prior else None
    return keys, values, fresh, draw.rope(starts[-1], width, form), form, params, prior


def linear(draw: Draw, rows: int, outs: int, depth: int, bias: bool = True, apart: int = 0) -> Args:
    x = draw(rows, depth, apart=apart)
    weight = draw(outs, depth, apart=apart)
    return x, weight, draw(outs) if bias else None


def packed(draw: Draw, outs: int, depth: int, kind: str) -> PackedMatrix:
    """Random codes whose scales are powers of two, so that every weight is one of bf16."""
    form = KINDS[kind]
    heads = 1 + KINDS[kind].has_min
    n = -(-outs // STRIP) * (depth // form.inputs)
    generator = draw.generator
    scales = 2.0 ** torch.randint(-8, -6, (n, STRIP * heads), generator=generator)
    small = 2 ** torch.randint(3, (n, STRIP * form.n_small), generator=generator)
    rest = form.strip_bytes - STRIP * (2 * heads + form.n_small)
    codes = torch.randint(256, (n, rest), generator=generator)
    parts = scales.half().view(torch.uint8), small.to(torch.uint8), codes.to(torch.uint8)
    return PackedMatrix(kind, (outs, depth), draw.dtype, torch.cat(parts, dim=1).flatten())


def packed_linear(
    draw: Draw, rows: int, outs: int, depth: int, kind: str = "Q4_K", bias: bool = True, apart: int = 0
) -> Args:
    x = draw(rows, depth, apart=apart)
    return x, packed(draw, outs, depth, kind), draw(outs) if bias else None


def take(draw: Draw, rows: int, outs: int, depth: int, kind: str = "Q4_K") -> Args:
    return packed(draw, outs, depth, kind), torch.randint(outs, (rows,), generator=draw.generator)


def norm(draw: Draw, rows: int, dim: int, form: int = 0, adds: bool = True, apart: int = 0) -> Args:
    x = draw(rows, dim, apart=apart, scale=3)
    add = draw(rows, dim, apart=apart, scale=3)
    weight = draw(dim)
    shape = NORM_FORMS[form]
    own = partial(shape.normed, weight=weight, eps=1e-5)
    return x, add if adds else None, Norm(own, weight, 1e-5, shape)


def gate(draw: Draw, rows: int, width: int, activation: Activation = F.silu, apart: int = 0) -> Args:
    gate = draw(rows, width, apart=apart, scale=9)
    up = draw(rows, width, apart=apart)
    gate[:, ::5] *= 20  # to where the exponential overflows
    return gate, up, activation


CASES: dict[str, Callable[..., Args]] = {  # by operation
    "attend": attention,
    "attend_with_scores": attention,
    "attend_at": attention_at,
    "attend_chunks": attention_chunks,
    "rotate": rotation,
    "place": placement,
    "linear": linear,
    "packed_linear": packed_linear,
    "take": take,
    "correct": correction,
    "add_norm": norm,
    "gated_activation": gate,
}

# Shapes of published models, where the sizes of synthetic ones hide what a kernel cannot do

_ROWS = (1, 8, 9, 33)
# query heads per kv head; dims
_HEADS = (
    (1, 64),
    (2, 80),
    (3, 64),
    (4, 128),
    (5, 96),
    (6, 192),
    (7, 64),
    (8, 256),
)
_OUTS_OF_INPUTS = (  # hidden and inner sizes that are no multiples of 64, and odd vocabularies in front and behind
    *((960, 600), (32_001, 120), (600, 1_000), (577, 90), (90, 577)),
    *((2_560, 80), (49_153, 80), (80, 1_001), (1_001, 1_152)),
)
_PLACES = (  # dims of a key, rotated ones, dims of a value: whole heads, parts, and the latents of all heads
    *(
        (64, 64, 64),
        (96, 96, 96),
        (128, 32, 128),
        (64, 64, 512),
        (80, 80, 80),
        (256, 128, 256),
        (192, 64, 128),
    ),
)
REAL: dict[str, list[dict[str, Any]]] = {  # by operation, in an order in which neighbours differ in one thing
    "attend": [
        {"at": range(300 - n * step, 300, step), "group": group, "dim": dim, "window": window}
        for group, dim in _HEADS
        for n, step, window in ((1, 1, None), (9, 1, None), (33, 3, None), (33, 3, 100))
    ],
    "attend_with_scores": [
        {"at": range(200 - n, 200), "group": group, "dim": dim, "absent": 0.3}
        for group, dim in _HEADS
        for n in (1, 33)
    ],
    "attend_at": [{"at": [299], "group": group, "dim": dim} for group, dim in _HEADS],
    "attend_chunks": [
        {"lengths": lengths, "prefix": 9, "group": group, "dim": dim}
        for group, dim in _HEADS
        for lengths in ((33,), (1, 9, 33))
    ],
    "rotate": [
        {"n": n, "heads": group, "dim": dim, "width": width}
        for (group, _), (dim, width, _) in zip(_HEADS, _PLACES, strict=False)
        for n in (1, 33)
    ],
    "place": [
        {"lengths": lengths, "heads": group, "dim": dim, "width": width, "value_dim": value_dim}
        for (group, _), (dim, width, value_dim) in zip(_HEADS, _PLACES, strict=False)
        for lengths in ((33,), (1, 9, 33))
    ],
    "linear": [
        {"rows": n, "outs": outs, "depth": depth, "bias": outs < 1_000}
        for n in _ROWS
        for outs, depth in _OUTS_OF_INPUTS
    ],
    "packed_linear": [
        {"rows": n, "outs": outs, "depth": depth, "kind": kind}
        for n in _ROWS
        for outs, depth, kind in ((600, 960, "Q8_0"), (49_154, 256, "Q4_K"), (1_002, 1_280, "Q6_K"))
    ],
    "take": [{"rows": n, "outs": 600, "depth": 768, "kind": kind} for n in _ROWS for kind in KINDS],
    "correct": [
        {"lengths": (70, 33), "n": n, "heads": group, "dim": dim, "width": min(dim, width), "params": params}
        for (group, _), (dim, width, value_dim) in zip(_HEADS, _PLACES, strict=False)
        for n, params in ((9, SHIFT), (33, RIDGE))
        if value_dim == dim
    ],
    "add_norm": [{"rows": n, "dim": dim} for dim in (90, 577, 600, 960, 1_152) for n in (1, 33)],
    "gated_activation": [
        {"rows": n, "width": width, "activation": activation}
        for width in (90, 577, 1_000, 2_560)
        for n in (1, 9, 33)
        for activation in (F.silu, gelu_tanh)
    ],
}
