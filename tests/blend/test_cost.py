"""The cost model: what it counts and chooses, the ratio that loading hides, and its measurement, which is kept."""

from __future__ import annotations

import json
import logging
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.blend import cost
from blendserve.blend.cost import CostModel, Work, calibrated, count_work, measure
from blendserve.blend.layout import Layout
from blendserve.blend.planner import OVERLAP_TARGET, Planner, overlapped_ratio
from blendserve.blend.policies import make_policy
from blendserve.blend.prefill import PrefillPlan
from blendserve.config import BlendConfig
from blendserve.paths import read_cached, write_cached
from tests.support.blending import blend, lay, some_prompt
from tests.support.models import tiny_decoder

LAYERS = 4
MODEL = CostModel(per_pass=0.01, per_row=1e-3, per_pair=1e-6, per_loaded=1e-5)
PROMPT = some_prompt([30, 40, 20])
FOUND = lay(tiny_decoder("llama"), PROMPT)
ABSENT = lay(tiny_decoder("llama"), PROMPT, [False] * 3, prefix=False)
LONG = lay(tiny_decoder("llama"), some_prompt([30, 300, 300]))


def work(layout: Layout, **options: Any) -> Work:
    return count_work(layout, make_policy(BlendConfig(**options)), LAYERS)


def planned(costs: CostModel | None, layout: Layout, **options: Any) -> PrefillPlan:
    blend = BlendConfig(**options)
    return Planner(tiny_decoder("llama"), "f", costs).plan(layout, blend, make_policy(blend))


@pytest.mark.parametrize("policy", ["none", "all", "random", "chunk_head", "query", "deviation"])
@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_counts_the_rows_that_a_prefill_runs(policy: str, ratio: float) -> None:
    ran = blend(tiny_decoder("llama"), PROMPT, FOUND, policy=policy, ratio=ratio).cost * len(PROMPT)
    # The check layer runs all rows through its projection only: the prefill counts them there, the model does not.
    tolerance = FOUND.n_reusable / LAYERS if policy == "deviation" else 1e-9
    assert work(FOUND, policy=policy, ratio=ratio).rows == pytest.approx(ran, abs=tolerance)


def test_counts_the_work_and_chooses_the_cheapest_and_the_exact_method_on_a_tie() -> None:
    n = len(PROMPT)
    assert work(ABSENT) == Work(1, n, n * (n + 1) / 2, 0)
    assert work(FOUND, policy="none").loaded == n - len(PROMPT.suffix)

    def chosen(costs: CostModel, **options: Any) -> str:
        return planned(costs, FOUND, method="auto", **options).blend.method

    assert chosen(MODEL) == "blend"
    assert chosen(CostModel(0.01, 1e-3, 1e-6, 1.0)) != "blend"  # loading is expensive
    assert chosen(CostModel(1.0, 0.0, 0.0, 0.0), policy="none") != "blend"


def test_estimates_full_prefill_of_a_prompt_whatever_is_stored() -> None:
    """By hand: a millisecond a row and a tenth of one a pair; nothing is estimated without a cost model."""
    n, costs = len(PROMPT), CostModel(0.5, 1e-3, 1e-4, 1.0)
    for layout in (FOUND, ABSENT):
        for method in ("blend", "prefix", "auto"):
            plan = planned(costs, layout, method=method)
            assert plan.full_prefill_s == pytest.approx(0.5 + 1e-3 * n + 1e-4 * n * (n + 1) / 2)
    assert planned(None, FOUND, method="blend").full_prefill_s is None


def test_a_slow_second_changes_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock by which one stretch of prefills, wherever it lies, takes three times as long as the model says."""
    calls, now, n_prefills, slow_from = 9, 0.0, 0, 0  # calls: of each round

    def timed(decoder: Any, plan: PrefillPlan) -> Any:
        nonlocal now, n_prefills
        yield
        is_slow = slow_from <= n_prefills < slow_from + calls
        n_prefills += 1
        now += MODEL.seconds(count_work(plan.layout, plan.policy, LAYERS)) * (3 if is_slow else 1)
        return SimpleNamespace(logits=[0.0])

    monkeypatch.setattr(cost, "blend_prefill", timed)
    for first in range(0, 2 * calls, 4):
        n_prefills, slow_from = 0, first
        measured = measure(tiny_decoder("llama"), clock=lambda: now)
        assert astuple(measured) == pytest.approx(astuple(MODEL), rel=1e-3)
        assert n_prefills == 2 + 3 * calls  # two find out how long prompts may be


def test_a_kept_model_is_read_and_a_damaged_one_is_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "blendserve.blend.cost")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = calibrated(tiny_decoder("llama"), "f")
    assert min(astuple(first)) >= 0
    assert first.seconds(Work(1, 200, 20_000, 0)) > 0
    (file,) = (tmp_path / "blendserve" / "profit").iterdir()
    write_cached(file, json.dumps({**json.loads(read_cached(file)), "per_row": 0.125}))
    assert calibrated(tiny_decoder("llama"), "f").per_row == 0.125
    assert len(caplog.records) == 1
    file.write_text("{")
    assert calibrated(tiny_decoder("llama"), "f").per_row != 0.125
    assert len(caplog.records) == 2


@pytest.mark.parametrize("policy", ["deviation", "chunk_head", "random"])
@given(st.floats(0, 0.01), st.floats(0.01, 0.5))
def test_recomputing_takes_nearly_as_long_as_loading(policy: str, token_s: float, floor: float) -> None:
    config = BlendConfig(policy=policy, ratio=f"auto:{floor}")

    def compute(ratio: float) -> float:
        rows_alone = make_policy(config.with_values(policy="random", ratio=ratio))
        return MODEL.seconds(Work(*count_work(LONG, rows_alone, LAYERS)[:-1], loaded=0.0))

    ratio = overlapped_ratio(MODEL, LONG, make_policy(config), token_s)
    loading = OVERLAP_TARGET * token_s * LONG.n_loaded
    highest = (LONG.n_reusable - 1) / LONG.n_found
    assert floor <= ratio <= highest
    slack = 3 * (MODEL.per_row + MODEL.per_pair * LONG.n_tokens)  # the ratio becomes a whole number of rows
    assert ratio == floor or compute(ratio) <= loading + slack
    assert ratio == highest or compute(ratio) >= min(loading, compute(floor)) - slack


def test_the_ratio_stays_at_its_floor_without_a_rate_or_with_a_scoring_pass() -> None:
    for policy, token_s in (("random", None), ("query", 1.0)):
        floor = make_policy(BlendConfig(policy=policy, ratio="auto:0.07"))
        assert overlapped_ratio(MODEL, LONG, floor, token_s) == 0.07
    auto = blend(tiny_decoder("llama"), PROMPT, FOUND, ratio="auto:0.2")
    fixed = blend(tiny_decoder("llama"), PROMPT, FOUND, ratio=0.2)
    assert auto.recomputed.tolist() == fixed.recomputed.tolist()
