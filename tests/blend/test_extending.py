"""A policy and a correction are one file and one line in the registry each, as docs/how-to/extend.md tells it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blendserve.config import BlendConfig, Config
from blendserve.errors import ConfigError
from blendserve.evaluate.variants import variants
from blendserve.registry import CORRECTIONS, POLICIES
from tests.support.blending import assert_near, blend, distance, lay, model_logits, some_prompt
from tests.support.models import tiny_adapter

LAST = '''
"""The last tokens of everything that is reused."""

from torch import Tensor

from blendserve.blend.layout import Layout
from blendserve.blend.policies.base import Policy, Scene, candidates
from blendserve.errors import ConfigError


class LastPolicy(Policy):
    def validate(self, n_layers: int) -> None:
        if self.config.seed:
            raise ConfigError("setting 'blend.seed' means nothing to the last tokens: leave it at 0")

    def choose(self, layout: Layout, scene: Scene) -> Tensor:
        return candidates(layout)[-self.n_chosen(layout) :]
'''
DOUBLE = '''
"""Makes it worse: stored values twice as large."""

from torch import Tensor

from blendserve.blend.corrections.base import Correction


class Double(Correction):
    def __init__(self, adapter, cache, ropes, spans, known=None) -> None:
        self.cache, self.spans = cache, spans

    def apply(self, l: int, rows: Tensor, keys: Tensor, values: Tensor) -> bool:
        for span in self.spans:
            self.cache.values[l][:, span.start : span.stop] *= 2
        return True
'''


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "toy_last.py").write_text(LAST)
    (tmp_path / "toy_double.py").write_text(DOUBLE)
    monkeypatch.syspath_prepend(tmp_path)
    POLICIES.add("last", "toy_last:LastPolicy")
    CORRECTIONS.add("double", "toy_double:Double")
    yield
    POLICIES.remove("last")
    CORRECTIONS.remove("double")


def test_a_policy_is_one_file_and_one_line(toys: None, tmp_path: Path) -> None:
    adapter, prompt = tiny_adapter("llama"), some_prompt([12, 14, 16])
    done = blend(adapter, prompt, policy="last", ratio=0.25, correction="none")
    at = prompt.spans[-1].stop
    assert done.recomputed.tolist() == list(range(at - round(0.25 * 42), at))
    whole = blend(adapter, prompt, policy="last", ratio=1.0)
    assert_near(whole.logits, model_logits(adapter, prompt))
    (tmp_path / "config.yaml").write_text(Config(blend={"policy": "last"}).to_yaml())
    assert Config.load(tmp_path / "config.yaml").blend.policy == "last"
    assert variants(["last@0.1"], ())[-1].name == "last@0.1"
    with pytest.raises(ConfigError, match="means nothing"):
        blend(adapter, prompt, lay(adapter, prompt), policy="last", seed=1)


def test_a_correction_is_one_file_and_one_line(toys: None) -> None:
    adapter, prompt = tiny_adapter("llama"), some_prompt([12, 14, 16])
    plain, doubled = (
        blend(adapter, prompt, policy="random", ratio=0.2, correction=name) for name in ("none", "double")
    )
    left = lay(adapter, prompt).reusable.clone()
    left[plain.recomputed] = False
    assert torch.equal(doubled.cache.values[0][:, left], 2 * plain.cache.values[0][:, left])
    assert distance(plain.logits, doubled.logits) > 0


@pytest.mark.parametrize("values", [{"policy": "last"}, {"correction": "double"}])
def test_what_is_not_registered_is_refused_by_name(values: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="there is no"):
        BlendConfig(**values)
