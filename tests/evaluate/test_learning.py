"""What corrections know beforehand: of the half that is not asked, and kept with the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blendserve.blend import priors
from blendserve.blend.priors import Known
from blendserve.evaluate.config import EvaluateConfig
from blendserve.evaluate.datasets import load
from blendserve.evaluate.learning import corpus_of
from blendserve.evaluate.prompts import Setting
from tests.evaluate.helpers import predictions, run, tiny_engine, write_dataset

METHODS = ("query", "query+prior", "none+prior/bos")

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Little text is enough, and every corpus that is learnt from is noted."""
    seen: list[Any] = []
    fit = Known.fit

    def noted(self: Known, chunks: Any, *_: Any) -> Any:
        seen.append(chunks)
        return fit(self, chunks)

    monkeypatch.setattr(priors, "LEAST_TOKENS", 1)
    monkeypatch.setattr(Known, "fit", noted)
    return seen


@pytest.mark.parametrize(("half", "learnt"), [("first", "second"), ("second", "first")])
def test_nothing_is_learnt_from_the_half_that_is_asked(tmp_path: Path, half: Any, learnt: Any) -> None:
    path = write_dataset(tmp_path, 4)
    engine, data = tiny_engine(), load(str(path))
    plan = EvaluateConfig(dataset=str(path), half=half)
    setting = Setting(engine, plan)
    other = EvaluateConfig(dataset=str(path), half=learnt)
    wanted = [
        chunk.ids
        for e in data.examples[other.part]
        for chunk in setting.prompt(e.question, setting.context(e)).chunks
    ]
    assert corpus_of(plan, data, setting, engine) == wanted
    both = EvaluateConfig(dataset=str(path))
    assert len(corpus_of(both, data, setting, engine)) > len(wanted)


def test_a_run_learns_once_for_each_context_and_goes_on_with_the_same(
    tmp_path: Path, fitted: list[Any]
) -> None:
    path = write_dataset(tmp_path, 2)
    first = run(tmp_path, path, methods=METHODS)
    kept = sorted(file.name for file in first.folder.glob("priors-*"))
    assert kept == ["priors-bos-both.safetensors", "priors-run-both.safetensors"]
    assert len(fitted) == 2
    again = run(tmp_path, path, methods=(*METHODS, "query+prior@0.4"))
    assert len(fitted) == 2
    assert predictions(again)[: len(predictions(first))] == predictions(first)
    kls = {line["method"]: line["mean_kl"] for line in predictions(again) if line["id"] == "q0"}
    assert kls["query+prior@0.25"] != kls["query@0.25"]
    (first.folder / kept[0]).write_bytes(b"of another version, or damaged")
    run(tmp_path, path, methods=(*METHODS, "query+prior@0.5"))
    assert len(fitted) == 3


def test_methods_that_do_not_use_it_learn_nothing(tmp_path: Path, fitted: list[Any]) -> None:
    run(tmp_path, write_dataset(tmp_path, 1), methods=("query+ridge",))
    assert not fitted
