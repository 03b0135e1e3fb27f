"""metrics.json in the terminal, and its sentences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from blendserve import console
from blendserve.evaluate.methods import FULL, TRANSFORMERS
from blendserve.evaluate.tables import Metrics, cell, edits, overview, tails


def show(metrics: Metrics, report: Path) -> None:
    """Print the tables of a run."""
    for table in (overview(_size(metrics), metrics), tails(metrics), *edits(metrics["methods"])):
        if table.rows:
            title = f"{table.title}. {table.note}" if table.note else table.title
            console.table(title, table.columns, [[str(cell) for cell in row] for row in table.rows])
    for line in (*headline(metrics), f"More in {report}"):
        console.out.print(line, markup=False)


def show_all(runs: Mapping[str, Metrics | str]) -> None:
    """Print one table: data set -> its metrics, or why there are none."""
    methods = next(
        (list(metrics["methods"]) for metrics in runs.values() if not isinstance(metrics, str)), []
    )
    rows = []
    for name, metrics in runs.items():
        if isinstance(metrics, str):
            cells = [metrics, *[""] * (len(methods) + 2)]
        else:
            cells = [metrics["metric"], str(metrics["questions"]), str(len(metrics["left_out"]))]
            cells += [_score_and_kl(metrics["methods"][method]) for method in methods]
        rows.append([Path(name).name, *cells])
    columns = ("data", "metric", "questions", "left out", *methods)
    console.table("Score (mean KL / full reuse's)", columns, rows)


def facts(metrics: Metrics) -> list[str]:
    """What was measured, and where."""
    where, model, recall = metrics["environment"], metrics["reader"], metrics["recall"]
    return [
        f"{_size(metrics)} of {Path(metrics['dataset']).name}, {metrics['setting']}",
        *([f"recall of needed titles {cell(recall, '.2f')}"] if recall else []),
        f"{model['model']} in {model['dtype']} on {model['device']}",
        f"{where['machine']}, {model['threads']} threads",
        f"torch {where['torch']}, transformers {where['transformers']}",
        f"blendserve {where['blendserve']} {where['commit']}".strip(),
    ]


def headline(metrics: Metrics) -> list[str]:
    """The comparison with the rule in words; nothing if the rule did not run."""
    if (found := metrics["headline"]) is None:
        return []
    rule, fast, near = found["rule"], found["at_its_fidelity"], found["in_its_time"]
    return [
        f"Fastest method with a mean KL of at most {rule}'s: {fast['method']}. TTFT "
        f"{cell(fast['times_faster_than_full'], '.2f')} times lower than full prefill's and "
        f"{cell(fast['times_faster_than_rule'], '.2f')} times lower than {rule}'s.",
        f"Lowest mean KL in at most {rule}'s time: {near['method']}. It is {cell(near['mean_kl_share_of_rule'], '.2f')} "
        f"of {rule}'s and {cell(near['mean_kl_share'], '.2f')} of full reuse's.",
    ]


def _score_and_kl(m: Metrics) -> str:
    share = None if m["kind"] in (FULL, TRANSFORMERS) else m["mean_kl_share"]
    return f"{m['score']['mean']:.3f}" + (f" ({share['mean']:.2f})" if share else "")


def _size(metrics: Metrics) -> str:
    questions, prompts = metrics["questions"], metrics["prompts"]
    return f"{questions} questions" + (f" in {prompts} prompts" if prompts > questions else "")
