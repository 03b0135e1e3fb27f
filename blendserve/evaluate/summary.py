"""Predictions to metrics.json: every mean with its interval, every method against full prefill and full reuse.

Fidelity is the mean KL as a share of full reuse's (stats.ratio_of_means). A mean hides single prompts that get worse:
the tail is a method's KL over another's, prompt by prompt, both at least KL_FLOOR.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blendserve.errors import InputError
from blendserve.evaluate import stats
from blendserve.evaluate.methods import EXACT, FULL, REUSE, TRANSFORMERS, MethodSpec
from blendserve.evaluate.stats import Interval
from blendserve.evaluate.tasks import PERPLEXITY

Record = Mapping[str, Any]
Metrics = dict[str, Any]

SCORES = ("f1", "em", "rouge_l", "agreement", "identical", "first_kl", "mean_kl")
COUNTS = ("tokens_prompt", "tokens_recomputed", "tokens_computed", "tokens_exact", "bytes_loaded", "cost")
STAGES = ("ttft", "prefill", "load", "select", "correct", "decode")
# Nats. Below it a ratio compares rounding errors: two exact computations in bf16 (method `transformers`) differ by about
# this much, and no event's probability differs by more than 4 points (Pinsker: sqrt(KL / 2)).
KL_FLOOR = 3e-3
WORST = 5  # prompts that are listed


class Predictions:
    """Predictions of the prompts that every method has answered, in one order of prompts."""

    def __init__(
        self,
        records: Mapping[tuple[str, str], Record],
        question_of: Mapping[str, str],
        methods: Sequence[MethodSpec],
    ) -> None:
        """question_of: prompt id -> question id. Raises InputError when no prompt is complete."""
        names = [method.name for method in methods]
        self.ids = [i for i in question_of if all((i, name) in records for name in names)]
        if not self.ids:
            raise InputError("no question was answered by every method: there is nothing to compare yet")
        self.questions = [question_of[i] for i in self.ids]
        self.methods = tuple(methods)
        self._records = {name: [records[i, name] for i in self.ids] for name in names}

    def __contains__(self, method: object) -> bool:
        return method in self._records

    def records(self, method: str) -> list[Record]:
        """A method's predictions, one a prompt."""
        return self._records[method]

    def column(self, method: str, field: str) -> NDArray[np.float64]:
        """A number a prompt."""
        return np.array([record[field] for record in self._records[method]], float)

    def seconds(self, method: str, stage: str) -> NDArray[np.float64]:
        """Seconds of a stage, one a prompt; 0 where a method has no such stage."""
        return np.array([record["seconds"].get(stage, 0.0) for record in self._records[method]], float)

    def mean(self, method: str, field: str, minus: str | None = None) -> Metrics:
        """The mean with its interval; with `minus`, of the paired difference to that method."""
        values = self.column(method, field)
        if minus is not None:
            values = values - self.column(minus, field)
        return asdict(stats.mean(values, self.questions))

    def kl_ratio(self, method: str, unit: str, field: str = "mean_kl") -> Metrics | None:
        """mean KL / another method's."""
        return _dict(
            stats.ratio_of_means(self.column(method, field), self.column(unit, field), self.questions)
        )

    def ttft_ratio(self, method: str, unit: str) -> Metrics | None:
        """median TTFT / another method's."""
        ttft, base = (self.seconds(name, "ttft") for name in (method, unit))
        return _dict(stats.ratio_of_medians(ttft, base, self.questions))


def summarize(predictions: Predictions, metric: str, rule: str) -> Metrics:
    """All measurements of metrics.json. metric: name of `score` (tasks.py); rule: the method of the headline."""
    full = predictions.records(FULL)
    known = [n for n, record in enumerate(full) if record["recall"] is not None]
    recall = (
        stats.mean([full[n]["recall"] for n in known], [predictions.questions[n] for n in known])
        if known
        else None
    )
    exact = [m for m in predictions.methods if _is_exact(m) and m.name != FULL]
    rounding = [predictions.column(m.name, "mean_kl") for m in exact]
    return {
        "questions": len(set(predictions.questions)),
        "prompts": len(predictions.ids),
        "recall": _dict(recall),
        "kl_floor": KL_FLOOR,
        "kl_rounding": float(np.percentile(rounding, 95)) if rounding else None,
        "methods": {m.name: _method(predictions, m, metric) for m in predictions.methods},
        "headline": headline(predictions, rule) if rule in predictions else None,
    }


