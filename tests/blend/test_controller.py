"""The ratio that loading hides: recomputing takes nearly as long as loading, unless the floor is more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.blend.cost import HIDDEN, MEMORY, CostModel, LoadRate, free_ratio
from blendserve.blend.policies.base import make_policy
from blendserve.blend.work import work_of
from blendserve.config import BlendConfig, changed
from tests.support.blending import blend, lay, some_prompt
from tests.support.models import tiny_adapter

COSTS = CostModel(per_pass=1e-3, per_row=1e-3, per_pair=1e-6, per_loaded=1e-4)
LAYOUT = lay(tiny_adapter("llama"), some_prompt([30, 300, 300]))
LOADED = LAYOUT.n_loaded


def compute(config: BlendConfig, ratio: float) -> float:
    rows_alone = changed(config, policy="random", ratio=ratio)
    return COSTS.seconds(replace(work_of(LAYOUT, make_policy(rows_alone), 4), loaded=0.0))


@pytest.mark.parametrize("policy", ["deviation", "chunk_head", "random"])
@given(st.floats(0, 0.01), st.floats(0.01, 0.5))
def test_recomputing_takes_nearly_as_long_as_loading(
    policy: str, seconds_per_token: float, floor: float
) -> None:
    config = BlendConfig(policy=policy, ratio="auto", floor=floor)
    ratio = free_ratio(COSTS, LAYOUT, config, seconds_per_token)
    loading = HIDDEN * seconds_per_token * LOADED
    highest = (int(LAYOUT.reusable.sum()) - 1) / LAYOUT.n_found
    assert floor <= ratio <= highest
    slack = 3 * (COSTS.per_row + COSTS.per_pair * LAYOUT.n_tokens)  # the ratio becomes a whole number of rows
    if ratio > floor:
        assert compute(config, ratio) <= loading + slack
    if ratio < highest:
        assert compute(config, ratio) >= min(loading, compute(config, floor)) - slack


def test_query_stays_at_its_floor() -> None:
    assert free_ratio(COSTS, LAYOUT, BlendConfig(ratio="auto", floor=0.07), 1.0) == 0.07


def test_the_floor_holds_until_a_load_was_seen() -> None:
    config = BlendConfig(policy="random", ratio="auto", floor=0.07)
    assert free_ratio(COSTS, LAYOUT, config, None) == 0.07


def test_rates_are_a_running_mean() -> None:
    rate = LoadRate()
    rate.record(1.0, 0)
    assert rate.seconds_per_token is None
    rate.record(2.0, 10)
    assert rate.seconds_per_token == 0.2
    rate.record(1.0, 10)
    assert rate.seconds_per_token == pytest.approx(0.2 * (1 - MEMORY) + 0.1 * MEMORY)


def test_auto_alone_recomputes_what_its_floor_does() -> None:
    adapter, prompt = tiny_adapter("llama"), some_prompt([10, 40])
    auto, fixed = (blend(adapter, prompt, **how) for how in ({"ratio": "auto", "floor": 0.2}, {"ratio": 0.2}))
    assert auto.recomputed.tolist() == fixed.recomputed.tolist()
