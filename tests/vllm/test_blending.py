"""What vLLM computes from stored chunks is what blendserve's own engine computes from them."""

from __future__ import annotations

import pytest

from blendserve.blend.blender import Prefilled
from blendserve.config import BlendConfig
from blendserve.registry import FULL_REUSE
from tests.support.vllm import World, kl, words

SAME = 1e-5  # KL to rounding
METHODS = {
    "reuse": BlendConfig(method="reuse", **FULL_REUSE),
    "query": BlendConfig(method="blend", policy="query", ratio=0.1, correction="none"),
    "prior": BlendConfig(method="blend"),
    "deviation": BlendConfig(method="blend", policy="deviation", ratio=0.15, correction="none"),
    "gradual": BlendConfig(method="blend", policy="deviation[1,2]", ratio=0.2, correction="ridge"),
    "chunk_head": BlendConfig(method="blend", policy="chunk_head", ratio=0.1, correction="shift"),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_first_token_is_that_of_our_engine(world: World, name: str) -> None:
    """The same tokens are recomputed, and the distribution is the same to rounding."""
    ids = world.prompt(0, 1, words(100, 5), 2, 3)
    own = world.own.prefill(ids, METHODS[name])
    answer = world.served.one(ids, METHODS[name].model_dump(exclude_unset=True))
    assert "error" not in answer.report
    chosen = set(world.served.runner.rows.tolist()) & reused_positions(world, own)
    assert chosen == world.own.chosen(own)
    assert bool(chosen) == (name != "reuse")
    assert kl(own.result.logits.log_softmax(-1), answer.logprobs) < SAME
    assert kl(world.full(ids), answer.logprobs) > 10 * SAME  # it is blended


def test_a_prompt_of_which_vllm_has_cached_a_part(world: World) -> None:
    """Scores need the keys of what is cached: they come from the store, and from a pass over the prompt's beginning."""
    ids = world.prompt(4, 3, words(60, 6), 2, 1, suffix=70)
    whole = world.served.one(ids)
    world.served.one(world.prompt(4, 3, words(60, 6), suffix=70))
    behind = world.served.one(ids, keep=True)
    assert 0 < behind.report["tokens_matched"] < whole.report["tokens_matched"]
    exact = world.full(ids)
    assert kl(exact, behind.logprobs) < 2 * kl(exact, whole.logprobs) + SAME


def reused_positions(world: World, done: Prefilled) -> set[int]:
    """Positions that start from stored KV which is not exact."""
    first = len(world.own.context)
    spans = [span for span in done.report.spans if span["start"] > first]
    return {i for span in spans for i in range(span["start"], span["stop"])}
