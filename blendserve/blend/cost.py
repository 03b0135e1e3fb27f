"""Is blending worth it here, and how much of it? A cost model of this machine and model, and what it decides.

`method="auto"`: the cheapest of full prefill, prefix caching and blending.

    seconds = base + rows * a + pairs * b + loaded * c      per policy pass and prefill

rows: token rows run through the layers; pairs: (row, key) pairs attended; loaded: tokens read, rotated and placed. The
four constants are fitted once per machine, model and thread count from a few timed prefills of random tokens, and kept
in the user's cache folder. CacheBlend's controller (arXiv 2405.16444, section 5) chooses a ratio from the same kind of
model; we choose the method, too, as a short or mostly missing prompt is faster to prefill than to blend.

`ratio="auto"`: recompute for free what can be recomputed while KV is still loading, as that controller does. With the
store and the machine as they were measured, the ratio is raised until recomputing takes nearly as long as loading. It
never falls below the floor set for quality, and stays there for a policy with a scoring pass: that needs every layer
before anything can be chosen, so it is all that loading can hide behind, and rows recomputed afterwards are not free.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from blendserve.blend.layout import Layout, lay_out
from blendserve.blend.policies.base import make_policy
from blendserve.blend.prefill import blend_prefill
from blendserve.blend.work import Work, rows_work, work_of
from blendserve.config import BlendConfig, Method
from blendserve.core import Chunk, ChunkKV, Prompt, TokenIds, run
from blendserve.kernels.race_times import machine
from blendserve.models.model import DecoderModel
from blendserve.registry import POLICIES, REUSE
from blendserve.store.view import TensorView

VERSION = 5  # of what is measured; raise it when prefill's speed changes much
MIN_SPEEDUP = 0.95  # an exact method wins unless blending is at least 5% faster
OVERLAP_TARGET = 0.8  # share of loading to fill; layer 0 overlaps with nothing, and estimates err by a fifth


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds per unit of work."""

    per_pass: float
    per_row: float
    per_pair: float
    per_loaded: float

    def seconds(self, work: Work) -> float:
        return float(np.dot(list(asdict(self).values()), work.row()))


def choose(
    model: CostModel, layouts: dict[Method, Layout], blend: BlendConfig, n_layers: int
) -> tuple[Method, str]:
    """The cheapest of full, prefix and blend, and why; exact methods are favoured a little."""
    cost = estimates(model, layouts, blend, n_layers)
    exact = min((m for m in cost if m != "blend"), key=lambda m: cost[m])
    if cost["blend"] < MIN_SPEEDUP * cost[exact]:
        return "blend", ""
    return exact, (
        f"{exact!r} was estimated to take {cost[exact] * 1e3:.0f} ms, blending {cost['blend'] * 1e3:.0f} ms"
    )


def estimates(
    model: CostModel, layouts: dict[Method, Layout], blend: BlendConfig, n_layers: int
) -> dict[Method, float]:
    """Seconds that each method is expected to take."""
    policy = make_policy(blend)
    return {method: model.seconds(work_of(layout, policy, n_layers)) for method, layout in layouts.items()}


def overlapped_ratio(
    costs: CostModel, layout: Layout, blend: BlendConfig, seconds_per_token: float | None
) -> float:
    """The largest ratio whose recomputation hides behind loading; the floor while no load has been measured.

    Also the floor for a policy with a scoring pass, see above.
    """
    policy = make_policy(blend)
    n_reusable = int(layout.reusable.sum())
    highest = (n_reusable - 1) / max(1, layout.n_found)  # with all of them there would be nothing to choose
    if seconds_per_token is None or highest <= blend.min_ratio or policy.needs_scoring_pass:
        return blend.min_ratio

    def compute(ratio: float) -> float:  # a rule's dense layers hide no more than their own layers' loading
        return costs.seconds(replace(rows_work(layout, layout.budget(ratio)), loaded=0.0))

    loading = OVERLAP_TARGET * seconds_per_token * layout.n_loaded
    least, most = compute(blend.min_ratio), compute(highest)
    room = (loading - least) / (most - least) if most > least else 0.0  # work grows in proportion to the rows
    return blend.min_ratio + min(1.0, max(0.0, room)) * (highest - blend.min_ratio)


