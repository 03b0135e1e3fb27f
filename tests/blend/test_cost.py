"""The cost model: what it counts, what it chooses, and that a kept one is kept."""

from __future__ import annotations

import json
import time
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blendserve.blend import cost
from blendserve.blend.cost import CostModel, calibrated, choose, measure, nonnegative_least_squares
from blendserve.blend.layout import Layout
from blendserve.blend.policies.base import make_policy
from blendserve.blend.prefill import prefill
from blendserve.blend.work import Work, work_of
from blendserve.config import BlendConfig, Method
from blendserve.core import Prompt
from tests.support.blending import lay, some_prompt
from tests.support.models import tiny_adapter

LAYERS = 4
MODEL = CostModel(per_pass=0.01, per_row=1e-3, per_pair=1e-6, per_loaded=1e-5)


def layout(sizes: list[int], found: bool = True) -> tuple[Prompt, Layout]:
    prompt = some_prompt(sizes)
    return prompt, lay(tiny_adapter("llama"), prompt, [found] * len(sizes), prefix=found)


@pytest.mark.parametrize("policy", ["none", "all", "random", "chunk_head", "query", "deviation"])
@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_counts_the_rows_that_a_prefill_runs(policy: str, ratio: float) -> None:
    """Against the prefill's own count of row-layers, which is what `report.cost` is made of."""
    prompt, found = layout([30, 40, 20])
    blend = BlendConfig(policy=policy, ratio=ratio)
    ran = prefill(tiny_adapter("llama"), prompt, found, blend).cost * len(prompt)
    # the check layer runs all rows through its projection only: the prefill counts them there, the cost model does not
    tolerance = int(found.reusable.sum()) / LAYERS if policy == "deviation" else 1e-9
    assert work_of(found, make_policy(blend), LAYERS).rows == pytest.approx(ran, abs=tolerance)


def test_counts_pairs_and_loads() -> None:
    _, none = layout([30, 40, 20], found=False)
    n = none.n_tokens
    assert work_of(none, make_policy(BlendConfig()), LAYERS) == Work(1, n, n * (n + 1) / 2, 0)
    _, all_found = layout([30, 40, 20])
    assert (
        work_of(all_found, make_policy(BlendConfig(policy="none")), LAYERS).loaded == n - all_found.n_suffix
    )


def test_chooses_the_cheapest_and_favours_exactness() -> None:
    _, full = layout([90, 90], found=False)
    _, blended = layout([90, 90])
    layouts: dict[Method, Layout] = {"full": full, "prefix": full, "blend": blended}
    assert choose(MODEL, layouts, BlendConfig(), LAYERS) == ("blend", "")
    dear_loading = CostModel(0.01, 1e-3, 1e-6, 1.0)
    method, why = choose(dear_loading, layouts, BlendConfig(), LAYERS)
    assert method in {"full", "prefix"}
    assert "was estimated to take" in why
    level = CostModel(1.0, 0.0, 0.0, 0.0)  # nothing to gain: blending may not win on a tie
    assert choose(level, layouts, BlendConfig(policy="none"), LAYERS)[0] != "blend"


def test_measures_costs_that_are_not_negative() -> None:
    model = measure(tiny_adapter("llama"), repeats=1)
    assert min(model.per_pass, model.per_row, model.per_pair, model.per_loaded) >= 0
    assert model.seconds(Work(1, 200, 20_000, 0)) > 0


def test_a_slow_second_spoils_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that knows what work takes, and says thrice as much for one stretch of prefills, wherever it lies."""
    calls = 9  # of each round
    for slow_from in range(0, 2 * calls, 4):
        now, prefills = [0.0], [0]

        def timed(adapter: Any, prompt: Prompt, found: Layout, blend: BlendConfig) -> Any:
            slow = slow_from <= prefills[0] < slow_from + calls  # noqa: B023
            prefills[0] += 1  # noqa: B023
            seconds = MODEL.seconds(work_of(found, make_policy(blend), LAYERS))
            now[0] += seconds * (3 if slow else 1)  # noqa: B023
            return SimpleNamespace(logits=[0.0])

        monkeypatch.setattr(cost, "prefill", timed)
        monkeypatch.setattr(time, "perf_counter", lambda: now[0])  # noqa: B023
        assert astuple(measure(tiny_adapter("llama"))) == pytest.approx(astuple(MODEL), rel=1e-3)
        assert prefills[0] == 3 * calls


def test_a_kept_model_is_read_a_damaged_one_is_measured_anew(tmp_path: Path) -> None:
    said: list[str] = []
    first = calibrated(tiny_adapter("llama"), "f", tmp_path, said.append)
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "per_row": 0.125}))
    assert calibrated(tiny_adapter("llama"), "f", tmp_path, said.append).per_row == 0.125
    assert len(said) == 1
    file.write_text("{")
    assert calibrated(tiny_adapter("llama"), "f", tmp_path, said.append).per_row != 0.125
    assert calibrated(tiny_adapter("llama"), "other", tmp_path, said.append) != first
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert calibrated(tiny_adapter("llama"), "f", tmp_path / "file" / "below", lambda _: None).per_pass >= 0


def test_least_squares_without_negative_constants_meets_the_conditions_of_an_optimum() -> None:
    """Kuhn and Tucker: the gradient is zero where x > 0, and not negative where x = 0."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, b = rng.normal(size=(9, 4)), rng.normal(size=9)
        x = nonnegative_least_squares(a, b)
        gradient = a.T @ (a @ x - b)
        assert (x >= 0).all()
        assert (gradient > -1e-9).all()
        assert np.abs(gradient[x > 0]).max(initial=0) < 1e-9
