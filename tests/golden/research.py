"""Numbers that a rewrite must not change: toy evaluations, the simulator, the cost model. Times are left out.

python -m tests.golden.research record    writes evaluate.json, simulate.json and cost.json here anew
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from blendserve.cost import CostConfig, report
from blendserve.evaluate.job import Outcome
from blendserve.simulate.config import ROUTINGS, SimulateConfig
from blendserve.simulate.metrics import simulate
from tests.support.evaluations import RUNS, predictions, toy_run, untimed

FOLDER = Path(__file__).parent
EXAMPLES = FOLDER.parents[1] / "configs" / "cost"


def golden(name: str, rel: float = 0.0, abs: float = 0.0) -> Any:
    """What was recorded; each float equals every number within these bounds."""

    def near(digits: str) -> Any:
        return pytest.approx(float(digits), rel=rel, abs=abs)

    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"), parse_float=near)


def plain(value: Any) -> Any:
    """As it comes back from a file."""
    return json.loads(json.dumps(value))


def evaluation(outcome: Outcome) -> Any:
    """Every prediction, and every method's means with their intervals and tails."""
    return plain({"answers": untimed(predictions(outcome)), "methods": untimed(outcome.metrics["methods"])})


def simulation() -> Any:
    """Four ways of routing over tiers that evict, at a rate and in a closed loop."""
    config = SimulateConfig(
        nodes=(3,),
        corpus={"chunks": 3_000, "topic_chunks": 20, "lifetime": 900},
        requests={"number": 2_000, "warm_up": 0.25, "answer_tokens": 4},
        tiers={"memory_bytes": 2e9, "disk_bytes": 4e9, "remote_bytes": 2e10, "precomputed": False},
        compute={"per_answer_token": 0.01, "slowdown": (1.0, 1.4, 1.9)},
    )
    loops = (config, config.with_values(requests=config.requests.with_values(rate=0.0).model_dump()))
    cells = [cell for loop in loops for cell in simulate(loop)["cells"]]
    assert len(cells) == 2 * len(ROUTINGS)
    return plain([{n: value for n, value in cell.items() if n != "cpu_seconds"} for cell in cells])


def costs() -> Any:
    """The examples with the example prices."""
    prices = CostConfig.load(EXAMPLES / "prices.yaml").model_dump(include={"tiers"})
    examples = {name: CostConfig.load(EXAMPLES / f"{name}.yaml") for name in ("smollm_cpu", "h100_8b")}
    found = {name: report(config.with_values(**prices)) for name, config in examples.items()}
    return plain({n: {part: f[part] for part in ("verdicts", "missing", "keep")} for n, f in found.items()})


def evaluations() -> Any:
    found = {}
    for kind in RUNS:
        with TemporaryDirectory() as folder:
            found[kind] = evaluation(toy_run(kind, Path(folder)))
    return found


GOLDEN: dict[str, Callable[[], Any]] = {"evaluate": evaluations, "simulate": simulation, "cost": costs}

if __name__ == "__main__":
    assert sys.argv[1:] == ["record"], __doc__
    for file, make in GOLDEN.items():
        (FOLDER / f"{file}.json").write_text(json.dumps(make(), separators=(",", ":")) + "\n", "utf-8")
