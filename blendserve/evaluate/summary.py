"""Predictions to metrics.json: every mean with its interval, every method against full prefill and full reuse.

Fidelity is the mean KL as a share of full reuse's (stats.ratio_of_means). A mean hides single prompts that get worse:
the tail is a method's KL over another's, prompt by prompt, both at least KL_FLOOR.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

SCORES = ("score", "f1", "em", "rouge_l", "agreement", "identical", "first_kl", "mean_kl")
COUNTS = ("tokens_prompt", "tokens_recomputed", "tokens_computed", "tokens_exact", "bytes_loaded", "cost")
STAGES = ("ttft", "prefill", "load", "select", "correct", "decode", "refine", "gap")
# Nats. Below it a ratio compares rounding errors: two exact computations in bf16 (method `transformers`) differ by about
# this much, and no event's probability differs by more than 4 points (Pinsker: sqrt(KL / 2)).
KL_FLOOR = 3e-3


class Predictions:
    """Predictions of the prompts that every method has answered, in one order of prompts."""

    def __init__(
        self,
        records: Mapping[tuple[str, str], Record],
        question_of: Mapping[str, str],
        methods: Sequence[MethodSpec],
    ) -> None:
        """records: by prompt id and method; question_of: prompt id -> question id.

        Raises InputError when no prompt is complete.
        """
        names = [method.name for method in methods]
        self.ids = [i for i in question_of if all((i, name) in records for name in names)]
        if not self.ids:
            raise InputError("no question was answered by every method: there is nothing to compare yet")
        self.questions = [question_of[i] for i in self.ids]
        self.methods = tuple(methods)
        self.records = {name: [records[i, name] for i in self.ids] for name in names}

    def column(self, method: str, field: str) -> NDArray[np.float64]:
        """A number per prompt."""
        return np.array([record[field] for record in self.records[method]], float)

    def seconds(self, method: str, stage: str = "ttft") -> NDArray[np.float64]:
        """Seconds of a stage per prompt; 0 where a method has no such stage."""
        return np.array([record["seconds"].get(stage, 0.0) for record in self.records[method]], float)

    def mean(self, values: NDArray[Any]) -> Interval:
        return stats.mean(values, self.questions)

    def kl_ratio(self, method: str, unit: str, field: str = "mean_kl") -> Interval | None:
        """mean KL / another method's."""
        return stats.ratio_of_means(self.column(method, field), self.column(unit, field), self.questions)

    def ttft_ratio(self, method: str, unit: str) -> Interval | None:
        """median TTFT / another method's."""
        return stats.ratio_of_medians(self.seconds(method), self.seconds(unit), self.questions)


def summarize(predictions: Predictions, metric: str) -> Metrics:
    """All measurements of metrics.json. metric: name of `score` (tasks.py)."""
    found = zip(predictions.questions, predictions.records[FULL], strict=True)
    recall = [(record["recall"], question) for question, record in found if record["recall"] is not None]
    exact = [m.name for m in predictions.methods if _is_exact(m) and m.name != FULL]
    rounding = [predictions.column(name, "mean_kl") for name in exact]
    return {
        "questions": len(set(predictions.questions)),
        "prompts": len(predictions.ids),
        "recall": stats.mean(*zip(*recall, strict=True)) if recall else None,
        "kl_floor": KL_FLOOR,
        "kl_rounding": float(np.percentile(rounding, 95)) if rounding else None,
        "methods": {m.name: _method(predictions, m, metric) for m in predictions.methods},
    }


def _method(predictions: Predictions, method: MethodSpec, metric: str) -> Metrics:
    name = method.name
    records = predictions.records[method.name]
    counts = {count: float(np.mean(predictions.column(name, count))) for count in COUNTS}
    times = {stage: predictions.seconds(name, stage) for stage in STAGES}
    sizes = [record["kv"] for record in records if record.get("kv")]
    against_full = predictions.column(name, "score") - predictions.column(FULL, "score")
    found: Metrics = {
        **{part: getattr(method, part) for part in ("kind", "series", "ratio", "codec", "uncoded")},
        **{score: predictions.mean(predictions.column(name, score)) for score in SCORES},
        "score_against_full": predictions.mean(against_full),
        **{f"{kl}_share": predictions.kl_ratio(name, REUSE, kl) for kl in ("first_kl", "mean_kl")},
        "tails": [tail(predictions, name, o) for o in opponents(method) if o in predictions.records],
        **counts,
        "share_recomputed": counts["tokens_recomputed"] / counts["tokens_prompt"],
        "kv_smaller": sum(s["raw_bytes"] for s in sizes) / sum(s["bytes"] for s in sizes) if sizes else None,
        "seconds": {
            stage: {"median": float(np.median(s)), "p95": float(np.percentile(s, 95))}
            for stage, s in times.items()
        },
        "times_faster": predictions.ttft_ratio(FULL, name),
    }
    if metric == PERPLEXITY:  # exp of a mean negative log-likelihood, and so are the ends of its interval
        for interval in (found["score"], found["score_against_full"]):
            interval |= {part: float(np.exp(interval[part])) for part in ("mean", "low", "high")}
    if (exact := method.unedited) and exact in predictions.records:
        found["edited"] = {
            "kind": method.edit,
            "mean_kl_times": predictions.kl_ratio(name, exact),
            "ttft_times": predictions.ttft_ratio(name, exact),
        }
    if "says_rival" in records[0]:
        found["facts"] = _facts(predictions, name)
    return found


def _facts(predictions: Predictions, name: str) -> Metrics:
    """Answers with the stale and with the current value, over the facts that full prefill answers right."""
    records = predictions.records[name]
    known = [r for r, full in zip(records, predictions.records[FULL], strict=True) if full["says_gold"]]
    return {
        "questions": len(known),
        "says_rival": sum(record["says_rival"] for record in known),
        "says_gold": sum(record["says_gold"] for record in known),
        "says_rival_of_all": sum(record["says_rival"] for record in records),
    }


def opponents(method: MethodSpec) -> list[str]:
    """The methods that a tail compares with: full reuse, the same without correction, the same over exact hits."""
    if _is_exact(method) or method.name == REUSE:
        return []
    return list(dict.fromkeys(name for name in (REUSE, method.uncorrected, method.unedited) if name))


def tail(predictions: Predictions, name: str, other: str) -> Metrics:
    """Fraction of prompts that get worse, 95th percentile and largest ratio of the KLs, and the prompt of that."""
    kls, others = (np.maximum(predictions.column(method, "mean_kl"), KL_FLOOR) for method in (name, other))
    ratios = kls / others
    return {
        "against": other,
        "worse": predictions.mean(ratios > 1),
        "p95": float(np.percentile(ratios, 95)),
        "worst": float(ratios.max()),
        "prompt": predictions.ids[int(ratios.argmax())],
    }


def _is_exact(method: MethodSpec) -> bool:
    """Whether a method gives full prefill's numbers, but for rounding."""
    return method.codec is None and method.kind in (FULL, TRANSFORMERS, EXACT, "prefix")
