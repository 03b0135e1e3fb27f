"""A cost model of the prefill on this machine, fitted once from timed prefills of random tokens.

    seconds = passes * base + rows * a + pairs * b + loaded * c

passes: over the layers, the policy's scoring pass included, and a chunk's first tokens, which recurrent layers run apart;
rows: token rows run through the layers; pairs: (row, key)
pairs attended; loaded: tokens read, rotated and placed. The four constants are kept in the user's cache folder, for each
machine, model and thread count. Work is counted in closed form from the segments of a layout, without tensors.
CacheBlend's controller (arXiv 2405.16444, section 5) chooses a ratio from the same kind of model.
"""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass
from typing import NamedTuple

import numpy as np
import torch

from blendserve.blend.layout import Layout, State, lay_out
from blendserve.blend.policies import Policy, n_scoring_rows
from blendserve.blend.prefill import PrefillPlan, blend_prefill
from blendserve.config import BlendConfig
from blendserve.core import Chunk, Prompt, Span, TokenIds, run
from blendserve.kernels.autotune import machine
from blendserve.kv import ChunkKV, join_layers
from blendserve.models.model import DecoderModel
from blendserve.paths import cached_file, read_cached, write_cached
from blendserve.registry import FULL_REUSE, POLICIES
from blendserve.store.view import TensorView

log = logging.getLogger(__name__)

VERSION = 5  # of what is measured; raise it when prefill's speed changes much
MEASURE_S = 4.0  # about what a measurement may take: a slower machine is measured with shorter prompts


class Work(NamedTuple):
    """What a prefill does, as the cost model counts it."""

    passes: int
    rows: float
    pairs: float
    loaded: float


def count_work(layout: Layout, policy: Policy, n_layers: int) -> Work:
    """The work of prefilling this layout with this policy."""
    selected = policy.selection(layout).n
    passes, rows, pairs, loaded = count_rows(layout, selected)
    if policy.is_scored(layout):
        scoring = n_scoring_rows(layout)
        rows = rows + scoring
        pairs = pairs + scoring * layout.n_tokens
        passes = passes + 1
    if policy.check_layers and selected:
        dense = min(1.0, max(policy.check_layers) / n_layers) * (layout.n_reusable - selected)
        rows = rows + dense
        pairs = pairs + dense * _mean_keys(layout)
    return Work(passes, rows, pairs, loaded)


def count_rows(layout: Layout, selected: int) -> Work:
    """The work of one pass over the fresh tokens and this number of the reusable ones."""
    fresh = layout.spans(State.FRESH)
    pairs = sum(map(_keys, fresh)) + selected * _mean_keys(layout)
    n_seams = sum(segment.is_seam for segment in layout.segments)
    return Work(1 + n_seams, sum(map(len, fresh)) + selected, pairs, layout.n_loaded)


def chunk_work(n: int, context: int) -> Work:
    """The work of computing a chunk of n tokens alone behind `context` others, whose KV is there."""
    return Work(1, n, n * (context + (n + 1) / 2), 0.0)


def _keys(span: Span) -> float:
    """Keys that the rows of a span see: each those up to its own position."""
    return (span.start + 1 + span.stop) * len(span) / 2


