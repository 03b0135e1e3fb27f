"""What the bench calls launched and replayed are the same tokens over the same cache."""

from __future__ import annotations

import math

import pytest
import torch

from blendserve.bench.gpu.decoding import at_once, measure, random_cache, run
from blendserve.models import replay
from blendserve.models.adapter import Adapter
from blendserve.models.forward import append
from blendserve.models.kv_cache import KVCache
from blendserve.models.replay import EAGER, replayed_steps
from tests.support.models import tiny_adapter


def test_both_ways_of_decoding_agree_and_are_timed() -> None:
    figures = measure(tiny_adapter("llama"), 40, 5, 2)
    assert figures["off"] < 1e-5
    assert not figures["captured"]
    assert len(figures["faster"]["rounds"]) == 2
    assert all(math.isfinite(x) and x > 0 for x in figures["seconds_of_capture"]["rounds"])


def test_every_token_goes_to_its_place_and_replay_begins_behind_the_eager_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter, seen = tiny_adapter("llama"), list[tuple[int, int]]()
    cache = random_cache(adapter, 10, EAGER + 3)

    def noted(adapter: Adapter, cache: KVCache, at: int, tokens: tuple[int, ...]) -> torch.Tensor:
        seen.append((at, tokens[0]))
        return append(adapter, cache, at, tokens)

    monkeypatch.setattr(replay, "append", noted)

    tokens = list(range(EAGER + 3))
    run(adapter, replayed_steps(adapter, cache, 10, at_once), 10, tokens)
    assert seen == [(10 + i, i) for i in range(EAGER)]
