"""The study by second derivation: fronts by brute force, a front that is the truth, choices by full prefill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blendserve.blend.loader import KVLoader
from blendserve.blend.policies.base import top
from blendserve.blend.prefill import prefill
from blendserve.config import BlendConfig, changed
from blendserve.core import Passage, Prompt, TokenIds
from blendserve.evaluate import study
from blendserve.evaluate.config import EvaluateConfig
from blendserve.models.kv_cache import KVCache
from blendserve.retrieve import Embedder
from tests.evaluate.helpers import passage, tiny_engine, write_dataset
from tests.support.blending import lay, some_prompt
from tests.support.models import tiny_adapter


def test_fronts_are_those_of_brute_force() -> None:
    here, rest = some_prompt([5, 6, 7, 8]), some_prompt([5, 6, 7, 8, 9], seed=1)
    chunks = [chunk.ids for chunk in (*here.chunks, *rest.chunks)]
    vectors = np.random.default_rng(0).normal(size=(len(chunks), 3))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    fronts = study.fronts_of(chunks, vectors, 2)
    for i in range(4):
        for kind, among in (("near_here", set(range(4)) - {i}), ("near_elsewhere", set(range(4, 9)))):
            second, first = sorted(among, key=lambda n: float(((vectors[n] - vectors[i]) ** 2).sum()))[1::-1]
            assert fronts[kind](here, i) == (*here.prefix, *chunks[second], *chunks[first])
        drawn = fronts["random"](here, i)
        assert drawn in {
            (*here.prefix, *chunks[a], *chunks[b]) for a in range(4, 9) for b in range(4, 9) if a != b
        }
        assert drawn == fronts["random"](here, i)
    assert len({fronts["random"](here, i) for i in range(4)}) > 1


def test_behind_what_stands_before_them_chunks_are_right() -> None:
    """Then full reuse is full prefill; behind the prefix alone it is not, but for the first chunk."""

    def predecessors(prompt: Prompt, i: int) -> TokenIds:
        return (*prompt.prefix, *(token for chunk in prompt.chunks[:i] for token in chunk.ids))

    engine = tiny_engine()
    prompt = engine.prompts.build(
        "Who painted?", [Passage(p["text"], p["title"]) for p in map(passage, range(4))]
    )
    none = BlendConfig(method="blend", policy="none", correction="none")
    cases = [study.Case(front, none, front, front) for front in ("before", "prefix")]
    right, reused = study.ask(engine, {**study.PLAIN, "before": predecessors}, prompt, cases)
    assert right["mean_kl"] < 1e-8
    assert reused["mean_kl"] > 1e-4
    exact = [study.lay_out_behind(engine, prompt, predecessors, exact=on).exact for on in (False, True)]
    assert [int(mask.sum()) - len(prompt.prefix) for mask in exact] == [0, len(prompt.chunks[0])]


@pytest.mark.parametrize("name", ["llama", "phi3-partial", "olmo2"])
@pytest.mark.parametrize("layer", [1, 2])
def test_the_choice_is_by_what_full_prefill_moves(name: str, layer: int) -> None:
    """All rows run below the check layer: there, fresh keys and values are full prefill's."""
    adapter, prompt = tiny_adapter(name), some_prompt([12, 9, 14, 11])
    layout = lay(adapter, prompt)
    full = prefill(adapter, prompt, layout, BlendConfig(ratio=1.0)).cache
    stored = KVCache(adapter, len(prompt))
    ropes = adapter.rope(torch.arange(len(prompt)))
    KVLoader(adapter, stored, layout.placements, ropes).place(layer)
    moved = {
        "k": (full.keys - stored.keys)[layer].square().sum(dim=(0, 2)),
        "v": (full.values - stored.values)[layer].square().sum(dim=(0, 2)),
    }
    moved["kv"] = torch.stack([x / x[layout.reusable].mean() for x in moved.values()]).sum(dim=0)
    blend = BlendConfig(method="blend", policy="deviation", check_layers=(layer,), ratio=0.3)
    chosen = {}
    policies = {case.name.partition("[")[0]: case.blend.policy for case in study.compared()}
    for compare, lengths in moved.items():
        wanted = top(lengths.masked_fill(~layout.reusable, float("-inf")), layout.budget(blend.share))
        named = changed(blend, policy=policies[compare])
        chosen[compare] = prefill(adapter, prompt, layout, named).recomputed.tolist()
        assert chosen[compare] == wanted.tolist()
    assert chosen["v"] == prefill(adapter, prompt, layout, blend).recomputed.tolist()
    assert chosen["k"] != chosen["v"]


class Lengths:
    """In place of the embedder: texts of like length are near."""

    fingerprint = "lengths"

    def embed(self, texts: list[str], _: Any) -> np.ndarray:
        return np.array([(np.cos(len(text)), np.sin(len(text))) for text in texts])


def run(data: Path, **options: Any) -> dict[str, Any]:
    return study.run("enrich", EvaluateConfig(dataset=str(data), **options), "tiny", others=1)


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study, "open_engine", lambda *_: tiny_engine())
    monkeypatch.setattr(Embedder, "load", lambda _: Lengths())
    data = write_dataset(tmp_path)
    run(data, limit=1)
    result = run(data, limit=2)
    lines = (Path(result["folder"]) / "predictions.jsonl").read_text().splitlines()
    assert len(lines) == 2 * len(result["cases"]) == 2 * len(study.CASES["enrich"]())
    unit = result["cases"][study.UNIT]
    assert unit["mean"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "n": 2} == unit["of_plain"]
    assert result["cases"]["query+ridge@0.15/random"]["mean"]["mean"] != 1.0
    assert run(data, limit=2, half="second")["questions"] == 1
    assert len(study.table(result["cases"])) == len(result["cases"])
    assert len((Path(result["folder"]) / "predictions.jsonl").read_text().splitlines()) == len(lines)


def test_every_case_of_a_study_has_its_plain_one() -> None:
    for cases in (make() for make in study.CASES.values()):
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)
        assert {case.plain for case in cases} | {study.UNIT} <= set(names)
