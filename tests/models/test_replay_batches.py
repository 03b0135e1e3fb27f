"""All slots in one captured step, against the plain step of those in use."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from blendserve.bench.gpu.decoding import at_once
from blendserve.engine.slots import Slots
from blendserve.engine.steps import BatchDecoder
from blendserve.kernels.cuda.graphs import Replayed
from blendserve.kernels.verify import SWITCH
from blendserve.models import replay
from blendserve.models.adapter import Adapter
from blendserve.models.forward import Row, append_captured, append_each
from blendserve.models.kv_cache import KVCache
from blendserve.models.replay import EAGER, MOST_CACHES, WORTH, ReplayedSteps, is_worthwhile
from tests.support.blending import assert_near
from tests.support.models import KINDS, fresh_model, tiny_adapter

SLOTS, ROOM = 4, 40


def filled(adapter: Adapter, lengths: list[int]) -> tuple[Slots, list[KVCache]]:
    """Slots taken by requests with prompts of these lengths, full of noise up to there."""
    slots = Slots(adapter, SLOTS, ROOM)
    slots.keys.fill_(float("nan"))
    slots.values.fill_(float("nan"))
    return slots, [slots.take() for _ in lengths]


def prompt(caches: list[KVCache], lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    for cache, n in zip(caches, lengths, strict=True):
        for part in (cache.keys, cache.values):
            part[:, :, :n] = torch.randn(part[:, :, :n].shape, generator=generator)


@pytest.mark.parametrize("name", ["llama", *KINDS])
def test_any_of_the_slots_step_as_they_do_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, lengths, dice = tiny_adapter(name), [5, 30, 17], random.Random(3)
    monkeypatch.setattr("blendserve.engine.steps.is_worthwhile", lambda *_: True)
    monkeypatch.setattr("blendserve.engine.steps.ReplayedSteps", partial(ReplayedSteps, capture=at_once))
    (slots, caches), (_, others) = (filled(adapter, lengths) for _ in range(2))
    together = BatchDecoder(adapter, slots)
    prompt(caches, lengths)
    prompt(others, lengths)
    at = list(lengths)
    for made in range(EAGER + 8):
        rows = sorted(dice.sample(range(3), dice.randint(1, 3)), key=lambda _: dice.random())
        tokens = [dice.randrange(3, 97) for _ in rows]
        got = together.step([Row(caches[b], at[b], t) for b, t in zip(rows, tokens, strict=True)])
        wanted = append_each(adapter, [Row(others[b], at[b], t) for b, t in zip(rows, tokens, strict=True)])
        assert_near(got, wanted, 1e-4)
        assert (together._replayed._graph is not None) == (made >= EAGER)  # type: ignore[union-attr]
        for b in rows:
            at[b] = min(at[b] + 1, ROOM - 2)  # the last place is nobody's
    for one, other, n in zip(caches, others, at, strict=True):
        assert_near(one.keys[:, :, :n], other.keys[:, :, :n], 1e-4)
        assert_near(one.values[:, :, :n], other.values[:, :, :n], 1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_what_is_recorded_once_serves_every_set_of_slots(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")  # tracing does not see the CPU's kernels, and a GPU has none
    adapter = tiny_adapter(name)
    shape = (SLOTS, adapter.n_layers, adapter.n_kv_heads, ROOM, adapter.head_dim)
    keys, values = (torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(2))

    def work(keys: Tensor, values: Tensor, rows: Tensor) -> Tensor:
        return append_captured(adapter, keys, values, *rows)

    graph = make_fx(work)(
        keys.clone(), values.clone(), torch.tensor([[3, 4, 5, 6], [9, 1, 0, 2], [9, 1, 39, 2]])
    )
    others = [KVCache.over(keys[b].clone(), values[b].clone()) for b in range(SLOTS)]
    logits = graph(keys, values, torch.tensor([[0, 8, 0, 7], [0, 20, 0, 33], [39, 20, 39, 33]]))
    wanted = append_each(adapter, [Row(others[1], 20, 8), Row(others[3], 33, 7)])
    assert_near(logits[[1, 3]], wanted, 1e-4)
    assert_near(keys[0][:, :, :39], others[0].keys[:, :, :39], 1e-9)  # who takes no part keeps what it has


def test_who_cannot_be_captured_steps_plainly() -> None:
    adapter = fresh_model("llama")

    def fails(work: object, device: torch.device) -> Replayed:
        raise RuntimeError("operation not permitted when stream is capturing")

    slots = Slots(adapter, SLOTS, ROOM)
    steps = ReplayedSteps(adapter, slots.keys, slots.values, capture=fails)
    for _ in range(EAGER + 3):
        assert float(steps([(0, 3, 5)], lambda: torch.ones(1, 1))) == 1
    assert adapter in replay._failed


def test_many_slots_or_a_cpu_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, experts = fresh_model("llama"), fresh_model("mixtral")
    assert not is_worthwhile(adapter, WORTH, SLOTS)
    monkeypatch.setattr(Adapter, "device", torch.device("cuda", 0))
    assert is_worthwhile(adapter, WORTH, MOST_CACHES)
    assert not is_worthwhile(adapter, WORTH, MOST_CACHES + 1)
    assert not is_worthwhile(experts, WORTH)
