"""What vLLM computes from stored chunks is what blendserve's own engine computes from them."""

from __future__ import annotations

import pytest

from blendserve.config import BlendConfig
from blendserve.registry import FULL_REUSE
from tests.support.vllm import kl
from tests.vllm.conftest import World

METHODS = {
    "reuse": BlendConfig(method="reuse", **FULL_REUSE),
    "query": BlendConfig(method="blend", policy="query", ratio=0.1, correction="none"),
    "prior": BlendConfig(method="blend"),
    "deviation": BlendConfig(method="blend", policy="deviation", ratio=0.15, correction="none"),
    "gradual": BlendConfig(
        method="blend", policy="deviation", ratio=0.2, correction="ridge", check_layers=(1, 2)
    ),
    "chunk_head": BlendConfig(method="blend", policy="chunk_head", ratio=0.1, correction="shift"),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_first_token_is_that_of_our_engine(world: World, name: str) -> None:
    blend = METHODS[name]
    ids = world.prompt(0, 1, (5, 6, 7, 8, 9) * 4, 2, 3)
    own = world.own.prefill(ids, blend)
    answer = world.served.one(ids, blend.model_dump(exclude_unset=True))
    assert answer.report.get("error", "") == ""
    rows = set(world.served.runner.rows.tolist())
    reusable = {i for span in own.report.spans for i in range(span.start, span.stop)} - set(
        range(len(world.own.context), len(world.own.context) + 200)
    )
    print(
        name,
        len(rows & reusable),
        len(world.own.chosen(own)),
        kl(own.result.logits.log_softmax(-1), answer.logprobs),
        answer.report,
    )
    assert rows & reusable == world.own.chosen(own)
    assert kl(own.result.logits.log_softmax(-1), answer.logprobs) < 1e-4
