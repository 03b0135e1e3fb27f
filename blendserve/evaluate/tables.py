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


Columns = dict[str, Callable[[Metrics], Cell]]
"""title -> a method's cell"""


def tables(metrics: Metrics) -> list[Table]:
    """All tables of the page."""
    methods = metrics["methods"]
    found = [_quality(metrics), *tails(metrics), _time(methods), _codecs(methods), *edits(methods)]
    return [table for table in (*found, _against_full(metrics)) if table.rows]


def overview(title: str, metrics: Metrics) -> Table:
    """The main figures of every method."""
    columns: Columns = {
        "KL / reuse's": lambda m: interval(m["mean_kl_share"]),
        "agree": _number("agreement.mean", ".2f"),
        "same": _number("identical.mean", ".2f"),
        metrics["metric"]: _number("score.mean", ".3f"),
        "TTFT ms": _number("seconds.ttft.median", ".0f", 1e3),
        "faster": lambda m: Cell(f"{m['times_faster']['mean']:.1f}x" if m["times_faster"] else ""),
        "recomputed": lambda m: Cell(f"{m['tokens_recomputed'] / m['tokens_prompt']:.0%}"),
    }
    if any(m["codec"] for m in metrics["methods"].values()):
        columns["KV smaller"] = lambda m: Cell(f"{m['kv_smaller']:.1f}x" if m["codec"] else "")
    return _table(title, "", metrics["methods"], columns)


def tails(metrics: Metrics) -> list[Table]:
    """Regressions on single prompts: a row a comparison, and the worst prompts; no table where nothing is reused."""
    found = [(name, tail) for name, m in metrics["methods"].items() for tail in m["tails"]]
    rounding = metrics["kl_rounding"]
    note = (
        f"Mean KL of a prompt / another method's on it; KLs below {metrics['kl_floor']:g} nats count as that."
        + (f" Rounding alone makes up to {rounding:.2g} (95% of prompts)." if rounding is not None else "")
    )
    worse = [
        [
            *(Cell(name), Cell(tail["against"]), _percent(tail["worse"])),
            *(Cell(f"{tail[part]:.2f}") for part in ("p95", "worst")),
            _prompt(tail["prompts"][0]["id"], name),
        ]
        for name, tail in found
    ]
    worst = [
        [
            *(Cell(name), Cell(tail["against"]), _prompt(prompt["id"], name), Cell(f"{prompt['ratio']:.2f}")),
            *(Cell(f"{prompt[part]:.4f}") for part in ("mean_kl", "other")),
        ]
        for name, tail in found
        for prompt in tail["prompts"]
    ]
    columns = ("method", "against", "prompts made worse", "ratio, p95", "worst", "on prompt")
    listed = ("method", "against", "prompt", "ratio", "mean KL, nats", "the other's")
    made = Table("Single prompts", note, columns, worse), Table("Worst prompts", "", listed, worst)
    return [table for table in made if table.rows]


def edits(methods: Metrics) -> list[Table]:
    """The cost of edits, and stale answers; no table without edits."""
    columns: Columns = {
        "mean KL / reuse's": _field("mean_kl_share"),
        "/ exact hits'": _field("edited.mean_kl_times", 2),
        "on a prompt, p95": lambda m: Cell(f"{m['tails'][-1]['p95']:.2f}" if m["tails"] else ""),
        "worst": lambda m: Cell(f"{m['tails'][-1]['worst']:.1f}" if m["tails"] else ""),
        "agreement F1": _field("agreement"),
        "TTFT / exact hits'": _field("edited.ttft_times", 2),
        "times faster than full": _field("times_faster", 2),
        "fresh tokens": _number("edited.fresh", ".0f"),
    }
    stale: Columns = {
        "stale answers": _number("facts.says_rival", "d"),
        "current answers": _number("facts.says_gold", "d"),
        "questions": _number("facts.questions", "d"),
        "stale answers to all questions": _number("facts.says_rival_of_all", "d"),
    }
    note = "The store holds earlier revisions. Exact hits: the same method over the passages themselves."
    about = "Questions to which full prefill gives the current answer."
    edited, asked = ({n: m for n, m in methods.items() if part in m} for part in ("edited", "facts"))
    made = _table("Edited passages", note, edited, columns), _table("Edited facts", about, asked, stale)
    return [table for table in made if table.rows]


