"""Predictions to figures: every mean with its bootstrap interval, every method against full prefill and the others.

Times are medians and 95th percentiles; fidelity is the mean KL as a share of full reuse's (intervals.share).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from blendserve.errors import InputError
from blendserve.evaluate.intervals import Interval, bootstrap, by_group, paired_difference, share, times
from blendserve.evaluate.methods import EXACT, FULL, REUSE, TRANSFORMERS, MethodSpec
from blendserve.evaluate.tail import FLOOR, opponents, rounding, tail
from blendserve.evaluate.tasks import PERPLEXITY
from blendserve.registry import CACHEBLEND

Line = Mapping[str, Any]
Figures = dict[str, Any]

SCORES = ("f1", "em", "rouge_l", "agreement", "identical", "first_kl", "mean_kl")
COUNTS = ("tokens_prompt", "tokens_recomputed", "tokens_computed", "tokens_exact", "bytes_loaded", "cost")
STAGES = ("ttft", "prefill", "load", "select", "correct", "decode")


class Table:
    """The predictions of the prompts that every method has answered, by method, in one order of prompts."""

    def __init__(
        self, lines: Mapping[tuple[str, str], Line], asked: Mapping[str, str], variants: Sequence[MethodSpec]
    ) -> None:
        """asked: ids of prompts, each with its question's: its own, but for a shuffle.

        Raises InputError when no prompt is complete.
        """
        names = [v.name for v in variants]
        self.ids = [i for i in asked if all((i, name) in lines for name in names)]
        if not self.ids:
            raise InputError("no question was answered by every method: there is nothing to compare yet")
        self.questions = [asked[i] for i in self.ids]
        self.variants = tuple(variants)
        self._rows = {name: [lines[i, name] for i in self.ids] for name in names}

    def __contains__(self, method: str) -> bool:
        return method in self._rows

    def rows(self, method: str) -> list[Line]:
        """A method's predictions, one a prompt."""
        return self._rows[method]

    def column(self, method: str, field: str) -> list[float]:
        """One number a prompt."""
        if field == "score":  # predictions of versions that had no other metric have none
            return [float(row.get(field, row["f1"])) for row in self._rows[method]]
        return [float(row[field]) for row in self._rows[method]]

    def seconds(self, method: str, stage: str) -> list[float]:
        """A stage's seconds, one a prompt; 0 for what a method has no stage for."""
        return [float(row["seconds"].get(stage, 0.0)) for row in self._rows[method]]

    @property
    def types(self) -> list[str]:
        return [str(row["type"]) for row in self._rows[FULL]]

    @property
    def recall(self) -> Interval | None:
        """Over the questions whose needed titles are known, in the open setting; None where there is none."""
        known = [
            (row["recall"], question)
            for row, question in zip(self._rows[FULL], self.questions, strict=True)
            if row["recall"] is not None
        ]
        return bootstrap([r for r, _ in known], questions=[q for _, q in known]) if known else None


def summarise(table: Table, metric: str) -> Figures:
    """Everything that metrics.json says of the measurements; metric: the name of what `score` is (tasks.py)."""
    names = [v.name for v in table.variants]
    return {
        "questions": len(set(table.questions)),
        "prompts": len(table.ids),
        "recall": _dict(table.recall),
        "kl_floor": FLOOR,
        "kl_rounding": rounding(table.variants, {name: table.column(name, "mean_kl") for name in names}),
        "methods": {
            v.name: {**_kind(v), **_method(table, v), **_scored(table, v.name, metric)}
            for v in table.variants
        },
        "headline": headline(table, CACHEBLEND) if CACHEBLEND in table else None,
    }


def _kind(variant: MethodSpec) -> Figures:
    return {
        "kind": variant.kind,
        "series": variant.series,
        "ratio": variant.ratio,
        "codec": variant.codec,
        "uncoded": variant.uncoded,
    }


def _method(table: Table, variant: MethodSpec) -> Figures:
    name, questions = variant.name, table.questions
    figures: Figures = {
        score: asdict(bootstrap(table.column(name, score), questions=questions)) for score in SCORES
    }
    for kl in ("first_kl", "mean_kl"):
        figures[f"{kl}_share"] = _dict(
            share(table.column(name, kl), table.column(REUSE, kl), questions=questions)
        )
    figures["tails"] = [
        tail(other, table.ids, questions, *(table.column(method, "mean_kl") for method in (name, other)))
        for other in opponents(variant, [v.name for v in table.variants])
    ]
    figures |= {count: float(np.mean(table.column(name, count))) for count in COUNTS}
    figures["kv_smaller"] = _smaller(table.rows(name))
    figures["seconds"] = {stage: _spread(table.seconds(name, stage)) for stage in STAGES}
    figures["times_faster"] = _times(table, FULL, name)
    figures["against_full"] = {score: _minus(table, name, FULL, score) for score in ("f1", "em", "rouge_l")}
    if variant.unedited and variant.unedited in table:
        figures["edited"] = _edited(table, variant)
    if "says_rival" in table.rows(name)[0]:
        figures["facts"] = _facts(table, name)
    if any(table.types):
        groups = by_group(table.column(name, "f1"), table.types, questions=questions)
        figures["f1_by_type"] = {kind: asdict(interval) for kind, interval in groups.items()}
    return figures


