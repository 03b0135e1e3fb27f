"""metrics.json in the terminal, and its sentences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from blendserve import console
from blendserve.evaluate.methods import FULL, TRANSFORMERS
from blendserve.evaluate.tables import Metrics, edits, interval, overview, tails


def show(metrics: Metrics, report: Path) -> None:
    """Print the tables of a run."""
    for table in (overview(_size(metrics), metrics), *tails(metrics)[:1], *edits(metrics["methods"])):
        title = f"{table.title}. {table.note}" if table.note else table.title
        console.table(title, table.columns, [[str(cell) for cell in row] for row in table.rows])
    for line in headline(metrics):
        console.out.print(line, markup=False)
    console.out.print(f"More in {report}", markup=False)


def show_all(runs: Mapping[str, Metrics | str]) -> None:
    """Print one table: data set -> its metrics, or why there are none."""
    ran = [metrics for metrics in runs.values() if not isinstance(metrics, str)]
    methods = list(ran[0]["methods"]) if ran else []
    rows = []
    for name, metrics in runs.items():
        if isinstance(metrics, str):
            rows.append([Path(name).name, metrics, *[""] * (len(methods) + 2)])
            continue
        counts = metrics["metric"], str(metrics["questions"]), str(len(metrics["left_out"]))
        rows.append([Path(name).name, *counts, *(_score_and_kl(metrics["methods"][m]) for m in methods)])
    columns = ("data", "metric", "questions", "left out", *methods)
    console.table("Score (mean KL / full reuse's)", columns, rows)


def facts(metrics: Metrics) -> list[str]:
    """What was measured, and where."""
    where, reader, recall = metrics["environment"], metrics["reader"], metrics["recall"]
    return [
        f"{_size(metrics)} of {Path(metrics['dataset']).name}, {metrics['setting']}",
        *([f"recall of needed titles {interval(recall, 2)}"] if recall else []),
        f"{reader['model']} in {reader['dtype']} on {reader['device']}",
        f"{where['machine']}, {reader['threads']} threads",
        f"torch {where['torch']}, transformers {where['transformers']}",
        f"blendserve {where['blendserve']} {where['commit']}".strip(),
    ]


def headline(metrics: Metrics) -> list[str]:
    """The comparison with the baseline in words; nothing if it did not run."""
    if (found := metrics["headline"]) is None:
        return []
    fast, near, rule = found["at_its_fidelity"], found["in_its_time"], found["rule"]

    def said(gain: Metrics, part: str) -> str:
        return str(interval(gain[part], 2)) or "?"

    full = f"TTFT {said(fast, 'times_faster_than_full')} times lower than full prefill's"
    faster = (
        f"{fast['method']} is fastest: {full} and {said(fast, 'times_faster_than_rule')} times lower than {rule}'s; "
        f"its mean KL is {said(fast, 'mean_kl_share_of_rule')} of {rule}'s"
    )
    nearer = (
        f"{near['method']} is nearest to full prefill: its mean KL is {said(near, 'mean_kl_share_of_rule')} of "
        f"{rule}'s and {said(near, 'mean_kl_share')} of full reuse's"
    )
    none = f"no other method is faster ({full})", "no other method is nearer to full prefill"
    return [
        f"At a fidelity no worse than {rule}, {none[0] if fast['method'] == rule else faster}.",
        f"In no more time than {rule}, {none[1] if near['method'] == rule else nearer}.",
    ]


def _score_and_kl(m: Metrics) -> str:
    share = None if m["kind"] in (FULL, TRANSFORMERS) else m["mean_kl_share"]
    return f"{m['score']['mean']:.3f}" + (f" ({share['mean']:.2f})" if share else "")


def _size(metrics: Metrics) -> str:
    questions, prompts = metrics["questions"], metrics["prompts"]
    return f"{questions} questions" + (f" in {prompts} prompts" if prompts > questions else "")
