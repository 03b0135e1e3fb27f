"""Blending against the borrowed model's own forward: any prompt, any hole in the store, any policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.blend import prefill as module
from blendserve.blend.layout import Layout
from blendserve.blend.loader import KVLoader
from blendserve.blend.prefill import Prefilled
from blendserve.config import BlendConfig
from blendserve.core import Prompt
from blendserve.kernels import race, verify
from blendserve.kernels.cpu.isa import LEVELS
from blendserve.kernels.types import Ropes
from blendserve.models.adapter import Adapter
from blendserve.models.kv_cache import KVCache
from blendserve.timing import Clock
from tests.support.blending import assert_near, blend, distance, lay, model_kv, model_logits, some_prompt
from tests.support.models import KINDS, TINY, tiny_adapter
from tests.support.scatter import scatter_forward

POLICIES = ["query", "deviation", "chunk_head", "random", "none", "all"]
FAMILIES = pytest.mark.parametrize("name", TINY)


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


def check_equals_full(adapter: Adapter, prompt: Prompt, layout: Layout, **options: Any) -> Prefilled:
    """The check that the rest of this file leans on: logits and the whole cache are those of `model.forward`."""
    done = blend(adapter, prompt, layout, **options)
    assert_near(done.logits, model_logits(adapter, prompt))
    keys, values = model_kv(adapter, prompt.ids)
    assert_near(done.cache.keys, keys)
    assert_near(done.cache.values, values)
    return done


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Any order, subset and repetition of a few chunks, empty and one-token ones among them, any of them stored."""
    pool = draw(st.lists(st.sampled_from([0, 1, 2, 5, 17]), min_size=1, max_size=4))
    prefix, suffix = draw(st.integers(0, 4)), draw(st.sampled_from([1, 2, 6]))
    base = some_prompt(pool, prefix, suffix, seed=draw(st.integers(0, 9)))
    order = draw(st.lists(st.integers(0, len(pool) - 1), max_size=6))
    stored = draw(st.sampled_from(["all", "none", "some"]))
    marks = [draw(st.booleans()) if stored == "some" else stored == "all" for _ in order]
    return {
        "prompt": Prompt(base.prefix, tuple(base.chunks[i] for i in order), base.suffix),
        "found": marks,
        "prefix": stored != "none" and draw(st.booleans()),
        "policy": draw(st.sampled_from(POLICIES)),
        "ratio": draw(st.sampled_from([0.0, 0.02, 0.15, 0.5, 1.0])),
        "correction": draw(st.sampled_from(["none", "shift", "ridge"])),
        "check_layers": draw(st.sampled_from([(1,), (1, 2), (2, 3), (1, 2, 3)])),
    }


@settings(max_examples=300)
@given(requests())
def test_any_request_is_full_prefill_where_it_must_be_and_sound_elsewhere(request_: dict[str, Any]) -> None:
    adapter = tiny_adapter("llama")
    prompt, found, prefix = (request_.pop(name) for name in ("prompt", "found", "prefix"))
    layout = lay(adapter, prompt, found, prefix)
    n_reusable = int(layout.reusable.sum())
    everything = request_["policy"] == "all" or (request_["ratio"] == 1.0 and request_["policy"] != "none")
    if everything or n_reusable == 0:
        done = check_equals_full(adapter, prompt, layout, **request_)
        assert len(done.recomputed) == n_reusable
        return
    done = blend(adapter, prompt, layout, **request_)
    assert torch.isfinite(done.logits).all()
    assert torch.isfinite(done.cache.keys).all()
    assert torch.isfinite(done.cache.values).all()
    assert layout.reusable[done.recomputed].all()
    wanted = 0 if request_["policy"] == "none" else round(request_["ratio"] * layout.n_found)
    assert len(done.recomputed) == min(wanted, n_reusable)


@FAMILIES
@pytest.mark.parametrize("policy", ["deviation", "all"])
def test_ratio_1_equals_full_prefill(name: str, policy: str) -> None:
    adapter, prompt = tiny_adapter(name), some_prompt([14, 1, 20, 9])
    check_equals_full(adapter, prompt, lay(adapter, prompt), policy=policy, ratio=1.0, correction="ridge")