def _edited(table: Table, variant: MethodSpec) -> Figures:
    """Against exact hits: the same method where the passages themselves are stored."""
    name, exact = variant.name, str(variant.unedited)
    kls = table.column(name, "mean_kl"), table.column(exact, "mean_kl")
    return {
        "kind": variant.edit,
        "mean_kl_times": _dict(share(*kls, questions=table.questions)),
        "ttft_times": _times(table, name, exact),
        "fresh": float(np.mean(table.column(name, "tokens_computed"))),
    }


def _facts(table: Table, name: str) -> Figures:
    """How often a method said what was true before the edit where full prefill said what is, and how often it did."""
    rows = table.rows(name)
    known = [row for row, full in zip(rows, table.rows(FULL), strict=True) if full["says_gold"]]
    return {
        "questions": len(known),
        "says_rival": sum(row["says_rival"] for row in known),
        "says_gold": sum(row["says_gold"] for row in known),
        "says_rival_of_all": sum(row["says_rival"] for row in rows),
    }


def _scored(table: Table, name: str, metric: str) -> Figures:
    """The data set's own metric, and full prefill's paired with it: a difference, for perplexity a ratio.

    Perplexity is exp of a mean of log-likelihoods, and so are the ends of its interval.
    """
    interval = asdict(bootstrap(table.column(name, "score"), questions=table.questions))
    against = _minus(table, name, FULL, "score")
    if metric == PERPLEXITY:
        interval, against = _exp(interval), _exp(against)
    return {"score": interval, "score_against_full": against}


def _exp(interval: Figures) -> Figures:
    return {**interval, **{part: float(np.exp(interval[part])) for part in ("mean", "low", "high")}}


def _smaller(rows: Sequence[Line]) -> float | None:
    """How many times smaller than uncoded the chunks' records are, over all questions; None without a codec."""
    taken = [kv for row in rows if (kv := row.get("kv"))]
    return sum(kv["raw_bytes"] for kv in taken) / sum(kv["bytes"] for kv in taken) if taken else None


def _minus(table: Table, a: str, b: str, score: str) -> Figures:
    columns = table.column(a, score), table.column(b, score)
    return asdict(paired_difference(*columns, questions=table.questions))


def _times(table: Table, a: str, b: str) -> Figures | None:
    """How many times as long a takes to the first token as b."""
    return _dict(times(table.seconds(a, "ttft"), table.seconds(b, "ttft"), questions=table.questions))


def headline(table: Table, rule: str) -> Figures:
    """What is gained over `rule`: the fastest method at its fidelity, and the most faithful one in its time.

    Fidelity is the mean KL, time the median TTFT; both as measured, so look at the intervals too.
    """
    kl = {v.name: float(np.mean(table.column(v.name, "mean_kl"))) for v in table.variants}
    ttft = {v.name: float(np.median(table.seconds(v.name, "ttft"))) for v in table.variants}
    blends = [v.name for v in table.variants if v.kind not in (FULL, TRANSFORMERS, EXACT)]
    fastest = min((n for n in blends if kl[n] <= kl[rule]), key=lambda n: (ttft[n], n))
    nearest = min((n for n in blends if ttft[n] <= ttft[rule]), key=lambda n: (kl[n], n))
    return {
        "rule": rule,
        "at_its_fidelity": _gain(table, fastest, rule),
        "in_its_time": _gain(table, nearest, rule),
    }


def _gain(table: Table, name: str, rule: str) -> Figures:
    def shared(unit: str) -> Figures | None:
        columns = table.column(name, "mean_kl"), table.column(unit, "mean_kl")
        return _dict(share(*columns, questions=table.questions))

    return {
        "method": name,
        "times_faster_than_full": _times(table, FULL, name),
        "times_faster_than_rule": _times(table, rule, name),
        "mean_kl_share_of_rule": shared(rule),
        "mean_kl_share": shared(REUSE),
    }


def _spread(seconds: Sequence[float]) -> Figures:
    return {"median": float(np.median(seconds)), "p95": float(np.percentile(seconds, 95))}


def _dict(interval: Interval | None) -> Figures | None:
    return None if interval is None else asdict(interval)
