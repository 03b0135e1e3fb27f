"""How fast a prefill could be on this machine: a lower bound from counted work and measured rates.

    linear      2 * rows * weights               FLOPs of a layer's matmuls: a multiplication and an addition a weight
    attention   4 * H * D * sum of keys seen     FLOPs of two matmuls; the row at i sees min(i + 1, window) keys
    load        2 * K * D * bytes of the dtype   bytes of every stored token and layer, read once and written once

    seconds  =  (linear + attention) / FLOP rate  +  load / copy rate

Softmax, norms, rotation and correction are free here, and nothing overlaps. Rates are the best that the machine gave in
the same run to one large matmul and one large copy. In the last layer only the row whose logits are read goes
on past the projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from blendserve.blend.policies.base import make_policy
from blendserve.config import BlendConfig
from blendserve.core import BlendReport
from blendserve.errors import ModelUnsupported
from blendserve.models.model import DecoderModel
from blendserve.timing import Clock

SIDES = (1024, 2048)  # of square matrices; the better one counts
COPIED = 1 << 28  # bytes: far more than caches hold
TRIES = 5
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj")


@dataclass(frozen=True, slots=True)
class Counts:
    """Sizes of a model that its work follows from."""

    project: int  # weights of one layer's q, k and v projections
    finish: int  # weights of the rest of the layer's matmuls
    head: int  # weights of the matmul to the logits
    attention_width: int  # H * D
    windows: tuple[int | None, ...]  # of each layer

    @property
    def n_layers(self) -> int:
        return len(self.windows)

    @classmethod
    def of(cls, adapter: DecoderModel) -> Counts:
        """Raises ModelUnsupported for mixtures of experts, where the weights depend on the token."""
        if adapter.family.experts:
            raise ModelUnsupported("the roofline has no mixtures of experts: give a model without experts")
        model = cast(Any, adapter.reference)
        linear = {n: m for n, m in model.model.layers[0].named_modules() if isinstance(m, nn.Linear)}
        sizes = {name: module.weight.numel() for name, module in linear.items()}
        project = sum(n for name, n in sizes.items() if name.rpartition(".")[2] in PROJECTIONS)
        width, windows = adapter.n_heads * adapter.head_dim, tuple(spec.window for spec in adapter.specs)
        return cls(project, sum(sizes.values()) - project, model.lm_head.weight.numel(), width, windows)


class Work(NamedTuple):
    """Of one prefill."""

    linear: float  # FLOPs
    attention: float  # FLOPs
    loaded: float  # bytes


Rows = tuple[int, int, Tensor, int]
"""layer, rows projected, positions [S] of the rows that attend, rows that run through the rest of the layer"""


def bound_s(work: Work, rates: Rates) -> float:
    """The least seconds of the work at these rates."""
    return (work.linear + work.attention) / rates.flops + work.loaded / rates.bytes


def work_of(counts: Counts, rows: Iterable[Rows], loaded: float) -> Work:
    """FLOPs of these rows and of one row of logits."""
    linear, attention = 2.0 * counts.head, 0.0
    for l, projected, positions, finished in rows:
        window = counts.windows[l]
        seen = positions + 1 if window is None else (positions + 1).clamp(max=window)
        linear += 2.0 * (projected * counts.project + finished * counts.finish)
        attention += 4.0 * counts.attention_width * float(seen.sum())
    return Work(linear, attention, loaded)


def prefill_work(counts: Counts, report: BlendReport, recomputed: Tensor, blend: BlendConfig) -> Work:
    """All of one prefill whose chunks were either all found or not looked for, selection included.

    recomputed: ascending positions that the policy chose. Several check layers are counted as if
    all but the choice were dropped at the first: still a lower bound.
    """
    return work_of(counts, _rows(counts.n_layers, report, recomputed, blend), report.bytes_loaded)


def _rows(n_layers: int, report: BlendReport, recomputed: Tensor, blend: BlendConfig) -> Iterator[Rows]:
    """Tokens are [ exact | reusable | fresh ], as nothing was missing."""
    exact, last = report.tokens_exact, n_layers - 1
    n_reusable = report.tokens_reused + report.tokens_recomputed
    reusable, fresh = (
        torch.arange(*ends) for ends in pairwise((exact, exact + n_reusable, report.tokens_prompt))
    )
    active, first = torch.cat([fresh, recomputed]).sort().values, 0
    if 0 < len(recomputed) < n_reusable:
        policy = make_policy(blend)
        if policy.needs_scoring_pass:  # suffix rows in every layer; nothing reads the last one's output
            yield from ((l, len(fresh), fresh, len(fresh) if l < last else 0) for l in range(n_layers))
        if policy.check_layers:  # all rows up to the check layer's projection, the chosen ones from there on
            dense, first = torch.cat([reusable, fresh]), min(policy.check_layers)
            yield from ((l, len(dense), dense, len(dense)) for l in range(first))
            yield first, len(dense) - len(active), active[:0], 0
    yield from ((l, len(active), active, len(active)) for l in range(first, last))
    yield last, len(active), active[-1:], 1


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second."""

    flops: float  # of matmuls in the reader's dtype
    bytes: float  # copied: each is read once and written once


def measure_rates(
    dtype: torch.dtype, device: torch.device, sides: tuple[int, ...] = SIDES, copied: int = COPIED
) -> Rates:
    """The best of a few tries: other work on the machine only slows them down."""
    return Rates(max(_flops(n, dtype, device) for n in sides), _copied(copied, device))


def _flops(n: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty(n, n, dtype=dtype, device=device)
    return 2.0 * n**3 / _least_s(lambda: torch.mm(a, b, out=out), device)


def _copied(size: int, device: torch.device) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return size / _least_s(lambda: target.copy_(source), device)


def _least_s(call: Callable[[], object], device: torch.device) -> float:
    """Of TRIES calls, after a first one."""
    call()
    seconds = []
    for _ in range(TRIES):
        clock = Clock(device)
        call()
        seconds.append(clock.elapsed())
    return min(seconds)
