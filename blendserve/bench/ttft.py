"""`blendserve bench ttft`: one prompt by every method, to its first logits and to its first token.

Prefill is timed from token ids to first-token logits, TTFT from the text of question and passages to the first token;
both in the same run. Stages are parts of prefill and are shown as shares of TTFT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from blendserve.bench.config import TtftConfig
from blendserve.bench.figures import Figures, Update, interleaved, ratios, spread
from blendserve.bench.harness import STAGES, Harness, Run, loads, scratch
from blendserve.bench.machine import where
from blendserve.bench.memory import peak_of
from blendserve.bench.pagecache import drop
from blendserve.bench.workload import make_workload
from blendserve.config import changed
from blendserve.evaluate.methods import FULL, TRANSFORMERS
from blendserve.models.loader import load_reader

Say = Callable[[str], None]


def measure(
    config: TtftConfig, say: Say = lambda text: None, update: Update = lambda done, total: None
) -> Figures:
    """Everything that the bench prints. Raises ConfigError, InputError, ModelError, StoreError."""
    variants = config.variants
    reader = load_reader(config.reader, say)
    shape = (config.chunks, config.chunk_tokens, config.suffix_tokens)
    workload = make_workload(reader, *shape, config.seed)
    with scratch(config.folder) as folder, Harness(reader, workload, variants, folder) as contest:
        say(f"Storing the KV of {config.chunks} chunks")
        contest.precompute()
        took = interleaved({v.name: partial(contest.run, v) for v in variants}, config.repeats, update)
        methods = {v.name: figures_of(took, v.name) for v in variants}
        prompt = workload.prompt
        figures = {
            "bench": "ttft",
            **where(config, reader),
            "prompt": {
                "tokens": len(prompt),
                "prefix": len(prompt.prefix),
                "chunks": [len(chunk) for chunk in prompt.chunks],
                "suffix": len(prompt.suffix),
            },
            "methods": methods,
        }
        if config.cold:
            figures["cold"] = _cold(contest, config.repeats, say)
        if config.throttle:
            figures["throttled"] = [_throttled(contest, config, rate, say) for rate in config.throttle]
        if config.memory:
            say("Measuring memory, one process per method")
            figures["memory"] = {v.name: peak_of(config, v.name, folder) for v in variants}
    return figures


def figures_of(took: dict[str, list[Run]], name: str) -> Figures:
    """One method's figures, and its ratios to both full prefills, which are > 1 where it is faster."""
    runs = took[name]
    figures: Figures = {
        "prefill": spread([t.prefill for t in runs]),
        "ttft": spread([t.ttft for t in runs]),
        "faster_than": {
            base: {
                "prefill": ratios([t.prefill for t in took[base]], [t.prefill for t in runs]),
                "ttft": ratios([t.ttft for t in took[base]], [t.ttft for t in runs]),
            }
            for base in (TRANSFORMERS, FULL)
        },
    }
    report = runs[-1].report
    if report is not None:
        figures["stages"] = {stage: _stage(runs, stage) for stage in STAGES}
        figures["tokens_run"] = report.tokens_computed + report.tokens_recomputed + report.tokens_suffix
        figures["tokens_recomputed"] = report.tokens_recomputed
        figures["cost"] = report.cost
        figures["bytes_loaded"] = report.bytes_loaded
    return figures


def _stage(runs: Sequence[Run], stage: str) -> Figures:
    return {
        "seconds": spread([t.seconds[stage] for t in runs]),
        "share_of_ttft": spread([t.seconds[stage] / t.ttft for t in runs]),
    }


def _cold(contest: Harness, repeats: int, say: Say) -> Figures:
    """TTFT with the store's file dropped from the page cache, and right after it warm; or why there is none."""
    loading = [v for v in contest.variants if loads(v)]
    say("Measuring from a cold page cache")
    cold: dict[str, list[float]] = {v.name: [] for v in loading}
    warm: dict[str, list[float]] = {v.name: [] for v in loading}
    for _ in range(repeats):
        for variant in loading:
            trouble = _reopened_cold(contest)
            if trouble:
                return {"done": False, "why": trouble}
            cold[variant.name].append(contest.run(variant).ttft)
            warm[variant.name].append(contest.run(variant).ttft)
    methods = {
        v.name: {"ttft": spread(cold[v.name]), "slower_than_warm": ratios(cold[v.name], warm[v.name])}
        for v in loading
    }
    return {"done": True, "why": "", "methods": methods}


def _throttled(contest: Harness, config: TtftConfig, rate: float, say: Say) -> Figures:
    """TTFT from a store of `rate` GB/s and, in turns, from one that is not held back; and ratio "auto" on the former.

    hidden: the share of the store's time that TTFT does not show.
    """
    say(f"Measuring from a store of {rate:g} GB/s")
    fixed = {v.name: v for v in contest.variants if loads(v)}
    free = {
        f"{name} or more": replace(v, blend=changed(v.blend, ratio="auto", floor=v.ratio))
        for name, v in fixed.items()
        if v.ratio
    }
    slow: dict[str, list[Run]] = {name: [] for name in fixed | free}
    quick: dict[str, list[Run]] = {name: [] for name in fixed}
    for _ in range(config.repeats):
        _reopened(contest, rate * 1e9)
        contest.calibrate()
        for name, variant in (fixed | free).items():  # "auto" knows from the fixed ones what loading takes
            slow[name].append(contest.run(variant))
        _reopened(contest)
        for name, variant in fixed.items():
            quick[name].append(contest.run(variant))
    methods = {name: _from_slow(slow[name], quick.get(name)) for name in slow}
    return {"gb_per_second": rate, "methods": methods}


def _from_slow(slow: Sequence[Run], quick: Sequence[Run] | None) -> Figures:
    figures: Figures = {"ttft": spread([t.ttft for t in slow]), "reading": spread([t.reading for t in slow])}
    figures["ratio"] = median([t.report.ratio for t in slow if t.report])
    if quick is not None:
        shown = [(a.ttft - b.ttft) / a.reading for a, b in zip(slow, quick, strict=True)]
        figures["hidden"] = spread([1 - share for share in shown])
    return figures


def _reopened(contest: Harness, bytes_per_second: float | None = None) -> None:
    contest.close()
    contest.reopen(bytes_per_second)


def _reopened_cold(contest: Harness) -> str:
    contest.close()
    trouble = drop(contest.folder / "data.mdb")
    contest.reopen()
    return trouble
