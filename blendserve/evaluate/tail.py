"""What a mean hides: on how many prompts a method is further from full prefill than another one, and by how much.

    ratio of a prompt = max(mean KL of the method, FLOOR) / max(mean KL of the other, FLOOR)

above 1 where the method made it worse. The other is full reuse, for a method with a correction the same without it, and
for one over earlier revisions the same over the passages themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from blendserve.evaluate.intervals import bootstrap
from blendserve.evaluate.methods import EXACT, FULL, REUSE, TRANSFORMERS, MethodSpec

# Nats. A KL below it counts as it, for a ratio of two roundings is no disaster: it is about what two right computations
# in bf16 differ by (method `transformers`); no event's probability is off by more than 4 points (Pinsker: sqrt(KL / 2)).
FLOOR = 3e-3
WORST = 5  # prompts that are listed


def opponents(variant: MethodSpec, names: Sequence[str]) -> list[str]:
    """Those of the methods `names` that a method is set against, prompt by prompt."""
    if _is_exact(variant) or variant.name == REUSE:
        return []
    others = (REUSE, variant.uncorrected, variant.unedited)
    return [other for other in dict.fromkeys(others) if other is not None and other in names]


def tail(
    against: str, ids: Sequence[str], questions: Sequence[str], kls: Sequence[float], others: Sequence[float]
) -> dict[str, Any]:
    """Share of prompts made worse, 95th percentile and largest of the ratios, and the worst prompts.

    All [n] of the same prompts in the same order; questions: of which a prompt is a shuffle, as resampled together.
    """
    ratios = np.maximum(kls, FLOOR) / np.maximum(others, FLOOR)
    worst = sorted(range(len(ids)), key=lambda n: (-ratios[n], ids[n]))[:WORST]
    return {
        "against": against,
        "worse": asdict(bootstrap((ratios > 1).astype(float).tolist(), questions=questions)),
        "p95": float(np.percentile(ratios, 95)),
        "worst": float(ratios.max()),
        "prompts": [
            {"id": ids[n], "ratio": float(ratios[n]), "mean_kl": kls[n], "other": others[n]} for n in worst
        ],
    }


def rounding(variants: Sequence[MethodSpec], kls: Mapping[str, Sequence[float]]) -> float | None:
    """95th percentile of the mean KLs of the methods that are exact but for rounding; None where none of them ran."""
    found = [kl for v in variants if _is_exact(v) and v.name != FULL for kl in kls[v.name]]
    return float(np.percentile(found, 95)) if found else None


def _is_exact(variant: MethodSpec) -> bool:
    """But for rounding."""
    return variant.codec is None and variant.kind in (FULL, TRANSFORMERS, EXACT, "prefix")
