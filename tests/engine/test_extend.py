"""A policy, a correction, a codec and a store kind are each one class and one line, as docs/how-to/extend.md says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blendserve.blend.corrections import Correction
from blendserve.blend.layout import LayerKV, Layout
from blendserve.blend.policies import Policy
from blendserve.config import Config
from blendserve.core import Prompt
from blendserve.engine.engine import Engine
from blendserve.evaluate.methods import parse_methods
from blendserve.kernels.rows import Rows
from blendserve.kv import ChunkKV, stacked
from blendserve.models.kv_model import ModelLayers
from blendserve.models.tokenizer import Tokenizer
from blendserve.registry import CODECS, CORRECTIONS, INTERNAL, POLICIES, STORES, parameters
from blendserve.store import MemoryStore, read_record
from blendserve.store.codecs.base import Buffer, ChunkShape, Coding, Pair
from blendserve.store.codecs.raw import Raw
from tests.support.engines import PASSAGES, QUESTIONS, toy_model

REGISTRIES = {"policy": POLICIES, "correction": CORRECTIONS, "codec": CODECS, "store": STORES}


@dataclass(frozen=True)
class LastTokens(Policy):
    """Recomputes tokens with this text, then the last reusable ones."""

    text: str = "?"  # in no passage
    found: tuple[int, ...] = field(default=(), metadata=INTERNAL)

    def prepare(self, model: ModelLayers, tokenizer: Tokenizer, prompt: Prompt) -> Policy:
        texts = [tokenizer.decode([token]).strip() for token in prompt.ids]
        return replace(self, found=tuple(at for at, text in enumerate(texts) if text == self.text))

    def rank(self, layout: Layout, scores: Tensor | None) -> Tensor:
        ranks = torch.arange(layout.n_tokens)
        ranks[list(self.found)] += layout.n_tokens
        return ranks


class Doubled(Correction):
    """Doubles stored values."""

    def apply(self, l: int, stored: LayerKV, rows: Rows, fresh: LayerKV) -> bool:
        for span in self.spans:
            stored[1][:, span.start : span.stop] *= 2
        return True


class Negated(Raw):
    """Stores every number with the other sign."""

    coding = Coding("own")

    def encode(self, kv: ChunkKV) -> list[Buffer]:
        return super().encode(ChunkKV(-stacked(kv.keys), -stacked(kv.values)))

    def decode(self, shape: ChunkShape, l: int, segment: Buffer) -> Pair:
        keys, values = super().decode(shape, l, segment)
        return -keys, -values


class OwnStore(MemoryStore):
    """Chunks in memory."""


TOYS = {"policy": LastTokens, "correction": Doubled, "codec": Negated, "store": OwnStore}


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    """One line each."""
    for kind, toy in TOYS.items():
        REGISTRIES[kind].add("own", f"{__name__}:{toy.__name__}")
    yield
    for registry in REGISTRIES.values():
        registry.remove("own")


def test_an_engine_runs_on_all_four_and_settings_and_evaluation_know_them(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    blend = {"policy": "own", "correction": "own", "method": "blend", "ratio": 0.25}
    file.write_text(Config(store={"location": "own", "codec": "own"}, blend=blend).to_yaml())
    with Engine.open(Config.load(file), model=toy_model()) as engine:
        engine.precompute(PASSAGES)
        answer = engine.answer(QUESTIONS[0], PASSAGES, max_new_tokens=2)
        assert isinstance(engine.store, OwnStore)
        record = read_record(engine.store, engine.blender.key(engine.prompts.chunk(PASSAGES[1]).ids))
        assert record is not None
        assert record.coding.codec == "own"
        prompt = engine.prompts.build(QUESTIONS[0], PASSAGES)
        doubled = engine.blender.run(prompt, engine.config.blend).result
        plain = engine.blender.run(prompt, engine.config.blend.with_values(correction="none")).result
        assert torch.equal(doubled.recomputed, plain.recomputed)
        assert not torch.equal(doubled.logits, plain.logits)
    report = answer.report
    assert (report.policy, report.correction, report.chunks_hit) == ("own", "own", len(PASSAGES))
    *_, last, suffix = report.states
    assert (last, suffix[0]) == (("recomputed", report.tokens_recomputed), "computed")
    assert "corrected" in dict(report.states)
    with Engine.open(Config(store={"location": "memory"}, blend=blend), model=toy_model()) as usual:
        usual.precompute(PASSAGES)
        same = usual.answer(QUESTIONS[0], PASSAGES, max_new_tokens=2)
    assert (same.token_ids, same.report) == (answer.token_ids, answer.report)
    assert parse_methods(["own+own@0.1"], ())[-1].name == "own+own@0.1"


def test_a_policy_reads_the_text_of_the_prompt_and_has_a_parameter() -> None:
    """It recomputes every "and", and without its parameter only those at the end."""
    blend = {"policy": "own[and]", "correction": "none", "method": "blend", "ratio": 0.25}
    with Engine.open(Config(store={"location": "memory"}, blend=blend), model=toy_model()) as engine:
        engine.precompute(PASSAGES)
        prompt, decode = engine.prompts.build(QUESTIONS[0], PASSAGES), engine.model.tokenizer.decode
        later = range(prompt.spans[1].start, prompt.spans[-1].stop)  # the first passage is exact
        found = {at for at in later if decode([prompt.ids[at]]).strip() == "and"}
        assert len(found) > 2
        for policy, is_found in (("own[and]", True), ("own", False)):
            done = engine.blender.run(prompt, engine.config.blend.with_values(policy=policy))
            assert (found <= set(done.result.recomputed.tolist())) is is_found
    assert "found" not in parameters(LastTokens)
