"""A chunk's KV against what the model itself computes for prefix + chunk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.blend.precompute import STACK_TOKENS, ChunkComputer
from tests.support.blending import assert_near, model_kv, some_ids
from tests.support.models import TINY, tiny_adapter


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("behind", [0, 9])
def test_equals_the_models_own_cache_turned_back(name: str, behind: int) -> None:
    adapter, front = tiny_adapter(name), some_ids(behind)
    chunks = [some_ids(n, seed=n) for n in (30, 1, 12)]
    for ids, kv in zip(chunks, ChunkComputer(adapter, front).compute(chunks), strict=True):
        keys, values = model_kv(adapter, front + ids)
        ropes = adapter.rope(torch.arange(behind, behind + len(ids)))
        for l in range(adapter.n_layers):
            assert_near(kv.keys[l], adapter.rotate(keys[l, :, behind:], ropes[l].inverse))
            assert_near(kv.values[l], values[l, :, behind:])


@given(st.lists(st.sampled_from([0, 1, 2, 7, 20]), max_size=6), st.integers(0, 4))
def test_does_not_depend_on_what_is_stacked_with_it(lengths: list[int], behind: int) -> None:
    computer = ChunkComputer(tiny_adapter("llama"), some_ids(behind))
    chunks = [some_ids(n, seed=i) for i, n in enumerate(lengths)]
    for ids, stacked in zip(chunks, computer.compute(chunks), strict=True):
        alone = computer.compute([ids])[0]
        assert_near(stacked.keys, alone.keys, 1e-5)
        assert_near(stacked.values, alone.values, 1e-5)


def test_streams_every_chunk_in_order_also_over_several_stacks() -> None:
    computer = ChunkComputer(tiny_adapter("llama"), some_ids(3))
    chunks = [some_ids(n, seed=n) for n in (400, 500, 0, 300, STACK_TOKENS + 1, 2)]
    kvs = list(computer.stream(chunks))
    assert [kv.n_tokens for kv in kvs] == [len(ids) for ids in chunks]
    for i in (3, 5):
        assert_near(kvs[i].keys, computer.compute([chunks[i]])[0].keys, 1e-5)


def test_the_front_is_the_prefix_computed_alone() -> None:
    adapter, front = tiny_adapter("qwen3"), some_ids(6)
    alone = ChunkComputer(adapter, ()).compute([front])[0]
    assert torch.equal(ChunkComputer(adapter, front).context_kv.keys, alone.keys)
    assert ChunkComputer(adapter, ()).context_kv.n_tokens == 0
