"""vLLM's prefix cache and its blocks, beside jobs that write into them."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from blendserve.core import TokenIds
from tests.support.vllm import BLOCK, Served, World, kl, words

SAME = 1e-5  # KL to rounding; what blending changes is far above
REUSE = {"method": "reuse"}
HISTORIES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),
        st.sampled_from(["exact", "blend", "reuse"]),
    ),
    min_size=2,
    max_size=5,
)
PARAMS = {"exact": "exact", "blend": None, "reuse": REUSE}


def cached_blocks(served: Served) -> dict[int, list[torch.Tensor]]:
    """The memory of all blocks that a later request may hit, in each layer."""
    blocks = served.scheduler.kv_cache_manager.block_pool.blocks
    numbers = [block.block_id for block in blocks if block.block_hash is not None]
    return {n: [layer.kv_cache[n].clone() for layer in served.runner.passes.layers] for n in numbers}


def fill_free_blocks(served: Served, number: float) -> None:
    """Fill every block that is neither used nor cached."""
    pool = served.scheduler.kv_cache_manager.block_pool
    free = [b.block_id for b in pool.blocks if b.block_hash is None and b.ref_cnt == 0 and not b.is_null]
    assert free
    for layer in served.runner.passes.layers:
        layer.kv_cache[free] = number


def test_exact_and_blended_prompts_in_turns(world: World) -> None:
    """An exact prompt hits exact blocks alone, however often it was blended between; a blended one hits its own."""
    ids = world.prompt(0, 1, 2, 3)
    served, exact = world.served, world.full(ids)
    first = served.one(ids, "exact")
    blended = served.one(ids, keep=True)
    second = served.one(ids, "exact", keep=True)
    again = served.one(ids, keep=True)
    third = served.one(ids, "exact", keep=True)
    assert kl(exact, first.logprobs) < SAME
    assert kl(exact, blended.logprobs) > 10 * SAME  # or nothing below could fail
    assert torch.equal(second.logprobs, third.logprobs)
    assert kl(exact, second.logprobs) < SAME
    assert kl(blended.logprobs, again.logprobs) < SAME
    assert blended.report["tokens_approximate"] > 0
    assert "tokens_matched" not in again.report  # all of it was cached
    assert third.n_cached == second.n_cached >= BLOCK


@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])
@given(HISTORIES)
def test_no_exact_prompt_hits_a_blended_block(world: World, history: list[tuple[list[int], str]]) -> None:
    assert world.served.llm.reset_prefix_cache()
    for chunks, method in history:
        ids = world.prompt(*chunks)
        answer = world.served.one(ids, PARAMS[method], keep=True)
        if method == "exact":
            assert kl(world.full(ids), answer.logprobs) < SAME
        else:
            assert "error" not in answer.report


@settings(max_examples=5, phases=[Phase.explicit, Phase.generate])
@given(HISTORIES, st.integers(0, 60), st.integers(0, 2**16))
def test_free_blocks_may_hold_anything(
    world: World, history: list[tuple[list[int], str]], gap: int, seed: int
) -> None:
    """Free blocks hold NaN: prompts of chunks and gaps give the same numbers, and cached blocks stay as they were."""
    served, rng = world.served, random.Random(seed)
    prompts = []
    for chunks, method in history:
        parts: list[int | TokenIds] = []
        for n in chunks:
            parts += [n, words(rng.randrange(gap + 1), rng.randrange(99))]
        ids = world.prompt(*parts, suffix=rng.randrange(20, 60))
        prompts.append((ids[:-1] if len(ids) % BLOCK == 1 else ids, method))  # else vLLM takes one block more
    assert served.llm.reset_prefix_cache()
    clean = [served.one(ids, PARAMS[method], keep=True) for ids, method in prompts]
    assert served.llm.reset_prefix_cache()
    for (ids, method), expected in zip(prompts, clean, strict=True):
        fill_free_blocks(served, 0.0 if method == "exact" else torch.nan)  # vLLM's own prefill wants numbers
        before = cached_blocks(served)
        answer = served.one(ids, PARAMS[method], keep=True)
        after = cached_blocks(served)
        assert torch.isfinite(answer.logprobs).all()
        assert kl(expected.logprobs, answer.logprobs) < SAME
        for n in before.keys() & after.keys():
            assert all(map(torch.equal, before[n], after[n]))
    fill_free_blocks(served, 0.0)


@pytest.mark.parametrize("params", [None, {"policy": "deviation", "ratio": 0.3}, {"policy": "all"}], ids=str)
def test_a_prefix_that_vllm_has_cached_is_not_chosen_from(world: World, params: object) -> None:
    """Of a prompt that begins like another, tokens behind the common blocks are recomputed, as many as their share."""
    served = world.served
    served.one(world.prompt(0, 1, 2), params)
    answer = served.one(world.prompt(0, 1, 2, 3, 4), params, keep=True)
    n_hit = (len(world.own.context) + sum(len(world.chunks[n]) for n in (0, 1, 2))) // BLOCK * BLOCK
    assert served.runner.rows.min() >= n_hit
    assert answer.report["tokens_matched"] <= len(world.chunks[3]) + len(world.chunks[4]) + BLOCK
    ratio = {"deviation": 0.3, "all": 1.0}.get(params["policy"] if isinstance(params, dict) else "", 0.05)
    assert answer.report["tokens_recomputed"] == pytest.approx(ratio * answer.report["tokens_matched"], abs=1)