def _method(predictions: Predictions, method: MethodSpec, metric: str) -> Metrics:
    name, records = method.name, predictions.records(method.name)
    ttft = {stage: predictions.seconds(name, stage) for stage in STAGES}
    found: Metrics = {
        **{part: getattr(method, part) for part in ("kind", "series", "ratio", "codec", "uncoded")},
        **{score: predictions.mean(name, score) for score in SCORES},
        **{f"{kl}_share": predictions.kl_ratio(name, REUSE, kl) for kl in ("first_kl", "mean_kl")},
        "tails": [tail(predictions, name, other) for other in opponents(method) if other in predictions],
        **{count: float(np.mean(predictions.column(name, count))) for count in COUNTS},
        "kv_smaller": _compression(records),
        "seconds": {
            stage: {"median": float(np.median(s)), "p95": float(np.percentile(s, 95))}
            for stage, s in ttft.items()
        },
        "times_faster": predictions.ttft_ratio(FULL, name),
        "against_full": {score: predictions.mean(name, score, FULL) for score in ("f1", "em", "rouge_l")},
        **_score(predictions, name, metric),
    }
    if (exact := method.unedited) and exact in predictions:
        found["edited"] = {
            "kind": method.edit,
            "mean_kl_times": predictions.kl_ratio(name, exact),
            "ttft_times": predictions.ttft_ratio(name, exact),
            "fresh": float(np.mean(predictions.column(name, "tokens_computed"))),
        }
    if "says_rival" in records[0]:
        found["facts"] = _facts(predictions, name)
    return found


def _score(predictions: Predictions, name: str, metric: str) -> Metrics:
    """The data set's own metric, and the paired difference to full prefill's; for perplexity their ratio.

    Perplexity is exp of a mean negative log-likelihood, and so are the ends of its interval.
    """
    found = {
        "score": predictions.mean(name, "score"),
        "score_against_full": predictions.mean(name, "score", minus=FULL),
    }
    if metric == PERPLEXITY:
        for interval in found.values():
            interval |= {part: float(np.exp(interval[part])) for part in ("mean", "low", "high")}
    return found


def _facts(predictions: Predictions, name: str) -> Metrics:
    """Answers with the stale and with the current value, over the facts that full prefill answers right."""
    records = predictions.records(name)
    known = [r for r, full in zip(records, predictions.records(FULL), strict=True) if full["says_gold"]]
    return {
        "questions": len(known),
        "says_rival": sum(record["says_rival"] for record in known),
        "says_gold": sum(record["says_gold"] for record in known),
        "says_rival_of_all": sum(record["says_rival"] for record in records),
    }


def _compression(records: Sequence[Record]) -> float | None:
    """Uncoded bytes / bytes of the chunks' records, over all prompts; None without a codec."""
    sizes = [kv for record in records if (kv := record.get("kv"))]
    return sum(kv["raw_bytes"] for kv in sizes) / sum(kv["bytes"] for kv in sizes) if sizes else None


def opponents(method: MethodSpec) -> list[str]:
    """The methods that a tail compares with: full reuse, the same without correction, the same over exact hits."""
    if _is_exact(method) or method.name == REUSE:
        return []
    return list(dict.fromkeys(name for name in (REUSE, method.uncorrected, method.unedited) if name))


def tail(predictions: Predictions, name: str, other: str) -> Metrics:
    """Fraction of prompts that get worse, 95th percentile and largest ratio, and the worst prompts."""
    kls, others = (predictions.column(method, "mean_kl") for method in (name, other))
    ratios, ids = np.maximum(kls, KL_FLOOR) / np.maximum(others, KL_FLOOR), predictions.ids
    worst = sorted(range(len(ids)), key=lambda n: (-ratios[n], ids[n]))[:WORST]
    return {
        "against": other,
        "worse": asdict(stats.mean(ratios > 1, predictions.questions)),
        "p95": float(np.percentile(ratios, 95)),
        "worst": float(ratios.max()),
        "prompts": [
            {"id": ids[n], "ratio": float(ratios[n]), "mean_kl": float(kls[n]), "other": float(others[n])}
            for n in worst
        ],
    }


def headline(predictions: Predictions, rule: str) -> Metrics:
    """The fastest method at the rule's fidelity, and the most faithful one in its time.

    By mean KL and median TTFT as measured; the intervals say how sure that is.
    """
    kl = {m.name: float(np.mean(predictions.column(m.name, "mean_kl"))) for m in predictions.methods}
    ttft = {m.name: float(np.median(predictions.seconds(m.name, "ttft"))) for m in predictions.methods}
    blends = [m.name for m in predictions.methods if m.kind not in (FULL, TRANSFORMERS, EXACT)]
    fastest = min((n for n in blends if kl[n] <= kl[rule]), key=lambda n: (ttft[n], n))
    nearest = min((n for n in blends if ttft[n] <= ttft[rule]), key=lambda n: (kl[n], n))
    gains = {
        part: {
            "method": name,
            "times_faster_than_full": predictions.ttft_ratio(FULL, name),
            "times_faster_than_rule": predictions.ttft_ratio(rule, name),
            "mean_kl_share_of_rule": predictions.kl_ratio(name, rule),
            "mean_kl_share": predictions.kl_ratio(name, REUSE),
        }
        for part, name in (("at_its_fidelity", fastest), ("in_its_time", nearest))
    }
    return {"rule": rule, **gains}


def _is_exact(method: MethodSpec) -> bool:
    """But for rounding."""
    return method.codec is None and method.kind in (FULL, TRANSFORMERS, EXACT, "prefix")


def _dict(interval: Interval | None) -> Metrics | None:
    return None if interval is None else asdict(interval)
