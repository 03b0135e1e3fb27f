"""Classes of shapes on a CPU that may have different fastest backends, and the calls that are timed for each.

One backend serves a whole class, and native backends give a row the same bits whatever the other rows. So a class
decides which results are equal to the bit. Contiguous rows are one class: a prompt's first chunk has the same KV,
computed alone or as a part of the prompt. Up to FEW rows of a linear layer are one, the steps of one answer and of
several; all larger numbers of rows are another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from blendserve.kernels import cases
from blendserve.kernels.autotune import Calls
from blendserve.kernels.cases import Draw
from blendserve.kernels.cpu.bindings import FEW
from blendserve.kernels.rows import AttentionPlan
from blendserve.kernels.types import AttentionSpec

KEYS, WINDOW = 512, 128
SUFFIX, WHOLE, SCATTERED = 32, 256, 128  # rows that are timed
LINEAR_ROWS = {True: (1, 4), False: (32, 256)}  # by whether they are few
CACHE_BYTES = 2**24  # of weights for few rows: more than a core's cache, as in a model
MULTIPLICATIONS = 3e8  # of a linear layer: a larger one is timed by a part of its outputs
ROWS = {
    "one": ([KEYS - 1],),
    "contiguous": (range(KEYS - SUFFIX, KEYS), range(WHOLE)),
    "scattered": (range(KEYS - 3 * SCATTERED + 2, KEYS, 3),),
    "scored": (range(KEYS - SUFFIX, KEYS),),
}


class AttentionClass(NamedTuple):
    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    windowed: bool
    softcapped: bool
    rows: str  # of ROWS

    def __str__(self) -> str:
        more = (", window" if self.windowed else "") + (", softcap" if self.softcapped else "")
        heads = f"{self.heads} heads of {self.dim} over {self.kv_heads}"
        rows = " | ".join(str(len(at)) for at in ROWS[self.rows])
        return f"{_name(self.dtype)}, {heads}{more}, {self.rows} rows ({rows})"


class LinearClass(NamedTuple):
    dtype: torch.dtype
    outputs: int
    inputs: int
    is_few: bool

    def __str__(self) -> str:
        rows = f"1 to {FEW} rows" if self.is_few else f"over {FEW} rows"
        timed = " | ".join(map(str, LINEAR_ROWS[self.is_few]))
        return f"{_name(self.dtype)}, {self.inputs} to {self.outputs}, {rows} ({timed})"


def attention_class(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan
) -> AttentionClass | None:
    rows = "one" if q.shape[1] == 1 else "contiguous" if plan.is_contiguous else "scattered"
    return _attention_class(q, keys, spec, rows)


def scores_class(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan
) -> AttentionClass | None:
    return _attention_class(q, keys, spec, "scored")


def _attention_class(q: Tensor, keys: Tensor, spec: AttentionSpec, rows: str) -> AttentionClass | None:
    if q.device.type != "cpu":
        return None
    marks = spec.window is not None, spec.softcap is not None
    return AttentionClass(q.dtype, q.shape[0], keys.shape[0], q.shape[2], *marks, rows)


def attention_calls(found: AttentionClass) -> Calls:
    """One call a sample; of rows that are scored, a third of the keys are masked."""
    options: dict[str, Any] = {
        "n_kv": found.kv_heads,
        "group": found.heads // found.kv_heads,
        "dim": found.dim,
        "window": WINDOW if found.windowed else None,
        "softcap": 20.0 if found.softcapped else None,
        "absent": 1 / 3 if found.rows == "scored" else None,
    }
    return [[cases.attention(Draw(found.dtype, fill=0.0), at, **options)] for at in ROWS[found.rows]]


def linear_class(x: Tensor, weight: Tensor, bias: Tensor | None) -> LinearClass | None:
    """None but for bf16: other dtypes have torch's backend alone."""
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.device.type != "cpu":
        return None
    return LinearClass(x.dtype, weight.shape[0], weight.shape[1], x.shape[0] <= FEW)


def linear_calls(found: LinearClass) -> Calls:
    """Few rows through as many layers as no cache holds, many rows through one."""
    rows, outputs, layers = LINEAR_ROWS[found.is_few], found.outputs, 1
    if found.is_few:
        layers = max(1, CACHE_BYTES // (2 * outputs * found.inputs))
    else:
        outputs = min(outputs, max(FEW, int(MULTIPLICATIONS / (rows[-1] * found.inputs)) // 2 * 2))
    weights = torch.full(
        (layers, outputs, found.inputs), 0.5, dtype=found.dtype
    )  # time does not depend on values
    inputs = [torch.full((n, found.inputs), 0.5, dtype=found.dtype) for n in rows]
    return [[(x, weight, None) for weight in weights] for x in inputs]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