def calibrated(
    adapter: DecoderModel, fingerprint: str, folder: Path, say: Callable[[str], None], fresh: bool = False
) -> CostModel:
    """The cost model of this machine and reader: kept in `folder`, or measured (a few seconds) and kept.

    fresh: measure in any case, as one measured on a busy machine may choose badly.
    """
    about = f"{VERSION} {fingerprint} {adapter.device} {machine()} {platform.node()}"
    file = folder / f"{hashlib.blake2b(about.encode(), digest_size=12).hexdigest()}.json"
    try:
        if not fresh:
            return CostModel(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        pass  # none yet, or a damaged one
    say("Measuring the prefill and blending speed of this machine (once, a few seconds)")
    model = measure(adapter)
    with suppress(OSError):  # a read-only home costs a few seconds a start, not an answer
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(model)))
    return model


def measure(
    adapter: DecoderModel, repeats: int = 3, clock: Callable[[], float] = time.perf_counter
) -> CostModel:
    """Fit the four constants from timed prefills of random tokens.

    Dense prompts tell what a row costs, few rows behind much stored KV what loading costs, more rows behind the same KV
    what attending costs. The least of a few tries counts: a busy machine only ever adds time. Each case has its tries in
    turns with the others, so that a slow second falls on one try of each.
    """
    room = min(adapter.context_limit, 2400)
    dense = [(room * share // 2400, 0) for share in (32, 128, 512, 1024)]
    behind = [
        (room * rows // 2400, room * keys // 2400) for rows, keys in ((32, 512), (32, 2048), (256, 2048))
    ]
    cases = [case for case in dense + behind if case[0] > 0]
    rounds = [
        [part for case in cases for part in _timed(adapter, *case, room, clock)] for _ in range(repeats)
    ]
    works = [work for work, _ in rounds[0]]
    took = np.min([[seconds for _, seconds in parts] for parts in rounds], axis=0)
    constants = nonnegative_least_squares(
        np.array(works) / took[:, None], np.ones(len(took))
    )  # relative error
    return CostModel(*map(float, constants))


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x >= 0 [n] with the least |a x - b|, a [m, n], b [m]: tries every set of columns, so n is small.

    The solution is the unconstrained one over some set of columns, with zeros elsewhere (Lawson and Hanson, 1974).
    """
    m, n = a.shape
    best, least = np.zeros(n), float(b @ b)
    for size in range(1, min(m, n) + 1):
        for columns in map(list, combinations(range(n), size)):
            x = np.linalg.lstsq(a[:, columns], b, rcond=None)[0]
            error = float(np.square(a[:, columns] @ x - b).sum())
            if error < least and (x >= 0).all():
                best, least = np.zeros(n), error
                best[columns] = x
    return best


def synthetic_prompt(adapter: DecoderModel, n_suffix: int, n_stored: int) -> tuple[Prompt, Layout]:
    """A prompt of random tokens; what is stored of it is noise, as speed does not depend on values."""
    rng = np.random.default_rng(0)

    def draw(n: int) -> TokenIds:
        return tuple(rng.integers(adapter.vocab_size, size=n).tolist())

    def noise(n: int) -> TensorView:
        shape = (adapter.n_layers, adapter.n_kv_heads, n, adapter.head_dim)
        # One head's, for all layers: drawing takes longer than all else.
        one = torch.randn(shape[2:], dtype=adapter.dtype, device=adapter.device)
        keys, values = (one.expand(shape).contiguous() for _ in range(2))
        return TensorView(ChunkKV(keys, values))

    sizes = [n_stored // 4] * 4 if n_stored >= 4 else []
    prompt = Prompt(draw(4), tuple(Chunk(draw(n)) for n in sizes), draw(n_suffix))
    prefix = noise(4) if sizes else None
    return prompt, lay_out(prompt, prefix, [noise(n) for n in sizes], behind_prefix=True)


def _timed(
    adapter: DecoderModel, rows: int, keys: int, room: int, clock: Callable[[], float]
) -> Iterator[tuple[list[float], float]]:
    """Work and seconds of a case: without choosing, and with it where few rows stand behind much."""
    prompt, layout = synthetic_prompt(adapter, rows, keys)
    plain, scored = BlendConfig(**REUSE), BlendConfig(policy=POLICIES.default, ratio=0.15)
    for blend in (plain, scored) if keys and rows < room // 20 else (plain,):
        start = clock()
        float(
            run(blend_prefill(adapter, prompt, layout, blend)).logits[0]
        )  # reading a number waits for the device
        yield work_of(layout, make_policy(blend), adapter.n_layers).row(), clock() - start
