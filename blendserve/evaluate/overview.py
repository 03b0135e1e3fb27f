"""One table over all the data that is at hand: the data sets that have a name, and files, each by every method.

Nothing is fetched: a data set that is not here is named as such. Every workload is a run of its own (job.py), so the
table is cheap to print again, and grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendserve.config import Config, changed
from blendserve.errors import BlendserveError
from blendserve.evaluate.config import EvaluateConfig
from blendserve.evaluate.datasets import BUNDLED, HOSTED, MADE, cached, load
from blendserve.evaluate.job import Say, evaluate
from blendserve.evaluate.methods import TRANSFORMERS


@dataclass(frozen=True, slots=True)
class Workload:
    """One row."""

    source: str
    figures: dict[str, Any] | None  # metrics.json
    why_not: str = ""  # where there are no figures


def at_hand(files: Sequence[Path] = ()) -> dict[str, str]:
    """Every data set that has a name, and the files -> why it cannot be run, "" where it can."""
    absent = {name: "not at hand" for name in HOSTED if not cached(name).is_file()}
    return {name: absent.get(name, "") for name in (*BUNDLED, *MADE, *HOSTED, *map(str, files))}


def run_all(
    plan: EvaluateConfig, settings: Config, runs: Path, files: Sequence[Path] = (), say: Say = lambda _: None
) -> list[Workload]:
    """Each by the plan, with as many tokens an answer as its task needs. A workload that fails is a row that says why."""
    return [
        Workload(source, None, why) if why else _run(changed(plan, dataset=source), settings, runs, say)
        for source, why in at_hand(files).items()
    ]


def _run(plan: EvaluateConfig, settings: Config, runs: Path, say: Say) -> Workload:
    say(f"{plan.dataset}:")
    try:
        task = load(plan.dataset, corpus=plan.corpus, limit=1, seed=plan.seed).task
        settings = settings.model_copy(
            update={"decode": changed(settings.decode, max_new_tokens=task.answer_tokens)}
        )
        return Workload(plan.dataset, evaluate(plan, settings, runs=runs, say=say).figures)
    except BlendserveError as error:
        return Workload(plan.dataset, None, str(error))


def table(workloads: Sequence[Workload]) -> tuple[Sequence[str], list[list[str]]]:
    """Columns and rows: a method's score and, behind it, its mean KL as a share of full reuse's."""
    ran = [w.figures for w in workloads if w.figures]
    methods = list(ran[0]["methods"]) if ran else []
    columns = ("data", "metric", "questions", "left out", *methods)
    rows = []
    for workload in workloads:
        name = Path(workload.source).name
        if (figures := workload.figures) is None:
            rows.append([name, workload.why_not, *[""] * (len(columns) - 2)])
            continue
        cells = [_cell(figures["methods"][method]) for method in methods]
        rows.append(
            [name, figures["metric"], str(figures["questions"]), str(len(figures["left_out"])), *cells]
        )
    return columns, rows


def _cell(method: dict[str, Any]) -> str:
    share = method["mean_kl_share"]
    exact = method["kind"] in ("full", TRANSFORMERS)
    return f"{method['score']['mean']:.3f}" + (f" ({share['mean']:.2f})" if share and not exact else "")
