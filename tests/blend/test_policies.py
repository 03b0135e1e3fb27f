"""Choosing and drawing; what policies choose in a prefill is in test_differential.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.blend.layout import Layout
from blendserve.blend.policies.base import make_policy, top
from blendserve.config import BlendConfig
from tests.support.blending import lay, some_prompt
from tests.support.models import tiny_adapter


def chosen(layout: Layout, **options: Any) -> list[int]:
    scene: Any = SimpleNamespace(scores=None)
    return [int(at) for at in make_policy(BlendConfig(**options)).choose(layout, scene)]


@given(st.lists(st.sampled_from([-2.0, 0.0, 0.5, 3.0, float("-inf")]), max_size=20), st.integers(0, 25))
def test_top_is_the_largest_with_earlier_ones_first(scores: list[float], n: int) -> None:
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    assert top(torch.tensor(scores), n).tolist() == sorted(ranked[:n])


def test_random_is_seeded_and_keeps_to_reusable_tokens() -> None:
    layout = lay(tiny_adapter("llama"), some_prompt([30, 30, 30], suffix=3))
    draws = [chosen(layout, policy="random", ratio=0.2, seed=seed) for seed in range(200)]
    assert draws[0] == chosen(layout, policy="random", ratio=0.2, seed=0)
    assert draws[0] != draws[1]
    counts = torch.bincount(torch.tensor(draws).flatten(), minlength=layout.n_tokens)
    assert all(len(set(draw)) == 18 for draw in draws)
    assert counts[~layout.reusable].sum() == 0
    # 200 draws with p = 18 / 60: 60 expected, standard deviation 6.5
    assert counts[layout.reusable].min() > 30
    assert counts[layout.reusable].max() < 90
