"""A lower bound of a prefill's time on this machine, from counted work and measured rates.

    linear      2 * rows * weights               FLOPs of a layer's matmuls: a multiplication and an addition a weight
    attention   4 * H * D * sum of keys seen     FLOPs of two matmuls; the row at i sees min(i + 1, window) keys
    load        2 * K * D * bytes of the dtype   bytes of every stored token and layer, read once and written once

    seconds  =  (linear + attention) / FLOP rate  +  load / copy rate

Softmax, norms, rotation and correction count nothing, and nothing overlaps. Rates are the best of the same run, of one
large matmul and one large copy. In the last layer only the row whose logits are read goes past the projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from blendserve.blend.policies import make_policy
from blendserve.config import BlendConfig
from blendserve.core import BlendReport
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

    @classmethod
    def of(cls, decoder: DecoderModel) -> Counts | None:
        """None for mixtures of experts, whose work depends on the tokens, and for layers that differ in shape."""
        if decoder.has_experts or not decoder.has_equal_layers or len(set(decoder.query_heads)) > 1:
            return None
        model = cast(Any, decoder.reference)
        linear = {n: m for n, m in model.model.layers[0].named_modules() if isinstance(m, nn.Linear)}
        sizes = {name: module.weight.numel() for name, module in linear.items()}
        project = sum(n for name, n in sizes.items() if name.rpartition(".")[2] in PROJECTIONS)
        width = decoder.qkv_sizes(0)[0]
        windows = tuple(spec.window for spec in decoder.specs)
        return cls(project, sum(sizes.values()) - project, model.lm_head.weight.numel(), width, windows)


class Flops(NamedTuple):
    """The operations and bytes of one prefill."""

    linear: float  # FLOPs
    attention: float  # FLOPs
    loaded: float  # bytes


Rows = tuple[int, int, Tensor, int]
"""layer, rows projected, positions [S] of the rows that attend, rows that run through the rest of the layer"""


class Rates(NamedTuple):
    """Per second."""

    flops: float  # of matmuls in the model's dtype
    bytes: float  # copied: each is read once and written once


def bound_s(work: Flops, rates: Rates) -> float:
    """The least seconds of the work at these rates."""
    return (work.linear + work.attention) / rates.flops + work.loaded / rates.bytes


def work_of(counts: Counts, rows: Iterable[Rows], loaded: float) -> Flops:
    """FLOPs of these rows and of one row of logits."""
    linear = 2.0 * counts.head
    attention = 0.0
    for l, projected, positions, finished in rows:
        window = counts.windows[l]
        seen = positions + 1 if window is None else (positions + 1).clamp(max=window)
        linear += 2.0 * (projected * counts.project + finished * counts.finish)
        attention += 4.0 * counts.attention_width * float(seen.sum())
    return Flops(linear, attention, loaded)


def prefill_work(counts: Counts, report: BlendReport, recomputed: Tensor, blend: BlendConfig) -> Flops:
    """All of one prefill without missing chunks, selection included.

    recomputed: ascending positions that the policy chose. Several check layers are counted as if
    all but the choice were dropped at the first: still a lower bound.
    """
    return work_of(counts, _rows(len(counts.windows), report, recomputed, blend), report.bytes_loaded)


def _rows(n_layers: int, report: BlendReport, recomputed: Tensor, blend: BlendConfig) -> Iterator[Rows]:
    """Tokens are [ exact | reusable | fresh ]."""
    exact = report.tokens_exact
    last = n_layers - 1
    n_reusable = report.tokens_reused + report.tokens_recomputed
    ends = pairwise((exact, exact + n_reusable, report.tokens_prompt))
    reusable, fresh = (torch.arange(*pair) for pair in ends)
    active = torch.cat([fresh, recomputed]).sort().values
    first = 0
    if 0 < len(recomputed) < n_reusable:
        policy = make_policy(blend)
        if policy.needs_scoring_pass:  # suffix rows in every layer; nothing reads the last one's output
            yield from ((l, len(fresh), fresh, len(fresh) if l < last else 0) for l in range(n_layers))
        if policy.check_layers:  # all rows up to the check layer's projection, the chosen ones from there on
            dense = torch.cat([reusable, fresh])
            first = min(policy.check_layers)
            yield from ((l, len(dense), dense, len(dense)) for l in range(first))
            yield first, len(dense) - len(active), active[:0], 0
    yield from ((l, len(active), active, len(active)) for l in range(first, last))
    yield last, len(active), active[-1:], 1


def measure_rates(
    dtype: torch.dtype, device: torch.device, sides: tuple[int, ...] = SIDES, copied: int = COPIED
) -> Rates:
    """The best of a few tries: other work on the machine only slows them down."""

    def seconds(call: Callable[[], object]) -> float:
        call()
        found = []
        for _ in range(TRIES):
            clock = Clock(device)
            call()
            found.append(clock.elapsed())
        return min(found)

    def flops(n: int) -> float:
        a, b, out = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
        return 2.0 * n**3 / seconds(lambda: torch.mm(a, b, out=out))

    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return Rates(max(map(flops, sides)), copied / seconds(lambda: target.copy_(source)))