@FAMILIES
def test_with_nothing_stored_it_is_full_prefill(name: str) -> None:
    adapter, prompt = tiny_adapter(name), some_prompt([14, 1, 20, 9])
    layout = lay(adapter, prompt, [False] * 4, prefix=False)
    assert check_equals_full(adapter, prompt, layout).cost == pytest.approx(1.0)


@FAMILIES
def test_one_chunk_behind_the_prefix_is_prefix_caching(name: str) -> None:
    adapter, prompt = tiny_adapter(name), some_prompt([31])
    done = check_equals_full(adapter, prompt, lay(adapter, prompt))
    assert done.cost == pytest.approx(len(prompt.suffix) / len(prompt))


@FAMILIES
def test_the_first_chunk_is_exact_deep_in_the_stack_whatever_the_policy(name: str) -> None:
    adapter, prompt = tiny_adapter(name), some_prompt([20, 15, 15])
    full_keys, full_values = model_kv(adapter, prompt.ids)
    done = blend(adapter, prompt, policy="none", correction="shift")
    stop = prompt.spans[0].stop
    assert_near(done.cache.keys[-1, :, :stop], full_keys[-1, :, :stop])
    assert_near(done.cache.values[-1, :, :stop], full_values[-1, :, :stop])
    assert distance(done.cache.values[-1, :, stop:], full_values[-1, :, stop:]) > 1e-2  # the others are not


@FAMILIES
@pytest.mark.parametrize("found", [[True, True, True], [True, False, True], [False, True, True]])
def test_equals_the_models_forward_on_the_active_rows(name: str, found: list[bool]) -> None:
    adapter, prompt = tiny_adapter(name), some_prompt([12, 14, 16])
    layout = lay(adapter, prompt, found)
    done = blend(adapter, prompt, layout, policy="random", ratio=0.3, correction="none")
    active = layout.fresh.clone()
    active[done.recomputed] = True
    said, cache = scatter_forward(adapter, prompt, layout, active.nonzero()[:, 0])
    assert 0 < len(done.recomputed) < layout.n_found
    assert_near(done.logits, said.logits[0, -1])
    assert_near(done.cache.keys, cache.stored_keys)
    assert_near(done.cache.values, cache.stored_values)


def test_full_reuse_is_not_full_prefill() -> None:
    adapter, prompt = tiny_adapter("llama"), some_prompt([12, 14, 16])
    done = blend(adapter, prompt, policy="none", correction="none")
    assert distance(done.logits, model_logits(adapter, prompt)) > 0.05


class OneOff(KVLoader):
    """Rotates every stored key to the position after its own."""

    def __init__(self, adapter: Adapter, cache: KVCache, pieces: Any, ropes: Ropes, clock: Clock) -> None:
        super().__init__(adapter, cache, pieces, adapter.rope(torch.arange(1, cache.capacity + 1)), clock)


def test_the_check_sees_a_rotation_that_is_one_position_off(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, prompt = tiny_adapter("llama"), some_prompt([12, 14])
    check_equals_full(adapter, prompt, lay(adapter, prompt), ratio=1.0)
    monkeypatch.setattr(module, "KVLoader", OneOff)
    with pytest.raises(AssertionError, match="max difference"):
        check_equals_full(adapter, prompt, lay(adapter, prompt), ratio=1.0)


@pytest.mark.parametrize("dropped", [1, 2, 3, 4])
def test_the_check_sees_a_dropped_suffix_row(dropped: int) -> None:
    adapter, prompt = tiny_adapter("llama"), some_prompt([12, 14])
    layout = lay(adapter, prompt)
    fresh = layout.fresh.clone()
    fresh[-dropped] = False
    with pytest.raises(AssertionError, match="max difference"):
        check_equals_full(adapter, prompt, replace(layout, fresh=fresh), ratio=1.0)


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
