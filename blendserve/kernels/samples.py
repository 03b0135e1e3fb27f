"""Classes of shapes on a CPU that may have different fastest backends, and work of each class to find out by.

`..._class` tells a call's class: None where nothing is measured. `..._samples` makes the samples of that class, each a
few calls, whatever the numbers in the call at hand.

Which shapes one class holds decides what is promised of bits, as one backend serves all of it and the compiled ones give
a row the same bits whatever comes with it. Rows side by side are one class: a prompt's first chunk, computed alone or
as a part of the whole, has the same KV. So are up to FEW rows of a linear layer, steps of one answer and of several at
once, and so are all larger numbers of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blendserve.kernels.cpu.linear import FEW
from blendserve.kernels.rotary import HALVES, Rotary
from blendserve.kernels.rows import RowPlan, plan_rows
from blendserve.kernels.types import AttentionSpec, CorrectionParams, Prior, RecomputedTokens, Rope

Attention = tuple[Tensor, Tensor, Tensor, AttentionSpec, RowPlan]
Linear = tuple[Tensor, Tensor, Tensor | None]
Correction = tuple[Tensor, Tensor, RecomputedTokens, Rope, Rotary, CorrectionParams, Prior | None]

KEYS, WINDOW = 512, 128
QUESTION, WHOLE, APART = 32, 256, 128  # rows that are tried
TRIED = {True: (1, 4), False: (32, 256)}  # rows, by whether they are few
CACHES = 2**24  # bytes of weights for few rows: more than a core keeps, as in a model
WORK = 3e8  # multiplications: a larger layer is tried by a part of its outputs
CHUNK = 256  # tokens

ONE = f"1 row over {KEYS} keys"
TOGETHER = f"rows side by side ({QUESTION} behind {KEYS - QUESTION} | {WHOLE} alone)"
ANYWHERE = f"rows apart ({APART} over {KEYS} keys)"
SCORED = f"a question ({QUESTION} over {KEYS} keys)"
LINEAR_ROWS = {
    True: f"1 to {FEW} rows ({TRIED[True][0]} | {TRIED[True][1]})",
    False: f"more rows ({TRIED[False][0]} | {TRIED[False][1]})",
}


class AttentionClass(NamedTuple):
    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    windowed: bool
    softcapped: bool
    rows: str

    def __str__(self) -> str:
        more = (", window" if self.windowed else "") + (", softcap" if self.softcapped else "")
        heads = f"{self.heads} heads of {self.dim} over {self.kv_heads}"
        return f"{_word(self.dtype)}, {heads}{more}, {self.rows}"


class LinearClass(NamedTuple):
    dtype: torch.dtype
    outs: int
    depth: int
    is_few: bool

    def __str__(self) -> str:
        return f"{_word(self.dtype)}, {self.depth} to {self.outs}, {LINEAR_ROWS[self.is_few]}"


class CorrectionClass(NamedTuple):
    dtype: torch.dtype
    kv_heads: int
    dim: int
    rotated: int
    is_halves: bool
    is_fitted: bool

    def __str__(self) -> str:
        form = "halves" if self.is_halves else "other"
        kind = "fitted" if self.is_fitted else "by means"
        return f"{_word(self.dtype)}, {self.kv_heads} heads of {self.dim}, {self.rotated} rotated as {form}, {kind}"


Class = AttentionClass | LinearClass | CorrectionClass


def attention_class(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan
) -> AttentionClass | None:
    """By heads, window and softcap, and whether the rows are one, side by side or apart."""
    rows = ONE if q.shape[1] == 1 else TOGETHER if plan.dense else ANYWHERE
    return _attention_class(q, keys, spec, rows)


def scores_class(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan
) -> AttentionClass | None:
    return _attention_class(q, keys, spec, SCORED)


def _attention_class(q: Tensor, keys: Tensor, spec: AttentionSpec, rows: str) -> AttentionClass | None:
    if q.device.type != "cpu":
        return None
    marks = spec.window is not None, spec.softcap is not None
    return AttentionClass(q.dtype, q.shape[0], keys.shape[0], q.shape[2], *marks, rows)


def attention_samples(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan
) -> list[list[Attention]]:
    if q.shape[1] == 1:
        rows = [torch.tensor([KEYS - 1])]
    elif plan.dense:
        rows = [torch.arange(KEYS - QUESTION, KEYS), torch.arange(WHOLE)]
    else:
        rows = [torch.arange(KEYS - 3 * APART + 2, KEYS, 3)]
    return [[_attention(q, keys, spec, at)] for at in rows]


def scores_samples(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan
) -> list[list[Attention]]:
    """A question behind keys of which a third are nobody's."""
    absent = torch.arange(KEYS) % 3 == 1
    absent[-QUESTION:] = False
    return [[_attention(q, keys, spec, torch.arange(KEYS - QUESTION, KEYS), absent)]]


