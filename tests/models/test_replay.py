"""Steps as they are captured: equal to decode's own, with nothing baked in that changes from token to token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from blendserve.blend.prefill import Prefilled, prefill
from blendserve.config import BlendConfig, DecodeConfig
from blendserve.engine.generation import generate, sample
from blendserve.kernels.reference import attend_at_reference, formula
from blendserve.kernels.types import AttentionSpec
from blendserve.kernels.verify import SWITCH
from blendserve.models import replay
from blendserve.models.adapter import Adapter
from blendserve.models.forward import append, append_captured
from blendserve.models.kv_cache import KVCache
from blendserve.models.replay import EAGER, WORTH, ReplayedSteps, is_worthwhile
from tests.support.blending import assert_near, lay, some_ids, some_prompt
from tests.support.models import KINDS, TINY, fresh_model, tiny_adapter

PROMPT, NEW = some_prompt([9, 14]), 24
LENGTH = len(PROMPT)
CAPTURABLE = [name for name in TINY if not tiny_adapter(name).family.experts]


def prefilled(adapter: Adapter) -> Prefilled:
    """With memory behind the prompt as torch.empty may leave it."""
    done = prefill(adapter, PROMPT, lay(adapter, PROMPT), BlendConfig(policy="all"), NEW)
    keys, values = done.cache.keys.clone(), done.cache.values.clone()
    for part in (keys, values):
        part[:, :, LENGTH:] = float("nan")
    return replace(done, cache=KVCache.over(keys, values))


class Replay:
    """A graph's double: the work itself, once for the capture and once for every call, into the same memory."""

    def __init__(self, work: Callable[[], Tensor], device: torch.device) -> None:
        self.work, self.out, self.calls = work, work().clone(), 0

    def __call__(self) -> Tensor:
        self.calls += 1
        return self.out.copy_(self.work())


def tokens(adapter: Adapter, capture: Any = Replay, n: int = NEW) -> tuple[list[int], ReplayedSteps]:
    """Greedily, by steps that are captured as soon as they may be."""
    done = prefilled(adapter)
    steps = ReplayedSteps(adapter, done.cache.keys[None], done.cache.values[None], LENGTH, capture)
    config = DecodeConfig(max_new_tokens=n)

    def step(made: int, token: int) -> Tensor:
        at = LENGTH + made
        return steps([(0, at, token)], lambda: append(adapter, done.cache, at, (token,)))[0]

    said = sample(done.logits, config, set(), step)
    return list(said), steps


def plainly(adapter: Adapter) -> list[int]:
    done = prefilled(adapter)
    config = DecodeConfig(max_new_tokens=NEW)
    return list(generate(adapter, done.cache, LENGTH, done.logits, config, set()))


@pytest.mark.parametrize("name", ["llama", *KINDS])
def test_token_for_token_as_the_plain_loop(name: str) -> None:
    adapter = tiny_adapter(name)
    said, steps = tokens(adapter)
    assert said == plainly(adapter)
    assert isinstance(steps._graph, Replay)
    assert steps._graph.calls == NEW - 1 - EAGER


@pytest.mark.parametrize("name", CAPTURABLE)
def test_each_step_has_the_same_logits_and_leaves_the_same_kv(name: str) -> None:
    adapter = tiny_adapter(name)
    one, other = prefilled(adapter).cache, prefilled(adapter).cache
    for part in (other.keys, other.values):
        part[:, :, LENGTH:] = 0
    for i, token in enumerate(some_ids(NEW, 7)):
        at = torch.tensor([LENGTH + i])
        logits = append_captured(adapter, other.keys[None], other.values[None], torch.tensor([token]), at, at)
        assert_near(logits, append(adapter, one, LENGTH + i, (token,)), 1e-4)
    assert_near(other.keys, one.keys, 1e-4)
    assert_near(other.values, one.values, 1e-4)


@pytest.mark.parametrize("name", ["llama", *KINDS])
def test_what_is_recorded_at_one_token_serves_all_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a capture does, tracing keeps what was launched and forgets why: here it is replayed for other tokens.

    Where a GPU would be captured there are no kernels of the CPU, whose calls tracing does not see.
    """
    monkeypatch.setenv(SWITCH, "0")
    adapter = tiny_adapter(name)
    cache, wanted = prefilled(adapter).cache, prefilled(adapter).cache
    for part in (cache.keys, cache.values):
        part[:, :, LENGTH:] = 0

    def work(keys: Tensor, values: Tensor, token: Tensor, at: Tensor) -> Tensor:
        plain: Any = append_captured
        caught: Tensor = plain.__wrapped__(adapter, keys[None], values[None], token, at, at)
        return caught

    with torch.no_grad():
        graph = make_fx(work)(cache.keys.clone(), cache.values.clone(), torch.tensor([5]), torch.tensor([3]))
        for i, token in enumerate(some_ids(8, 8)):
            logits = graph(cache.keys, cache.values, torch.tensor([token]), torch.tensor([LENGTH + i]))
            assert_near(logits, append(adapter, wanted, LENGTH + i, (token,)), 1e-4)


def test_an_answer_of_few_tokens_is_not_captured() -> None:
    _, steps = tokens(tiny_adapter("llama"), n=EAGER + 1)
    assert steps._graph is None


def test_what_cannot_be_captured_goes_on_plainly_and_is_not_tried_again() -> None:
    adapter, tried = fresh_model("llama"), []

    def fails(work: Callable[[], Tensor], device: torch.device) -> Replay:
        tried.append(work())  # CUDA finds out in the middle of it
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    wanted = plainly(adapter)
    assert tokens(adapter, fails)[0] == wanted
    assert tokens(adapter, fails)[0] == wanted
    assert len(tried) == 1


def test_who_may_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, experts = fresh_model("llama"), fresh_model("mixtral")
    assert not is_worthwhile(dense, 1000)  # on a CPU
    monkeypatch.setattr(Adapter, "device", torch.device("cuda", 0))
    assert is_worthwhile(dense, WORTH)
    assert not is_worthwhile(dense, WORTH - 1)
    assert not is_worthwhile(experts, 1000)
    replay._failed.add(dense)
    assert not is_worthwhile(dense, 1000)


@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    n_keys=st.integers(1, 40),
    part=st.floats(0, 1),
    window=st.none() | st.integers(1, 45),
    softcap=st.none() | st.just(2.0),
)
def test_one_row_by_a_position_on_the_device(
    kv_heads: int, group: int, n_keys: int, part: float, window: int | None, softcap: float | None
) -> None:
    at = torch.tensor([round(part * (n_keys - 1))])
    q, keys, values = (torch.randn(n, m, 8) for n, m in ((kv_heads * group, 1), *[(kv_heads, n_keys)] * 2))
    spec = AttentionSpec(0.4, window, softcap)
    assert_near(attend_at_reference(q, keys, values, spec, at), formula(q, keys, values, at, spec), 1e-5)
