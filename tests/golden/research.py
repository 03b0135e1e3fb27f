"""Numbers that a rewrite must not change: toy evaluations, the simulator, the cost model. Times are left out.

    python -m tests.golden.research record    writes evaluate.json, simulate.json and cost.json here anew

Names in the files are this module's own: after a rewrite only the functions below change.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from blendserve.config import changed
from blendserve.cost import CostConfig, report
from blendserve.evaluate.job import Outcome
from blendserve.simulate.config import ROUTINGS, SimulateConfig
from blendserve.simulate.metrics import simulate
from tests.support.evaluations import RUNS, predictions, toy_run

FOLDER = Path(__file__).parent
EXAMPLES = FOLDER.parents[1] / "configs" / "cost"
ANSWER = (
    *("tokens", "recomputed", "tokens_prompt", "tokens_exact", "tokens_computed", "bytes_loaded", "kv"),
    *("cost", "first_kl", "mean_kl", "score", "agreement"),
)
INTERVALS = (
    *("mean_kl", "mean_kl_share", "first_kl_share", "f1", "em", "rouge_l", "agreement", "identical"),
    *("score", "score_against_full"),
)


def golden(name: str, rel: float = 0.0, abs: float = 0.0) -> Any:
    """What was recorded; each float equals every number within these bounds."""

    def near(digits: str) -> Any:
        return pytest.approx(float(digits), rel=rel, abs=abs)

    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"), parse_float=near)


def plain(value: Any) -> Any:
    """As it comes back from a file."""
    return json.loads(json.dumps(value))


def evaluation(outcome: Outcome) -> Any:
    """Every prediction, and every method's means with their intervals and tails; of permuted prompts the means alone."""
    with_bounds = outcome.metrics["prompts"] == outcome.metrics["questions"]
    answers = {
        f"{line['id']} {line['method']}": {name: line[name] for name in ANSWER}
        for line in predictions(outcome)
    }
    methods = {
        name: {
            **{i: _interval(found[i], with_bounds) for i in INTERVALS},
            "tails": [{part: tail[part] for part in ("against", "p95", "worst")} for tail in found["tails"]],
            "kv_smaller": found["kv_smaller"],
            "facts": found.get("facts"),
        }
        for name, found in outcome.metrics["methods"].items()
    }
    return plain({"answers": answers, "methods": methods})


def simulation() -> Any:
    """Four ways of routing over tiers that evict, at a rate and in a closed loop."""
    config = SimulateConfig(
        nodes=(3,),
        corpus={"chunks": 3_000, "topic_chunks": 20, "lifetime": 900},
        requests={"number": 2_000, "warm_up": 0.25, "answer_tokens": 4},
        tiers={"memory_bytes": 2e9, "disk_bytes": 4e9, "remote_bytes": 2e10, "precomputed": False},
        compute={"per_answer_token": 0.01, "slowdown": (1.0, 1.4, 1.9)},
    )
    loops = (config, changed(config, requests=changed(config.requests, rate=0.0).model_dump()))
    cells = [cell for loop in loops for cell in simulate(loop)["cells"]]
    assert len(cells) == 2 * len(ROUTINGS)
    return plain([{n: value for n, value in cell.items() if n != "cpu_seconds"} for cell in cells])


def costs() -> Any:
    """The examples with the example prices."""
    prices = CostConfig.load(EXAMPLES / "prices.yaml").model_dump(include={"tiers"})
    examples = {name: CostConfig.load(EXAMPLES / f"{name}.yaml") for name in ("smollm_cpu", "h100_8b")}
    found = {name: report(changed(config, **prices)) for name, config in examples.items()}
    return plain({n: {part: f[part] for part in ("verdicts", "missing", "keep")} for n, f in found.items()})


def evaluations() -> Any:
    found = {}
    for kind in RUNS:
        with TemporaryDirectory() as folder:
            found[kind] = evaluation(toy_run(kind, Path(folder)))
    return found


def _interval(found: Mapping[str, Any] | None, with_bounds: bool) -> Any:
    return found and [
        found[part] for part in (("mean", "low", "high", "n") if with_bounds else ("mean", "n"))
    ]


GOLDEN: dict[str, Callable[[], Any]] = {"evaluate": evaluations, "simulate": simulation, "cost": costs}

if __name__ == "__main__":
    assert sys.argv[1:] == ["record"], __doc__
    for file, make in GOLDEN.items():
        (FOLDER / f"{file}.json").write_text(json.dumps(make(), separators=(",", ":")) + "\n", "utf-8")
