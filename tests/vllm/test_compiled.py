"""vLLM in compiled mode: its own steps are compiled, the passes of jobs are not."""

from __future__ import annotations

import pytest

from blendserve.config import BlendConfig
from tests.support.vllm import World, kl

SAME = 1e-4  # KL: compiled layers round otherwise


@pytest.mark.parametrize("world", [("llama", {"enforce_eager": False})], indirect=True, ids=["compiled"])
def test_jobs_beside_compiled_steps(world: World) -> None:
    served, ids = world.served, world.prompt(0, 1, 2, 3)
    for blend in (
        BlendConfig(method="blend"),
        BlendConfig(method="blend", policy="deviation", correction="ridge"),
    ):
        own = world.own.prefill(ids, blend)
        answer = served.one(ids, blend.model_dump(exclude_unset=True))
        assert answer.report["tokens_recomputed"] == own.report.tokens_recomputed
        assert kl(own.result.logits.log_softmax(-1), answer.logprobs) < SAME
    assert kl(world.full(ids), served.one(ids, "exact").logprobs) < SAME
    served.runner.passes.slice_row_layers = 1
    sliced = served.one(ids)
    assert (
        kl(world.own.prefill(ids, BlendConfig(method="blend")).result.logits.log_softmax(-1), sliced.logprobs)
        < SAME
    )
