"""metrics.json as tables, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from blendserve.evaluate.methods import FULL
from blendserve.evaluate.tasks import PERPLEXITY

Metrics = Mapping[str, Any]

SCORES = {"F1": "f1", "exact match": "em", "Rouge-L": "rouge_l"}


@dataclass(frozen=True, slots=True)
class Cell:
    """A value, its interval in small print, whether it is significant, and the link behind it."""

    text: str
    below: str = ""
    sure: bool = False
    link: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.below})" if self.below else self.text


@dataclass(frozen=True, slots=True)
class Table:
    """The first column names methods."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


Columns = dict[str, Callable[[Metrics], Cell]]  # title -> the cell of a method's metrics


def tables(metrics: Metrics) -> list[Table]:
    """All tables of the page; those without a row are left out."""
    found = (_quality(metrics), tails(metrics), _time(metrics), *edits(metrics))
    return [table for table in found if table.rows]


def overview(title: str, metrics: Metrics) -> Table:
    """The main figures of every method."""
    columns: Columns = {
        "KL / reuse's": _interval("mean_kl_share"),
        "agree": _number("agreement.mean", ".2f"),
        "same": _number("identical.mean", ".2f"),
        metrics["metric"]: _number("score.mean", ".3f"),
        "TTFT ms": _number("seconds.ttft.median", ".0f", 1e3),
        "faster": _number("times_faster.mean", ".1f"),
        "recomputed": lambda m: Cell(f"{m['tokens_recomputed'] / m['tokens_prompt']:.0%}"),
        **_kv_smaller(metrics),
    }
    return _table(title, "", metrics["methods"], columns)


def tails(metrics: Metrics) -> Table:
    """Regressions on single prompts: a row a comparison."""
    note = (
        f"Mean KL of a prompt / another method's on it; KLs below {metrics['kl_floor']:g} nats count as that."
    )
    if (rounding := metrics["kl_rounding"]) is not None:
        note += f" Rounding alone makes up to {rounding:.2g} (95% of prompts)."
    rows = [
        [
            *(Cell(name), Cell(tail["against"]), interval(tail["worse"])),
            *(Cell(f"{tail['p95']:.2f}"), Cell(f"{tail['worst']:.2f}")),
            Cell(tail["prompt"], link=f"#{urlencode({'prompt': tail['prompt'], 'method': name})}"),
        ]
        for name, method in metrics["methods"].items()
        for tail in method["tails"]
    ]
    columns = ("method", "against", "fraction made worse", "ratio, p95", "worst", "on prompt")
    return Table("Single prompts", note, columns, rows)


def edits(metrics: Metrics) -> tuple[Table, Table]:
    """The cost of edits, and stale answers; without rows where there are none."""
    methods = metrics["methods"]
    edited: Columns = {
        "mean KL / reuse's": _interval("mean_kl_share"),
        "/ exact hits'": _interval("edited.mean_kl_times", 2),
        "TTFT / exact hits'": _interval("edited.ttft_times", 2),
        "times faster than full": _interval("times_faster", 2),
        "fresh tokens": _number("tokens_computed", ".0f"),
    }
    facts: Columns = {
        "stale answers": _number("facts.says_rival", "d"),
        "current answers": _number("facts.says_gold", "d"),
        "questions": _number("facts.questions", "d"),
        "stale answers to all questions": _number("facts.says_rival_of_all", "d"),
    }
    old = "The store holds earlier revisions. Exact hits: the same method over the passages themselves."
    asked = "Questions to which full prefill gives the current answer."
    return (
        _table("Edited passages", old, {n: m for n, m in methods.items() if "edited" in m}, edited),
        _table("Edited facts", asked, {n: m for n, m in methods.items() if "facts" in m}, facts),
    )


def _quality(metrics: Metrics) -> Table:
    metric = metrics["metric"]
    columns: Columns = {
        "mean KL / reuse's": _interval("mean_kl_share"),
        "first-token KL / reuse's": _interval("first_kl_share"),
        "mean KL, nats": _interval("mean_kl", 4),
        "agreement F1": _interval("agreement"),
        "identical answers": _interval("identical"),
        metric: _interval("score"),
    }
    if metric == PERPLEXITY:
        columns[f"{metric} / full's"] = _interval("score_against_full", 4)
    else:
        columns[f"{metric} - full's"] = _difference
        columns |= {title: _interval(score) for title, score in SCORES.items()}
    note = (
        "Fidelity to full prefill, then scores against the golds; below, 95% bootstrap intervals over questions. "
        "Differences are paired; bold where the interval excludes zero."
    )
    return _table("Quality", note, metrics["methods"], columns | _kv_smaller(metrics))


def _time(metrics: Metrics) -> Table:
    stages = ("prefill", "load", "select", "correct", "decode")
    columns: Columns = {
        "TTFT ms": _number("seconds.ttft.median", ".0f", 1e3),
        "TTFT p95": _number("seconds.ttft.p95", ".0f", 1e3),
        "times faster than full": _interval("times_faster", 2),
        **{f"{stage} ms": _number(f"seconds.{stage}.median", ".0f", 1e3) for stage in stages},
        "tokens recomputed": _number("tokens_recomputed", ".0f"),
        "computed": _number("tokens_computed", ".0f"),
        "exact": _number("tokens_exact", ".0f"),
        "MB loaded": _number("bytes_loaded", ".1f", 1e-6),
        "cost": _number("cost", ".3f"),
    }
    note = (
        "Medians over the questions; TTFT runs from the passages' text to the first token. Cost: row-layers run through "
        "the model, selection included, as a share of full prefill's."
    )
    return _table("Time and work", note, metrics["methods"], columns)


def _kv_smaller(metrics: Metrics) -> Columns:
    """Every byte of the chunks' records against uncoded KV, without shared tables; no column without codecs."""
    has_codecs = any(m["codec"] for m in metrics["methods"].values())
    return {"KV smaller": _number("kv_smaller", ".2f")} if has_codecs else {}


def _table(title: str, note: str, methods: Metrics, columns: Columns) -> Table:
    rows = [[Cell(name), *(cell(m) for cell in columns.values())] for name, m in methods.items()]
    return Table(title, note, ("method", *columns), rows)


def _at(found: Any, path: str) -> Any:
    """The value at a dotted path; None where a part is None."""
    for part in path.split("."):
        found = found and found[part]
    return found


def _number(path: str, form: str, scale: float = 1) -> Callable[[Metrics], Cell]:
    """The number at a dotted path; empty for None."""

    def cell(m: Metrics) -> Cell:
        value = _at(m, path)
        return Cell("" if value is None else format(value * scale, form))

    return cell


def _interval(path: str, digits: int = 3) -> Callable[[Metrics], Cell]:
    return lambda m: interval(_at(m, path), digits)


def interval(found: Metrics | None, digits: int = 3) -> Cell:
    """A mean and its interval; empty for None."""
    if found is None:
        return Cell("")
    return Cell(f"{found['mean']:.{digits}f}", f"{found['low']:.{digits}f} to {found['high']:.{digits}f}")


def _difference(m: Metrics) -> Cell:
    mean, low, high = (m["score_against_full"][part] for part in ("mean", "low", "high"))
    if m["kind"] == FULL:
        return Cell("")
    return Cell(f"{mean:+.3f}", f"{low:+.3f} to {high:+.3f}", low > 0 or high < 0)