def _quality(metrics: Metrics) -> Table:
    metric = metrics["metric"]
    columns: Columns = {
        "mean KL / reuse's": _field("mean_kl_share"),
        "first-token KL / reuse's": _field("first_kl_share"),
        "mean KL, nats": _field("mean_kl", 4),
        "agreement F1": _field("agreement"),
        "identical answers": _field("identical"),
    }
    if metric not in SCORES:
        columns[metric] = _field("score")
    if metric == PERPLEXITY:
        columns[f"{metric} / full's"] = _field("score_against_full", 4)
    else:
        columns |= {title: _field(score) for title, score in SCORES.items()}
    note = "Fidelity to full prefill, then scores against the golds; below, 95% bootstrap intervals over questions."
    return _table("Quality", note, metrics["methods"], columns)


def _time(methods: Metrics) -> Table:
    columns: Columns = {
        "TTFT ms": _number("seconds.ttft.median", ".0f", 1e3),
        "TTFT p95": _number("seconds.ttft.p95", ".0f", 1e3),
        "times faster than full": _field("times_faster", 2),
        "prefill ms": _number("seconds.prefill.median", ".0f", 1e3),
        "prefill p95": _number("seconds.prefill.p95", ".0f", 1e3),
        **{s: _number(f"seconds.{s}.median", ".0f", 1e3) for s in ("load", "select", "correct", "decode")},
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
    return _table("Time and work", note, methods, columns)


def _codecs(methods: Metrics) -> Table:
    def uncoded(m: Metrics) -> Cell:
        return interval(methods[m["uncoded"]]["mean_kl_share"]) if m["uncoded"] in methods else Cell("")

    note = "Every byte of the chunks' records against uncoded KV, without the tables that all chunks share."
    columns: Columns = {
        "KV smaller": lambda m: Cell(f"{m['kv_smaller']:.2f}x"),
        "mean KL / reuse's": _field("mean_kl_share"),
        "on a prompt, p95": lambda m: Cell(f"{m['tails'][0]['p95']:.2f}"),
        "worst": lambda m: Cell(f"{m['tails'][0]['worst']:.2f}"),
        "uncoded": uncoded,
    }
    return _table("Codecs", note, {name: m for name, m in methods.items() if m["codec"]}, columns)


def _against_full(metrics: Metrics) -> Table:
    metric = metrics["metric"]
    own = {} if metric in SCORES else {metric: "score_against_full"}
    fields = {**own, **{title: f"against_full.{score}" for title, score in SCORES.items()}}
    others = {} if metric == PERPLEXITY else {n: m for n, m in metrics["methods"].items() if n != FULL}
    note = "Paired differences to full prefill, prompt by prompt; bold where the interval excludes zero."
    columns = {title: _difference(path) for title, path in fields.items()}
    return _table("Scores, minus full prefill's", note, others, columns)


def _table(title: str, note: str, methods: Metrics, columns: Columns) -> Table:
    rows = [[Cell(name), *(cell(m) for cell in columns.values())] for name, m in methods.items()]
    return Table(title, note, ("method", *columns), rows)


def _at(found: Any, path: str) -> Any:
    for part in path.split("."):
        found = found[int(part)] if isinstance(found, list) else found[part]
    return found


def _number(path: str, form: str, scale: float = 1) -> Callable[[Metrics], Cell]:
    """The number at a dotted path."""
    return lambda m: Cell(format(_at(m, path) * scale, form))


def _field(path: str, digits: int = 3) -> Callable[[Metrics], Cell]:
    """The interval at a dotted path."""
    return lambda m: interval(_at(m, path), digits)


def interval(found: Metrics | None, digits: int = 3) -> Cell:
    """A mean and its interval; empty for None."""
    if found is None:
        return Cell("")
    return Cell(f"{found['mean']:.{digits}f}", f"{found['low']:.{digits}f} to {found['high']:.{digits}f}")


def _percent(found: Metrics) -> Cell:
    return Cell(f"{found['mean']:.1%}", f"{found['low']:.1%} to {found['high']:.1%}")


def _difference(path: str) -> Callable[[Metrics], Cell]:
    def cell(m: Metrics) -> Cell:
        mean, low, high = (_at(m, path)[part] for part in ("mean", "low", "high"))
        return Cell(f"{mean:+.3f}", f"{low:+.3f} to {high:+.3f}", low > 0 or high < 0)

    return cell


def _prompt(id: str, method: str) -> Cell:
    """A prompt with a link to its tokens."""
    return Cell(id, link=f"#{urlencode({'prompt': id, 'method': method})}")
