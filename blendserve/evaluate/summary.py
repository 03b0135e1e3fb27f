"""Predictions to figures: every mean with its bootstrap interval, every method against full prefill and the others.

Times are medians and 95th percentiles; fidelity is the mean KL as a share of full reuse's (fidelity.share).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

import numpy as np

from blendserve.errors import InputError
from blendserve.evaluate.fidelity import share, times
from blendserve.evaluate.metrics import Interval, bootstrap, by_group, paired_difference
from blendserve.evaluate.variants import EXACT, FULL, REUSE, TRANSFORMERS, Variant
from blendserve.registry import CACHEBLEND

Line = Mapping[str, Any]
Figures = dict[str, Any]

SCORES = ("f1", "em", "rouge_l", "agreement", "identical", "first_kl", "mean_kl")
COUNTS = ("tokens_prompt", "tokens_recomputed", "tokens_computed", "tokens_exact", "bytes_loaded", "cost")
STAGES = ("ttft", "prefill", "load", "select", "correct", "decode")
PAIRED = ("f1", "agreement", "mean_kl")


class Table:
    """The predictions of the questions that every method has answered, by method, in one order of questions."""

    def __init__(
        self, lines: Mapping[tuple[str, str], Line], ids: Sequence[str], variants: Sequence[Variant]
    ) -> None:
        """Raises InputError when no question is complete."""
        names = [v.name for v in variants]
        self.ids = [i for i in ids if all((i, name) in lines for name in names)]
        if not self.ids:
            raise InputError("no question was answered by every method: there is nothing to compare yet")
        self.variants = tuple(variants)
        self._rows = {name: [lines[i, name] for i in self.ids] for name in names}

    def __contains__(self, method: str) -> bool:
        return method in self._rows

    def rows(self, method: str) -> list[Line]:
        """A method's predictions, one a question."""
        return self._rows[method]

    def column(self, method: str, field: str) -> list[float]:
        """One number a question."""
        return [float(row[field]) for row in self._rows[method]]

    def seconds(self, method: str, stage: str) -> list[float]:
        """A stage's seconds, one a question; 0 for what a method has no stage for."""
        return [float(row["seconds"].get(stage, 0.0)) for row in self._rows[method]]

    @property
    def types(self) -> list[str]:
        return [str(row["type"]) for row in self._rows[FULL]]

    @property
    def recall(self) -> list[float]:
        """Of the questions whose needed titles are known, in the open setting."""
        return [row["recall"] for row in self._rows[FULL] if row["recall"] is not None]


def summarise(table: Table) -> Figures:
    """Everything that metrics.json says of the measurements."""
    names = [v.name for v in table.variants]
    return {
        "questions": len(table.ids),
        "recall": asdict(bootstrap(table.recall)) if table.recall else None,
        "methods": {v.name: {**_kind(v), **_method(table, v.name)} for v in table.variants},
        "pairs": [_pair(table, a, b) for a, b in combinations(names, 2)],
        "headline": headline(table, CACHEBLEND) if CACHEBLEND in table else None,
    }


def _kind(variant: Variant) -> Figures:
    return {
        "kind": variant.kind,
        "curve": variant.curve,
        "ratio": variant.ratio,
        "codec": variant.codec,
        "uncoded": variant.uncoded,
    }


def _method(table: Table, name: str) -> Figures:
    figures: Figures = {score: asdict(bootstrap(table.column(name, score))) for score in SCORES}
    for kl in ("first_kl", "mean_kl"):
        figures[f"{kl}_share"] = _dict(share(table.column(name, kl), table.column(REUSE, kl)))
    figures["mean_kl_tail"] = _tail(table.column(name, "mean_kl"), table.column(REUSE, "mean_kl"))
    figures |= {count: float(np.mean(table.column(name, count))) for count in COUNTS}
    figures["kv_smaller"] = _smaller(table.rows(name))
    figures["seconds"] = {stage: _spread(table.seconds(name, stage)) for stage in STAGES}
    figures["times_faster"] = _dict(times(table.seconds(FULL, "ttft"), table.seconds(name, "ttft")))
    figures["against_full"] = {
        score: asdict(paired_difference(table.column(name, score), table.column(FULL, score)))
        for score in ("f1", "em", "rouge_l")
    }
    if any(table.types):
        figures["f1_by_type"] = {
            kind: asdict(interval)
            for kind, interval in by_group(table.column(name, "f1"), table.types).items()
        }
    return figures


def _tail(kls: Sequence[float], reuse: Sequence[float]) -> Figures:
    """What a mean hides: each question's KL as a share of full reuse's on the same question."""
    shares = [kl / unit for kl, unit in zip(kls, reuse, strict=True) if unit > 0]
    return {
        "p95": float(np.percentile(shares, 95)) if shares else None,
        "worst": max(shares, default=None),
        "above_reuse": sum(share > 1 for share in shares),
    }


def _smaller(rows: Sequence[Line]) -> float | None:
    """How many times smaller than uncoded the chunks' records are, over all questions; None without a codec."""
    taken = [kv for row in rows if (kv := row.get("kv"))]
    return sum(kv["raw_bytes"] for kv in taken) / sum(kv["bytes"] for kv in taken) if taken else None


def _pair(table: Table, a: str, b: str) -> Figures:
    """Differences a - b, question by question."""
    ratio = times(table.seconds(a, "ttft"), table.seconds(b, "ttft"))
    differences = {
        score: asdict(paired_difference(table.column(a, score), table.column(b, score))) for score in PAIRED
    }
    return {"a": a, "b": b, **differences, "ttft_ratio": _dict(ratio)}


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
    ttft, kl = table.seconds(name, "ttft"), table.column(name, "mean_kl")
    return {
        "method": name,
        "times_faster_than_full": _dict(times(table.seconds(FULL, "ttft"), ttft)),
        "times_faster_than_rule": _dict(times(table.seconds(rule, "ttft"), ttft)),
        "mean_kl_share_of_rule": _dict(share(kl, table.column(rule, "mean_kl"))),
        "mean_kl_share": _dict(share(kl, table.column(REUSE, "mean_kl"))),
    }


def _spread(seconds: Sequence[float]) -> Figures:
    return {"median": float(np.median(seconds)), "p95": float(np.percentile(seconds, 95))}


def _dict(interval: Interval | None) -> Figures | None:
    return None if interval is None else asdict(interval)