def _mean_keys(layout: Layout) -> float:
    """Keys that a reusable token sees, on average."""
    return sum(map(_keys, layout.spans(State.REUSED))) / layout.n_reusable if layout.n_reusable else 0.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds per unit of work."""

    per_pass: float
    per_row: float
    per_pair: float
    per_loaded: float

    def seconds(self, work: Work) -> float:
        return float(np.dot(astuple(self), work))


def calibrated(model: DecoderModel, fingerprint: str, fresh: bool = False) -> CostModel:
    """The kept cost model of this machine and model, or a new one, which is measured in a few seconds.

    fresh: measure in any case, as one measured on a busy machine may choose badly.
    """
    about = f"{VERSION} {fingerprint} {model.device} {machine()} {platform.node()}"
    file = cached_file("profit", about)
    try:
        if not fresh:
            return CostModel(**json.loads(read_cached(file)))
    except (OSError, ValueError, TypeError):
        pass  # none yet, or a damaged one
    log.info("Measuring the prefill and blending speed of this machine (once, a few seconds)")
    costs = measure(model)
    write_cached(file, json.dumps(asdict(costs)))
    return costs


def _longest_prompt(model: DecoderModel, clock: Callable[[], float]) -> int:
    """Tokens of the longest prompt to measure: fewer where 32 rows say that MEASURE_S would not do.

    All tries have 200 times as many rows, which take half of the time each where they are many.
    """
    for _ in range(2):  # the first warms up
        ((_, seconds),) = _timed(model, 32, 0, 0, clock)
    return min(model.context_limit, 2400, max(100, round(2400 * MEASURE_S / (100 * seconds + 1e-9))))


def measure(
    model: DecoderModel, repeats: int = 3, clock: Callable[[], float] = time.perf_counter
) -> CostModel:
    """Fit the four constants from timed prefills of random tokens.

    Dense prompts tell what a row costs, few rows behind much stored KV what loading costs, more rows behind the same KV
    what attending costs. The least of a few tries counts: a busy machine only ever adds time. Each case has its tries in
    turns with the others, so that a slow second falls on one try of each.
    """
    room = _longest_prompt(model, clock)
    dense = [(room * share // 2400, 0) for share in (32, 128, 512, 1024)]
    behind = [
        (room * rows // 2400, room * keys // 2400) for rows, keys in ((32, 512), (32, 2048), (256, 2048))
    ]
    cases = [case for case in dense + behind if case[0] > 0]
    rounds: list[list[tuple[Work, float]]] = []
    while len(rounds) < repeats and sum(seconds for parts in rounds for _, seconds in parts) < MEASURE_S:
        rounds.append([part for case in cases for part in _timed(model, *case, room, clock)])
    works = [work for work, _ in rounds[0]]
    elapsed_s = np.min([[seconds for _, seconds in parts] for parts in rounds], axis=0)
    relative = np.array(works) / elapsed_s[:, None]  # so that the relative error is the least
    return CostModel(*map(float, nonnegative_least_squares(relative, np.ones(len(elapsed_s)))))


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """An x >= 0 [n] with a small |a x - b|, a [m, n], b [m]: least squares, again without the columns below 0."""
    x = np.zeros(a.shape[1])
    columns = np.arange(a.shape[1])
    while len(columns):
        fitted = np.linalg.lstsq(a[:, columns], b, rcond=None)[0]
        if (fitted >= 0).all():
            x[columns] = fitted
            break
        columns = columns[fitted > 0]
    return x


def synthetic_prompt(model: DecoderModel, n_suffix: int, n_stored: int) -> Layout:
    """A prompt of random tokens; what is stored of it is noise, as speed does not depend on values."""
    rng = np.random.default_rng(0)

    def draw(n: int) -> TokenIds:
        return tuple(rng.integers(model.vocab_size, size=n).tolist())

    def noise(n: int) -> TensorView:
        # One head's, for all of its width: drawing takes longer than all else.
        layers = model.chunk_layers(n)
        sizes = {(rows, d) for (_, *dims), rows in layers for d in dims}
        one = {size: torch.randn(size, dtype=model.dtype, device=model.device) for size in sizes}
        sides = [
            [one[rows, shape[i]].expand(shape.heads, -1, -1).contiguous() for shape, rows in layers]
            for i in (1, 2)
        ]
        return TensorView(ChunkKV(*map(join_layers, sides), recurrent=model.recurrent))

    sizes = [n_stored // 4] * 4 if n_stored >= 4 else []
    prompt = Prompt(draw(4), tuple(Chunk(draw(n)) for n in sizes), draw(n_suffix))
    views = {i: noise(n) for i, n in enumerate(sizes)}
    return lay_out(prompt, noise(4) if sizes else None, views).with_seams(model.seam)


def _timed(
    model: DecoderModel, rows: int, keys: int, room: int, clock: Callable[[], float]
) -> Iterator[tuple[Work, float]]:
    """Work and seconds of a case: without choosing, and with it where few rows stand behind much."""
    layout = synthetic_prompt(model, rows, keys)
    plain = BlendConfig(**FULL_REUSE)
    scored = BlendConfig(policy=POLICIES.default, ratio=0.15)
    has_choice = keys and rows < room // 20 and not model.recurrent
    for blend in (plain, scored) if has_choice else (plain,):
        start = clock()
        plan = PrefillPlan.of(layout, blend)
        logits = run(blend_prefill(model, plan)).logits
        float(logits[0])  # reading a number waits for the device
        yield count_work(layout, plan.policy, model.n_layers), clock() - start
