"""How cost grows: a grid of contexts, ratios and chunk counts, each cell with its limit on this machine.

Every cell is a contest of its own, and a line of cells.jsonl as soon as it is measured: a kill costs one cell, and the
same command goes on. FLOP and copy rates are measured within each cell, so that a cell compares with its own moment.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from blendserve.bench.config import ScalingConfig, TtftConfig
from blendserve.bench.figures import Figures, interleaved, spread
from blendserve.bench.harness import Harness, Run, scratch
from blendserve.bench.machine import where
from blendserve.bench.rates import Rates, measure_rates
from blendserve.bench.roofline import Counts, limit, prefill_work
from blendserve.bench.stages import STAGES, StagedAdapter
from blendserve.bench.tables import LIMITED
from blendserve.bench.ttft import figures_of
from blendserve.bench.workload import check_room, make_workload
from blendserve.config import PromptConfig
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import InputError
from blendserve.evaluate.methods import TRANSFORMERS, MethodSpec
from blendserve.extras import install_hint
from blendserve.models.loader import Reader, load_reader
from blendserve.provenance import machine

Say = Callable[[str], None]
Update = Callable[[int, int], None]
CELLS = "cells.jsonl"


def run(
    config: ScalingConfig,
    runs: Path,
    plots: Path,
    say: Say = lambda text: None,
    update: Update = lambda done, total: None,
) -> Figures:
    """Measure the grid into runs/<model> and draw it. Raises as `measure` does."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"the plots need matplotlib, which is not installed: {install_hint('evaluate')}")
    from blendserve.bench.plots import ttft_context, ttft_ratio  # start-up: matplotlib

    kept = runs / re.sub(r"[^\w.-]+", "-", config.model)
    cells = measure(config, kept, say, update)
    plots.mkdir(parents=True, exist_ok=True)
    for draw in (ttft_context, ttft_ratio):
        (plots / f"{draw.__name__}.svg").write_bytes(draw(cells))
    return {"bench": "scaling", "machine": machine(), "kept": str(kept), "plots": str(plots), "cells": cells}


def measure(
    config: ScalingConfig,
    folder: Path,
    say: Say = lambda text: None,
    update: Update = lambda done, total: None,
) -> list[Figures]:
    """Every cell of the grid, from `folder` where it is there already.

    Raises ConfigError, InputError, ModelError, StoreError; cells measured until then are kept.
    """
    cells = config.cells
    reader = load_reader(config.reader, say)
    counts = Counts.of(reader.adapter)
    front = len(PromptBuilder(reader.tokenizer, PromptConfig()).prefix)
    longest = max(cell.chunks * cell.chunk_tokens + cell.suffix_tokens for _, cell in cells)
    check_room(reader, front + longest, "the longest prompt of the grid")
    known = {line["key"]: line for line in read_cells(folder / CELLS)}
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for done, (about, cell) in enumerate(cells):
        key = _key(about, cell, reader)
        if key not in known:
            known[key] = {"key": key, **about, **measure_cell(reader, counts, cell)}
            _append(folder / CELLS, known[key])
        lines.append(known[key])
        update(done + 1, len(cells))
    return lines


def measure_cell(reader: Reader, counts: Counts, cell: TtftConfig) -> Figures:
    """Times, ratios, stages and limits of every method on one prompt."""
    workload = make_workload(reader, cell.chunks, cell.chunk_tokens, cell.suffix_tokens, cell.seed)
    rates = measure_rates(reader.adapter.dtype, reader.adapter.device)
    variants = cell.variants
    with scratch(cell.folder) as folder:
        with Harness(reader, workload, variants, folder) as contest:
            contest.precompute()
            took = interleaved({v.name: partial(contest.run, v) for v in variants}, cell.repeats)
        staged = StagedAdapter(reader.adapter)
        with Harness(reader, workload, variants, folder, staged.as_adapter()) as contest:
            contest.store.verify()  # maps the file's pages, as they are in the timed runs
            methods = {v.name: figures_of(took, v.name) for v in variants}
            for variant in (v for v in variants if v.kind != TRANSFORMERS):
                splits = [_split(contest, staged, variant) for _ in range(cell.repeats)]
                bound = _limit(counts, variant, took[variant.name][-1], rates)
                methods[variant.name]["against_limit"] = against_limit(splits, bound)
    prompt = {"tokens": len(workload.prompt), "context": cell.chunks * cell.chunk_tokens}
    return {
        **where(cell, reader),
        "prompt": prompt,
        "rates": {"flops": rates.flops, "bytes": rates.bytes},
        "methods": methods,
    }


def against_limit(splits: list[dict[str, float]], bound: dict[str, float]) -> Figures:
    """Each stage's seconds, and limit / seconds: the share of the limit that it reaches."""
    stages: Figures = {stage: {"seconds": spread([s[stage] for s in splits])} for stage in STAGES}
    for stage in LIMITED:
        stages[stage] |= {
            "limit": bound[stage],
            "share_of_limit": spread([bound[stage] / s[stage] if s[stage] else 0.0 for s in splits]),
        }
    total = spread([sum(bound.values()) / sum(s.values()) for s in splits])
    return {"limit": sum(bound.values()), "share_of_limit": total, "stages": stages}


def read_cells(file: Path) -> Iterator[Figures]:
    """The lines that are there; what a kill left half-written at the end is cut off. Raises InputError."""
    if not file.exists():
        return
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(file, len(whole))
    for n, line in enumerate(whole.splitlines(), 1):
        try:
            yield json.loads(line)
        except ValueError:
            raise InputError(
                f"{file}, line {n}: not JSON; delete that line, and its cell is measured again"
            ) from None


def _split(contest: Harness, staged: StagedAdapter, variant: MethodSpec) -> dict[str, float]:
    return staged.split(contest.run(variant))


def _limit(counts: Counts, variant: MethodSpec, took: Run, rates: Rates) -> dict[str, float]:
    assert took.report is not None
    assert took.recomputed is not None
    bound = limit(prefill_work(counts, took.report, took.recomputed, variant.blend), rates)
    return {stage: getattr(bound, stage) for stage in LIMITED}


def _key(about: Figures, cell: TtftConfig, reader: Reader) -> str:
    """What a cell was measured of: equal keys need measuring once."""
    dtype = str(reader.adapter.dtype).removeprefix("torch.")
    asked = {**about, **cell.model_dump(mode="json", exclude={"folder"}), "dtype": dtype}
    asked["threads"] = torch.get_num_threads()
    return json.dumps(asked, sort_keys=True)


def _append(file: Path, line: Figures) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(line) + "\n")