def _attention(
    q: Tensor, keys: Tensor, spec: AttentionSpec, at: Tensor, absent: Tensor | None = None
) -> Attention:
    n_heads, dim, n_kv = q.shape[0], q.shape[2], keys.shape[0]
    spec = AttentionSpec(spec.scale, spec.window and WINDOW, spec.softcap)
    rows, kv = _noise((n_heads, len(at), dim), q.dtype), _noise((2, n_kv, KEYS, dim), keys.dtype)
    return rows, kv[0], kv[1], spec, plan_rows(at, n_heads // n_kv, spec.window, absent=absent)


def linear_class(x: Tensor, weight: Tensor, bias: Tensor | None) -> LinearClass | None:
    """By the layer's size, and whether rows are few. Only bf16 is not torch's own alone."""
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.device.type != "cpu" or torch.is_grad_enabled():
        return None
    return LinearClass(x.dtype, weight.shape[0], weight.shape[1], x.shape[0] <= FEW)


def linear_samples(x: Tensor, weight: Tensor, bias: Tensor | None) -> list[list[Linear]]:
    """Few rows through as many layers as no cache holds, many through one."""
    (outs, depth), is_few = weight.shape, x.shape[0] <= FEW
    if is_few:
        n = max(1, CACHES // max(1, weight.nbytes))
    else:
        n, outs = 1, min(outs, max(FEW, int(WORK / (TRIED[is_few][-1] * depth)) // 2 * 2))
    layers = torch.full((n, outs, depth), 0.5, dtype=weight.dtype)  # speed does not depend on values
    some = [torch.full((rows, depth), 0.5, dtype=x.dtype) for rows in TRIED[is_few]]
    return [[(rows, layer, None) for layer in layers] for rows in some]


def correction_class(
    keys: Tensor,
    values: Tensor,
    fresh: RecomputedTokens,
    rope: Rope,
    rotary: Rotary,
    params: CorrectionParams,
    prior: Prior | None = None,
) -> CorrectionClass | None:
    if keys.device.type != "cpu":
        return None
    form = rope.cos.shape[-1], rotary.form == HALVES
    return CorrectionClass(keys.dtype, keys.shape[0], keys.shape[2], *form, params.penalty is not None)


def correction_samples(
    keys: Tensor,
    values: Tensor,
    fresh: RecomputedTokens,
    rope: Rope,
    rotary: Rotary,
    params: CorrectionParams,
    prior: Prior | None = None,
) -> list[list[Correction]]:
    """Two chunks, every seventh token recomputed: what has not moved is not moved, however often it is corrected."""
    kv = _noise((2, keys.shape[0], 2 * CHUNK, keys.shape[2]), keys.dtype)
    at = torch.arange(0, 2 * CHUNK, 7)
    others = torch.tensor([i for i in range(2 * CHUNK) if i % 7])
    sizes, other_sizes = ([int((x < CHUNK).sum()), int((x >= CHUNK).sum())] for x in (at, others))
    which = torch.arange(len(at)), at, sizes, others, other_sizes, (1.0, 1.0)
    made = RecomputedTokens(kv[0][:, at], kv[1][:, at], *which)
    shape, dtype = (2 * CHUNK, rope.cos.shape[-1]), rope.cos.dtype
    unturned = Rope(torch.ones(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
    return [[(kv[0], kv[1], made, unturned, rotary, params, None)]]


def _noise(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """From a generator of its own: the process's stays where it is."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
