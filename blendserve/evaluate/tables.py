"""metrics.json as tables, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from blendserve.evaluate.methods import FULL
from blendserve.evaluate.tasks import PERPLEXITY

Metrics = Mapping[str, Any]
Columns = dict[str, tuple[str, str]]  # title -> dotted path in a method's metrics, and format

SCALES = {"ms": (1e3, ".0f"), "MB": (1e-6, ".1f")}  # formats with a unit
EDITED = "The store holds earlier revisions. Exact hits: the same method over the passages themselves."
FACTS = "Questions to which full prefill gives the current answer."


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


def tables(metrics: Metrics) -> list[Table]:
    """All tables of the page; those without a row are left out."""
    found = (_quality(metrics), tails(metrics), _time(metrics["methods"]), *edits(metrics["methods"]))
    return [table for table in found if table.rows]


def overview(title: str, metrics: Metrics) -> Table:
    """The main figures of every method."""
    columns = {
        "KL / reuse's": ("mean_kl_share", ".3f"),
        "agree": ("agreement.mean", ".2f"),
        "same": ("identical.mean", ".2f"),
        metrics["metric"]: ("score.mean", ".3f"),
        "TTFT ms": ("seconds.ttft.median", "ms"),
        "times faster": ("times_faster.mean", ".1f"),
        "recomputed": ("share_recomputed", ".0%"),
    }
    return _table(title, "", metrics["methods"], columns | _kv_smaller(metrics["methods"]))


def tails(metrics: Metrics) -> Table:
    """Regressions on single prompts: a row a comparison."""
    note = (
        f"Mean KL of a prompt / another method's on it; KLs below {metrics['kl_floor']:g} nats count as that."
    )
    if (rounding := metrics["kl_rounding"]) is not None:
        note += f" Rounding alone makes up to {rounding:.2g} (95% of prompts)."
    rows = [
        [
            *(Cell(name), Cell(tail["against"]), cell(tail["worse"], ".3f")),
            *(cell(tail["p95"], ".2f"), cell(tail["worst"], ".2f")),
            Cell(tail["prompt"], link=f"#{urlencode({'prompt': tail['prompt'], 'method': name})}"),
        ]
        for name, method in metrics["methods"].items()
        for tail in method["tails"]
    ]
    columns = ("method", "against", "fraction made worse", "ratio, p95", "worst", "on prompt")
    return Table("Single prompts", note, columns, rows)


def edits(methods: Metrics) -> tuple[Table, Table]:
    """The cost of edits, and stale answers; without rows where there are none."""
    edited = {
        "mean KL / reuse's": ("mean_kl_share", ".3f"),
        "/ exact hits'": ("edited.mean_kl_times", ".2f"),
        "TTFT / exact hits'": ("edited.ttft_times", ".2f"),
        "times faster than full": ("times_faster", ".2f"),
        "fresh tokens": ("tokens_computed", ".0f"),
    }
    facts = {
        "stale answers": ("facts.says_rival", "d"),
        "current answers": ("facts.says_gold", "d"),
        "questions": ("facts.questions", "d"),
        "stale answers to all questions": ("facts.says_rival_of_all", "d"),
    }
    return (
        _table("Edited passages", EDITED, {n: m for n, m in methods.items() if "edited" in m}, edited),
        _table("Edited facts", FACTS, {n: m for n, m in methods.items() if "facts" in m}, facts),
    )


def _quality(metrics: Metrics) -> Table:
    metric, methods = metrics["metric"], metrics["methods"]
    columns = {
        "mean KL / reuse's": ("mean_kl_share", ".3f"),
        "first-token KL / reuse's": ("first_kl_share", ".3f"),
        "mean KL, nats": ("mean_kl", ".4f"),
        "agreement F1": ("agreement", ".3f"),
        "identical answers": ("identical", ".3f"),
        metric: ("score", ".3f"),
    }
    if metric == PERPLEXITY:
        columns[f"{metric} / full's"] = ("score_against_full", ".4f")
    else:
        columns[f"{metric} - full's"] = ("score_against_full", "+.3f")
        columns |= {"F1": ("f1", ".3f"), "exact match": ("em", ".3f"), "Rouge-L": ("rouge_l", ".3f")}
    note = (
        "Fidelity to full prefill, then scores against the golds; below, 95% bootstrap intervals over questions. "
        "Differences are paired; bold where the interval excludes zero."
    )
    return _table("Quality", note, methods, columns | _kv_smaller(methods))


def _time(methods: Metrics) -> Table:
    columns = {
        "TTFT ms": ("seconds.ttft.median", "ms"),
        "TTFT p95": ("seconds.ttft.p95", "ms"),
        "times faster than full": ("times_faster", ".2f"),
        **{s: (f"seconds.{s}.median", "ms") for s in ("prefill", "load", "select", "correct", "decode")},
        "tokens recomputed": ("tokens_recomputed", ".0f"),
        "computed": ("tokens_computed", ".0f"),
        "exact": ("tokens_exact", ".0f"),
        "MB loaded": ("bytes_loaded", "MB"),
        "cost": ("cost", ".3f"),
    }
    note = (
        "Medians over the questions; TTFT runs from the passages' text to the first token. Cost: row-layers run through "
        "the model, selection included, as a share of full prefill's."
    )
    return _table("Time and work", note, methods, columns)


def _kv_smaller(methods: Metrics) -> Columns:
    """Every byte of the chunks' records against uncoded KV, without shared tables; no column without codecs."""
    return {"KV smaller": ("kv_smaller", ".2f")} if any(m["codec"] for m in methods.values()) else {}


def _table(title: str, note: str, methods: Metrics, columns: Columns) -> Table:
    rows = [
        [Cell(name), *(cell(_at(m, path), form) for path, form in columns.values())]
        for name, m in methods.items()
    ]
    return Table(title, note, ("method", *columns), rows)


def _at(found: Any, path: str) -> Any:
    """The value at a dotted path; None where a part is None. Full prefill has no difference to itself."""
    if path == "score_against_full" and found["kind"] == FULL:
        return None
    for part in path.split("."):
        found = found and found[part]
    return found


def cell(value: Any, form: str) -> Cell:
    """A number, or a mean with its interval; empty for None. "+" formats a difference."""
    if value is None:
        return Cell("")
    scale, form = SCALES.get(form, (1, form))
    if not isinstance(value, Mapping):
        return Cell(format(value * scale, form))
    mean, low, high = (value[part] * scale for part in ("mean", "low", "high"))
    is_sure = form.startswith("+") and (low > 0 or high < 0)
    return Cell(format(mean, form), f"{low:{form}} to {high:{form}}", is_sure)
