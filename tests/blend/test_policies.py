"""Each policy against its formula, computed another way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blendserve.blend.layout import Layout
from blendserve.blend.loader import KVLoader
from blendserve.blend.policies import query
from blendserve.blend.policies.base import Scene, make_policy, top
from blendserve.blend.policies.query import suffix_scores
from blendserve.config import BlendConfig
from blendserve.core import Prompt
from blendserve.models.adapter import Adapter
from blendserve.models.kv_cache import KVCache
from tests.support.blending import assert_near, blend, distance, lay, model_kv, model_says, some_prompt
from tests.support.models import KINDS, TINY, tiny_adapter
from tests.support.scatter import scatter_forward


def chosen(layout: Layout, **options: Any) -> list[int]:
    scene: Any = SimpleNamespace(scores=None)
    return [int(at) for at in make_policy(BlendConfig(**options)).choose(layout, scene)]


@given(st.lists(st.sampled_from([-2.0, 0.0, 0.5, 3.0, float("-inf")]), max_size=20), st.integers(0, 25))
def test_top_is_the_largest_with_earlier_ones_first(scores: list[float], n: int) -> None:
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    assert top(torch.tensor(scores), n).tolist() == sorted(ranked[:n])


@given(st.lists(st.sampled_from([0, 1, 4, 10]), max_size=5), st.floats(0, 1))
def test_the_budget_is_a_share_of_what_was_found(lengths: list[int], ratio: float) -> None:
    prompt = some_prompt(lengths)
    layout = lay(tiny_adapter("llama"), prompt)
    first = next((n for n in lengths if n), 0)
    assert layout.n_found == sum(lengths)
    assert layout.budget(ratio) == min(round(ratio * sum(lengths)), sum(lengths) - first)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.sampled_from([0.0, 0.1, 0.4, 1.0]))
def test_chunk_head_deals_tokens_from_the_heads_round_by_round(lengths: list[int], ratio: float) -> None:
    layout = lay(tiny_adapter("llama"), some_prompt(lengths))
    dealt = [span.start + depth for depth in range(12) for span in layout.reusable_spans if depth < len(span)]
    assert chosen(layout, policy="chunk_head", ratio=ratio) == sorted(dealt[: layout.budget(ratio)])


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


def test_query_takes_the_highest_scores_among_reusable_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = lay(tiny_adapter("llama"), some_prompt([5, 6, 7]))
    scores = torch.arange(float(layout.n_tokens))
    monkeypatch.setattr(query, "suffix_scores", lambda _: scores)
    last = layout.reusable.nonzero()[:, 0].tolist()
    assert chosen(layout, policy="query", ratio=0.3) == last[-layout.budget(0.3) :]


def probe(adapter: Adapter, prompt: Prompt, layout: Layout) -> Tensor:
    rope = adapter.rope(torch.arange(len(prompt)))
    cache = KVCache(adapter, len(prompt))
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("nan"))
    loader = KVLoader(adapter, cache, layout.placements, rope)
    with torch.inference_mode():
        return suffix_scores(Scene(adapter, torch.tensor(prompt.ids), layout, cache, loader, rope))


def score(attentions: Any, values: Tensor) -> Tensor:
    """Sum over layers of the norm over suffix rows of the mean over heads of weight * |value|.

    attentions: the model's own weights, L times [1, H, S, T]; values [L, K, T, D].
    """
    total = torch.zeros(values.shape[2])
    for weights, value in zip(attentions, values, strict=True):
        group = weights.shape[1] // len(value)
        taken = [weights[0, h] * value[h // group].square().sum(-1).sqrt() for h in range(weights.shape[1])]
        total += torch.stack(taken).mean(0).square().sum(0).sqrt()
    return total


@pytest.mark.parametrize("name", TINY)
def test_query_scores_are_the_models_own_attention_where_nothing_is_displaced(name: str) -> None:
    adapter, prompt = tiny_adapter(name), some_prompt([33], suffix=6)
    said = model_says(adapter, prompt.ids, output_attentions=True).attentions
    wanted = score([layer[:, :, -6:] for layer in said], model_kv(adapter, prompt.ids)[1])
    assert_near(probe(adapter, prompt, lay(adapter, prompt)), wanted, 1e-5)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("found", [[True] * 4, [True, False, True, True], [False, True, False, True]])
def test_query_scores_are_the_models_attention_over_displaced_chunks_and_blind_to_missing_ones(
    name: str, found: list[bool]
) -> None:
    adapter, prompt = tiny_adapter(name), some_prompt([9, 10, 0, 11], suffix=3)
    layout = lay(adapter, prompt, found)
    rows = torch.arange(len(prompt) - 3, len(prompt))
    missing = layout.fresh.clone()
    missing[rows] = False
    said, cache = scatter_forward(adapter, prompt, layout, rows, hidden=missing)
    got = probe(adapter, prompt, layout)
    assert_near(got, score(said.attentions, cache.stored_values), 1e-5)
    assert not got[missing].any()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("ratio", [0.1, 0.35])
def test_deviation_picks_by_the_formula_from_two_forward_passes(name: str, ratio: float) -> None:
    adapter, prompt = tiny_adapter(name), some_prompt([12, 14, 16])
    layout = lay(adapter, prompt)
    fresh = model_kv(adapter, prompt.ids)[1][1]  # layer 1, [K, T, D]
    deviation = torch.full((len(prompt),), float("-inf"))
    for span, chunk in list(zip(prompt.spans, prompt.chunks, strict=True))[1:]:
        stored = model_kv(adapter, prompt.prefix + chunk.ids)[1][1][:, len(prompt.prefix) :]
        deviation[span.start : span.stop] = (fresh[:, span.start : span.stop] - stored).pow(2).sum(2).sum(0)
    done = blend(adapter, prompt, layout, policy="deviation", ratio=ratio, correction="none")
    assert done.recomputed.tolist() == top(deviation, layout.budget(ratio)).tolist()


def test_gradual_filtering_narrows_linearly_and_never_takes_a_token_back() -> None:
    adapter, prompt = tiny_adapter("llama"), some_prompt([20, 40, 40], prefix=5, suffix=5)
    layout = lay(adapter, prompt)
    done = blend(adapter, prompt, layout, policy="deviation", ratio=0.2, check_layers=(1, 2, 3))
    rows = [85, 85, 5 + 40, 5 + 30]  # what runs through layers 0 .. 3; 20 go on past the last check
    assert len(done.recomputed) == 20
    assert done.cost == pytest.approx(sum(rows) / (len(prompt) * 4))
    first = blend(adapter, prompt, layout, policy="deviation", ratio=0.4, correction="none")
    assert set(done.recomputed.tolist()) <= set(first.recomputed.tolist())


def test_deviation_beats_chance_at_bringing_values_closer() -> None:
    """A policy that picked the smallest deviations would pass every shape test: this one would see it."""
    adapter, prompt = tiny_adapter("llama"), some_prompt([20, 40, 40])
    values = model_kv(adapter, prompt.ids)[1]
    picked = {
        policy: blend(adapter, prompt, policy=policy, ratio=0.2, correction="none").cache.values[1]
        for policy in ("deviation", "random")
    }
    error = {policy: float((got - values[1]).square().sum()) for policy, got in picked.items()}
    assert error["deviation"] < error["random"]
    assert distance(picked["deviation"], values[1]) > 0
