"""Is blending worth it here? A cost model of this machine and model, and the choice it makes for `method="auto"`.

    seconds = base + rows * a + pairs * b + loaded * c      per policy pass and prefill

rows: token rows run through the layers; pairs: (row, key) pairs attended; loaded: tokens read, rotated and placed. The
four constants are fitted once per machine, model and thread count from a few timed prefills of random tokens, and kept
in the user's cache folder. CacheBlend's controller (arXiv 2405.16444, section 5) chooses a ratio from the same kind of
model; we choose the method, as a short or mostly missing prompt is faster to prefill than to blend.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import nnls

from blendserve.blend.assemble import Layout, lay_out
from blendserve.blend.prefill import prefill
from blendserve.blend.select import budget
from blendserve.config import BlendConfig, Method
from blendserve.core import Chunk, ChunkKV, Prompt, TokenIds
from blendserve.models.adapter import Adapter
from blendserve.store.memory import MemoryChunk

VERSION = 5  # of what is measured; raise it when prefill's speed changes much
EXACT_FAVOUR = 0.95  # an exact method wins unless blending is at least 5% faster


@dataclass(frozen=True, slots=True)
class Work:
    """What a prefill does, as the model counts it."""

    passes: int
    rows: float
    pairs: float
    loaded: float

    def row(self) -> list[float]:
        return [float(self.passes), self.rows, self.pairs, self.loaded]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds per unit of work."""

    per_pass: float
    per_row: float
    per_pair: float
    per_loaded: float

    def seconds(self, work: Work) -> float:
        return float(np.dot(list(asdict(self).values()), work.row()))


def work_of(layout: Layout, blend: BlendConfig, n_layers: int) -> Work:
    """The work of prefilling this layout with this policy and ratio."""
    positions = torch.arange(
        1, layout.n_tokens + 1, dtype=torch.float64
    )  # keys that a row at each position sees
    rows, pairs, passes = float(layout.fresh.sum()), float(positions[layout.fresh].sum()), 1
    n_reusable = int(layout.reusable.sum())
    chosen = {"none": 0, "all": n_reusable}.get(blend.policy, budget(layout, blend.share))
    if n_reusable:
        mean = float(positions[layout.reusable].mean())
        rows, pairs = rows + chosen, pairs + chosen * mean
        if blend.policy == "query" and 0 < chosen < n_reusable:
            rows, pairs, passes = rows + layout.n_suffix, pairs + layout.n_suffix * layout.n_tokens, 2
        if blend.policy == "deviation" and chosen:
            dense = min(1.0, max(blend.check_layers) / n_layers) * (n_reusable - chosen)
            rows, pairs = rows + dense, pairs + dense * mean
    return Work(passes, rows, pairs, sum(len(piece.span) for piece in layout.pieces))


def choose(
    model: CostModel, layouts: dict[Method, Layout], blend: BlendConfig, n_layers: int
) -> tuple[Method, str]:
    """The cheapest of full, prefix and blend, and why; exact methods are favoured a little."""
    cost = {method: model.seconds(work_of(layout, blend, n_layers)) for method, layout in layouts.items()}
    exact = min((m for m in cost if m != "blend"), key=lambda m: cost[m])
    if cost["blend"] < EXACT_FAVOUR * cost[exact]:
        return "blend", ""
    return exact, (
        f"{exact!r} was estimated to take {cost[exact] * 1e3:.0f} ms, blending {cost['blend'] * 1e3:.0f} ms"
    )


def calibrated(
    adapter: Adapter, fingerprint: str, folder: Path, say: Callable[[str], None], fresh: bool = False
) -> CostModel:
    """The cost model of this machine and reader: kept in `folder`, or measured (a few seconds) and kept.

    fresh: measure in any case, as one measured on a busy machine may choose badly.
    """
    about = f"{VERSION} {fingerprint} {adapter.device} {torch.get_num_threads()} {torch.__version__} {platform.node()}"
    file = folder / f"{hashlib.blake2b(about.encode(), digest_size=12).hexdigest()}.json"
    try:
        if not fresh:
            return CostModel(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        pass  # none yet, or a damaged one
    say("Measuring how fast this machine prefills and blends (once, a few seconds)")
    model = measure(adapter)
    with suppress(OSError):  # a read-only home costs a few seconds a start, not an answer
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(model)))
    return model


def measure(adapter: Adapter, repeats: int = 3) -> CostModel:
    """Fit the four constants from timed prefills of random tokens.

    Dense prompts tell what a row costs, few rows behind much stored KV what loading costs, more rows behind the same KV
    what attending costs. The least of a few tries counts: a busy machine only ever adds time.
    """
    room = min(adapter.context_limit, 2400)
    dense = [(room * share // 2400, 0) for share in (32, 128, 512, 1024)]
    behind = [
        (room * rows // 2400, room * keys // 2400) for rows, keys in ((32, 512), (32, 2048), (256, 2048))
    ]
    plain, query = BlendConfig(policy="none", correction="none"), BlendConfig(policy="query", ratio=0.15)
    works, seconds = [], []
    for rows, keys in [case for case in dense + behind if case[0] > 0]:
        prompt, layout = _case(adapter, rows, keys)
        for blend in (plain, query) if keys and rows < room // 20 else (plain,):
            works.append(work_of(layout, blend, adapter.n_layers).row())
            seconds.append(min(_timed(adapter, prompt, layout, blend) for _ in range(repeats)))
    took = np.array(seconds)
    constants, _ = nnls(
        np.array(works) / took[:, None], np.ones(len(took))
    )  # relative error; none below zero
    return CostModel(*map(float, constants))


def _case(adapter: Adapter, n_suffix: int, n_stored: int) -> tuple[Prompt, Layout]:
    """A prompt of random tokens; what is stored of it is noise, as speed does not depend on values."""
    rng = np.random.default_rng(0)

    def draw(n: int) -> TokenIds:
        return tuple(rng.integers(adapter.vocab_size, size=n).tolist())

    def noise(n: int) -> MemoryChunk:
        shape = (adapter.n_layers, adapter.n_kv_heads, n, adapter.head_dim)
        keys, values = (torch.randn(shape, dtype=adapter.dtype, device=adapter.device) for _ in range(2))
        return MemoryChunk(ChunkKV(keys, values))

    sizes = [n_stored // 4] * 4 if n_stored >= 4 else []
    prompt = Prompt(draw(4), tuple(Chunk(draw(n)) for n in sizes), draw(n_suffix))
    prefix = noise(4) if sizes else None
    return prompt, lay_out(prompt, prefix, [noise(n) for n in sizes], behind_prefix=True)


def _timed(adapter: Adapter, prompt: Prompt, layout: Layout, blend: BlendConfig) -> float:
    start = time.perf_counter()
    float(prefill(adapter, prompt, layout, blend).logits[0])  # reading a number waits for the device
    return time.perf_counter() - start
