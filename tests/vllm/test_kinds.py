"""Families beside Llama: biases, norms of queries and keys, sliding windows with angles of their own, experts."""

from __future__ import annotations

import pytest

from blendserve.config import BlendConfig
from tests.support.vllm import World, kl, words

SAME = 1e-5  # KL to rounding
KINDS = ["qwen2", "qwen3", "gemma3_text", "qwen3_moe"]


@pytest.mark.parametrize("world", KINDS, indirect=True)
@pytest.mark.parametrize(
    "blend",
    [
        BlendConfig(method="blend"),
        BlendConfig(method="blend", policy="deviation", ratio=0.15, correction="ridge"),
    ],
    ids=lambda blend: str(blend.policy),
)
def test_the_first_token_is_that_of_our_engine(world: World, blend: BlendConfig) -> None:
    ids = world.prompt(0, 1, words(100, 5), 2, 3)
    own = world.own.prefill(ids, blend)
    answer = world.served.one(ids, blend.model_dump(exclude_unset=True))
    assert answer.report["tokens_recomputed"] == own.report.tokens_recomputed
    assert answer.report["tokens_approximate"] == own.report.tokens_reused
    assert kl(own.result.logits.log_softmax(-1), answer.logprobs) < SAME
    assert kl(world.full(ids), answer.logprobs) > 10 * SAME  # it is blended
