"""No bit depends on how many threads a pass of few rows uses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from blendserve.kernels import team
from blendserve.models import forward, runner
from blendserve.models import model as model_module
from blendserve.models.kv_cache import KVCache
from tests.support.kernels import threads as limited
from tests.support.tokenizers import bundled_reader

ALL = 4
LAYERS = 30


@limited(ALL)
def test_logits_have_the_same_bits_for_any_number_of_threads_changed_at_any_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter, seen, size = bundled_reader("bfloat16").adapter, set[int](), team.size
    torch.set_num_threads(ALL)  # loading a reader limits them
    monkeypatch.setattr(team, "size", lambda: seen.add(size()) or size())  # type: ignore[func-returns-value]

    def logits(*threads: int) -> list[Tensor]:
        turns, cache = iter(threads * 10 * LAYERS), KVCache(adapter, 64)

        def layer(run: Callable[[], Tensor | None]) -> Tensor | None:
            with team.at_most(next(turns)):
                return run()

        monkeypatch.setattr(forward, "layer_series", lambda rows, device: SimpleNamespace(run=layer))
        monkeypatch.setattr(model_module, "limit_threads", lambda rows, device: team.at_most(next(turns)))
        tokens = {0: [7 * n % 1000 for n in range(40)], 40: [1], 41: [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}
        return [runner.append(adapter, cache, at, ids) for at, ids in tokens.items()]

    expected = logits(ALL)
    for threads in ((1,), (2,), (3, 1, ALL)):
        assert all(map(torch.equal, logits(*threads), expected))
    assert seen in (set(), {1, 2, 3, ALL})  # where kernels serve, they ran with each of them
