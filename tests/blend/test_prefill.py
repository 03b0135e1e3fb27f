"""What a prefill costs and leaves room for; its values are in test_differential.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from blendserve.blend import prefill as module
from blendserve.config import BlendConfig
from blendserve.kernels import race, verify
from blendserve.kernels.cpu.isa import LEVELS
from blendserve.models.adapter import Adapter
from blendserve.models.kv_cache import KVCache
from tests.support.blending import assert_near, blend, lay, model_logits, some_prompt
from tests.support.models import KINDS, tiny_adapter

POLICIES = ["query", "deviation", "chunk_head", "random", "none", "all"]


class Poisoned(KVCache):
    """A cache in which a slot that is read before it is written shows."""

    def __init__(self, adapter: Adapter, capacity: int) -> None:
        super().__init__(adapter, capacity)
        self.keys.fill_(float("nan"))
        self.values.fill_(float("nan"))


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "KVCache", Poisoned)
        yield


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_that_fills_the_context_to_the_last_token(name: str, policy: str) -> None:
    adapter = tiny_adapter(name)
    prompt = some_prompt([90, 80, 75], prefix=8, suffix=3)
    assert len(prompt) == adapter.context_limit
    done = blend(adapter, prompt, policy=policy, ratio=0.1)
    assert torch.isfinite(done.logits).all()
    if policy == "all":
        assert_near(done.logits, model_logits(adapter, prompt))


def test_cost_counts_the_rows_of_every_layer() -> None:
    adapter, prompt = tiny_adapter("llama"), some_prompt([10, 20, 20], prefix=5, suffix=5)
    n, depth = len(prompt), adapter.n_layers
    kept = round(0.1 * 50)
    costs = {
        "none": 5 * depth,
        "random": (5 + kept) * depth,
        "query": (5 + kept) * depth + 5 * depth,  # and the probe's pass
        "deviation": (5 + 40) * 2 + (5 + kept) * (depth - 2),  # layers 0 and 1 run dense
        "all": (5 + 40) * depth,
    }
    got = {policy: blend(adapter, prompt, policy=policy, ratio=0.1).cost * n * depth for policy in costs}
    assert got == pytest.approx(costs)


def test_leaves_room_for_the_answer() -> None:
    adapter, prompt = tiny_adapter("llama"), some_prompt([4, 5])
    done = module.prefill(adapter, prompt, lay(adapter, prompt), BlendConfig(), new_tokens=7)
    assert done.cache.capacity == len(prompt) + 7


@pytest.mark.skipif(
    not any(verify.cpu_status(level).active for level in LEVELS.values() if level.dtype == "bfloat16"),
    reason="no kernels for bf16",
)
@pytest.mark.parametrize("name", KINDS)
def test_a_stored_prefix_changes_no_bit_where_compiled_kernels_serve(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's bits do not depend on the rows beside it, so neither on who was computed before."""
    monkeypatch.setenv(race.SWITCH, "0")
    adapter, prompt = tiny_adapter(name, torch.bfloat16), some_prompt([120, 9, 60], prefix=20, suffix=14)
    nothing = blend(adapter, prompt, lay(adapter, prompt, [False] * 3, prefix=False), ratio=1.0)
    prefix = blend(adapter, prompt, lay(adapter, prompt, [True, False, False]), method="prefix")
    assert torch.equal(nothing.logits, prefix.logits)
