"""Ranks of tensor parallelism have some of the heads each, and must do the same work."""

from __future__ import annotations

import pytest

from blendserve.config import BlendConfig
from tests.support.vllm import World, kl, ranks

SAME = 1e-5  # KL to rounding
RANKS = [("llama", ranks(n)) for n in (2, 3)]


@pytest.mark.parametrize("world", RANKS, indirect=True, ids=["2 ranks", "3 ranks"])
def test_ranks_choose_the_same_tokens_and_leave_out_the_same_chunks(world: World) -> None:
    served, ids = world.served, world.prompt(0, 1, 2, 3)
    for blend in (
        BlendConfig(method="blend"),
        BlendConfig(method="blend", policy="deviation", correction="ridge"),
    ):
        own = world.own.prefill(ids, blend)
        answer = served.one(ids, blend.model_dump(exclude_unset=True))
        rows = served.llm.collective_rpc("blend_rows")
        assert all(each == rows[0] for each in rows)
        assert len(set(rows[0]) & world.own.chosen(own)) == own.report.tokens_recomputed
        assert kl(own.result.logits.log_softmax(-1), answer.logprobs) < SAME
    served.llm.collective_rpc("break_store", args=(1,))
    plain = served.one(ids)
    assert plain.report.get("tokens_approximate", 0) == 0
    assert kl(world.full(ids), plain.logprobs) < SAME
    served.llm.collective_rpc("break_store", args=(-1,))
    assert served.one(ids).report["tokens_approximate"] > 0
