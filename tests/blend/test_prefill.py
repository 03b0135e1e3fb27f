"""Full contexts, bits, selection, stacked chunks, own policies; what a prefill computes is in test_differential.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from blendserve.blend.chunk_kv import STACK_TOKENS, ChunkComputer
from blendserve.blend.policies.base import make_policy, top
from blendserve.blend.prefill import blend_prefill
from blendserve.config import BlendConfig
from blendserve.core import run
from blendserve.kernels import selfcheck
from blendserve.kernels.cpu.isa import LEVELS
from tests.support.blending import assert_near, blend, lay, model_logits, some_ids, some_prompt
from tests.support.models import KINDS, tiny_adapter

HAS_BF16 = any(selfcheck.cpu_status(level).active for level in LEVELS.values() if level.dtype == "bfloat16")


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_that_fills_the_context_to_the_last_token(name: str) -> None:
    adapter = tiny_adapter(name)
    left = adapter.context_limit - 8 - 3
    prompt = some_prompt([left - 2 * (left // 3), left // 3, left // 3], prefix=8, suffix=3)
    assert len(prompt) == adapter.context_limit
    done = run(blend_prefill(adapter, lay(adapter, prompt), BlendConfig(policy="all"), new_tokens=7))
    assert_near(done.logits, model_logits(adapter, prompt))
    assert done.cache.capacity == len(prompt) + 7  # room for the answer


@pytest.mark.skipif(not HAS_BF16, reason="no kernels for bf16")
@pytest.mark.parametrize("name", KINDS)
def test_a_stored_prefix_changes_no_bit_where_compiled_kernels_serve(
    name: str,
) -> None:
    """A row's bits do not depend on the rows beside it."""
    adapter, prompt = tiny_adapter(name, torch.bfloat16), some_prompt([120, 9, 60], prefix=20, suffix=14)
    nothing = blend(adapter, prompt, lay(adapter, prompt, [False] * 3, prefix=False), ratio=1.0)
    prefix = blend(adapter, prompt, lay(adapter, prompt, [True, False, False]), method="prefix")
    assert torch.equal(nothing.logits, prefix.logits)


@given(st.lists(st.sampled_from([-2.0, 0.0, 0.5, 3.0, float("-inf")]), max_size=20), st.integers(0, 25))
def test_top_is_the_largest_and_the_earlier_of_equal_ones(scores: list[float], n: int) -> None:
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    assert top(torch.tensor(scores), n).tolist() == sorted(ranked[:n])


def test_random_is_even_and_keeps_to_reusable_tokens() -> None:
    tenths = torch.zeros(10)
    for more in range(100):
        layout = lay(tiny_adapter("llama"), some_prompt([30, 30, 30 + more], suffix=3))
        policy = make_policy(BlendConfig(policy="random", ratio=0.2))
        chosen, again = (policy.select(layout) for _ in range(2))
        assert torch.equal(chosen, again)
        assert len(set(chosen.tolist())) == policy.n_selected(layout)
        order = layout.reusable.cumsum(0)[chosen] - 1
        assert layout.reusable[chosen].all()
        tenths += torch.bincount(order * 10 // layout.n_reusable, minlength=10)
    # about 280 in each of ten parts: standard deviation 14
    assert 220 < tenths.min() <= tenths.max() < 340, tenths


@given(st.lists(st.sampled_from([0, 1, 2, 7, 20]), max_size=6), st.integers(0, 4))
@example([400, 500, 0, 300, STACK_TOKENS + 1, 2], 3)
def test_a_chunks_kv_does_not_depend_on_what_is_stacked_with_it(lengths: list[int], prefix: int) -> None:
    computer = ChunkComputer(tiny_adapter("llama"), some_ids(prefix))
    chunks = [some_ids(n, seed=i) for i, n in enumerate(lengths)]
    for ids, stacked in zip(chunks, computer.stream(chunks), strict=True):
        alone = computer.compute([ids])[0]
        assert_near(stacked.keys, alone.keys)
        assert_near(stacked.values, alone.values)
