"""An engine is warm when it has opened: it has searched, prefilled and decoded over a made-up prompt."""

from __future__ import annotations

from typing import Any

import pytest

from blendserve.blend import prefill
from blendserve.config import BlendConfig, Config, Method
from blendserve.engine import warm_up as warm
from tests.support.models import tiny_adapter


@pytest.mark.parametrize("method", ["auto", "blend", "reuse", "full"])
@pytest.mark.parametrize("ratio", [0.15, "auto"])
def test_it_goes_the_way_of_the_method(method: Method, ratio: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[prefill.Prefilled] = []

    def watched(*args: Any, **options: Any) -> prefill.Prefilled:
        done.append(prefill.prefill(*args, **options))
        return done[-1]

    monkeypatch.setattr(warm, "prefill", watched)
    warm.warm_up(tiny_adapter("llama"), Config(blend=BlendConfig(method=method, ratio=ratio)), None)
    assert done[0].logits.isfinite().all()
    assert bool(done[0].bytes_loaded) == (method != "full")
    assert bool(len(done[0].recomputed)) == (method in ("auto", "blend"))


def test_it_searches_an_index_that_has_something(monkeypatch: pytest.MonkeyPatch) -> None:
    class Index:
        def __init__(self, size: int) -> None:
            self.size, self.asked = size, list[int]()

        def __len__(self) -> int:
            return self.size

        def search(self, question: str, top_k: int) -> None:
            self.asked.append(top_k)

    for size in (0, 3):
        index: Any = Index(size)
        warm.warm_up(tiny_adapter("llama"), Config(), index)
        assert index.asked == ([1] if size else [])
