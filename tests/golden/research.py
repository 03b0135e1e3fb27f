"""Numbers that a rewrite must not change: toy evaluations, the simulator, the cost model, fingerprints; no times.

python -m tests.golden.research record    writes evaluate, simulate, cost and fingerprints.json here anew
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from blendserve.config import changed
from blendserve.evaluate.job import Outcome
from blendserve.models.loader import fingerprint
from blendserve.simulate.config import ROUTINGS, SimulateConfig
from blendserve.simulate.metrics import simulate
from tests.support.commands import cli
from tests.support.evaluations import RUNS, predictions, toy_run, untimed
from tests.support.models import TINY, tiny_model

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
    loops = (config, changed(config, requests=changed(config.requests, rate=0.0).model_dump()))
    cells = [cell for loop in loops for cell in simulate(loop)["cells"]]
    assert len(cells) == 2 * len(ROUTINGS)
    return plain([{n: value for n, value in cell.items() if n != "cpu_seconds"} for cell in cells])


def costs() -> Any:
    """What the command says of the examples with the example prices."""
    found = {}
    for example in ("smollm_cpu", "h100_8b"):
        words = ("cost", "-c", EXAMPLES / f"{example}.yaml", "--prices", EXAMPLES / "prices.yaml")
        assert cli(*words).code == 0
        said = cli(*words, "--json").json()
        found[example] = {part: said[part] for part in ("verdicts", "missing", "keep")}
    return found


def evaluations() -> Any:
    found = {}
    for kind in RUNS:
        with TemporaryDirectory() as folder:
            found[kind] = evaluation(toy_run(kind, Path(folder)))
    return found


@torch.no_grad()
def fingerprints(kinds: Iterable[str] = TINY) -> dict[str, Any]:
    """Of models whose weights are made of integers: equal bits on any machine."""
    found = {}
    for kind in kinds:
        made, draw = tiny_model.__wrapped__(kind), np.random.default_rng(0)
        for name, weights in sorted(made.named_parameters()):
            drawn = torch.from_numpy(draw.integers(-(2**15), 2**15, tuple(weights.shape)).astype(np.float32))
            is_norm = weights.dim() == 1 and not name.endswith("bias")
            weights.copy_(is_norm + drawn * 2.0**-17)
        found[kind] = fingerprint(made)
    return {"transformers": transformers.__version__, "kinds": found}


GOLDEN: dict[str, Callable[[], Any]] = {
    **{"evaluate": evaluations, "simulate": simulation, "cost": costs, "fingerprints": fingerprints},
}

if __name__ == "__main__":
    assert sys.argv[1:] == ["record"], __doc__
    for file, make in GOLDEN.items():
        (FOLDER / f"{file}.json").write_text(json.dumps(make(), separators=(",", ":")) + "\n", "utf-8")
