"""A policy, a correction, a codec and a store kind are each one class and one line, as docs/how-to/extend.md says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blendserve.blend.corrections.base import Correction
from blendserve.blend.layout import LayerKV, Layout
from blendserve.blend.policies.base import Policy
from blendserve.config import Config
from blendserve.core import ChunkKV
from blendserve.engine.engine import Engine
from blendserve.errors import ConfigError
from blendserve.evaluate.methods import parse_methods
from blendserve.kernels.rows import Rows
from blendserve.registry import CODECS, CORRECTIONS, POLICIES, STORES
from blendserve.store import MemoryStore, read_record
from blendserve.store.codecs.base import Buffer, ChunkShape, Codec, Coding, Pair
from blendserve.store.codecs.raw import Raw
from tests.support.engines import PASSAGES, QUESTIONS, toy_engine, toy_reader

REGISTRIES = {"policy": POLICIES, "correction": CORRECTIONS, "codec": CODECS, "store": STORES}
OPTIONS: dict[str, Any] = {"method": "blend", "ratio": 0.25, "max_new_tokens": 2}


class LastTokens(Policy):
    """Recomputes the last reusable tokens."""

    def rank(self, layout: Layout, scores: Tensor | None) -> Tensor:
        return torch.arange(layout.n_tokens)


class Doubled(Correction):
    """Doubles stored values."""

    def apply(self, l: int, stored: LayerKV, rows: Rows, fresh: LayerKV) -> bool:
        for span in self.spans:
            stored[1][:, span.start : span.stop] *= 2
        return True


class Negated(Codec):
    """Stores every number with the other sign."""

    random_access = True
    coding = Coding("own")

    @classmethod
    def with_tables(cls, level: int, tables: bytes = b"") -> Negated:
        return cls()

    @classmethod
    def check(cls, coding: Coding, shape: ChunkShape, lengths: Sequence[int]) -> None:
        if any(length != shape.layer_bytes for length in lengths):
            raise ValueError("a layer has another length")

    def expected_bytes(self, raw_bytes: int) -> int:
        return raw_bytes

    def encode(self, kv: ChunkKV) -> list[Buffer]:
        return Raw().encode(ChunkKV(-kv.keys, -kv.values))

    def decode(self, shape: ChunkShape, l: int, segment: Buffer) -> Pair:
        keys, values = Raw().decode(shape, l, segment)
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


def config(**changes: Any) -> Config:
    merged: dict[str, Any] = {"store": {"location": "memory"}, "blend": {"correction": "none"}}
    for name, section in changes.items():
        merged[name] = {**merged.get(name, {}), **section}
    return Config(**merged)


def test_an_engine_runs_on_all_four(tmp_path: Path) -> None:
    file, settings = tmp_path / "config.yaml", {"policy": "own", "correction": "own"}
    file.write_text(config(store={"location": "own", "codec": "own"}, blend=settings).to_yaml())
    with Engine.open(Config.load(file), reader=toy_reader()) as engine:
        engine.precompute(PASSAGES)
        answer = engine.answer(QUESTIONS[0], PASSAGES, **OPTIONS)
        assert isinstance(engine.store, OwnStore)
        record = read_record(engine.store, engine.blender.key(engine.prompts.chunk(PASSAGES[1]).ids))
        assert record is not None
        assert record.coding.codec == "own"
    report, explanation = answer.report, answer.explanation
    assert (report.policy, report.correction, report.chunks_hit) == ("own", "own", len(PASSAGES))
    assert explanation is not None
    *_, last, suffix = explanation.runs
    assert (last, suffix[0]) == (("recomputed", report.tokens_recomputed), "computed")
    assert "corrected" in dict(explanation.runs)


@pytest.mark.parametrize("kind", ["codec", "store"])
def test_a_codec_and_a_store_change_no_answer(kind: str) -> None:
    changes = {"store": {"location": "own"} if kind == "store" else {"codec": "own"}}
    with Engine.open(config(**changes), reader=toy_reader()) as own, toy_engine(config=config()) as usual:
        answers = []
        for engine in (own, usual):
            engine.precompute(PASSAGES)
            answers.append(engine.answer(QUESTIONS[0], PASSAGES, **OPTIONS))
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].report == answers[1].report


@pytest.mark.parametrize("kind", ["policy", "correction"])
def test_a_policy_and_a_correction_change_what_they_say(kind: str) -> None:
    with toy_engine(config=config()) as engine:
        engine.precompute(PASSAGES)
        plans = [engine.blender.run(prompt, blend) for prompt, blend in prompts_of(engine, kind)]
    own, usual = plans
    same_rows = torch.equal(own.result.recomputed, usual.result.recomputed)
    assert same_rows == (kind == "correction")
    assert not torch.equal(own.result.logits, usual.result.logits)


def prompts_of(engine: Engine, kind: str) -> Iterator[tuple[Any, Any]]:
    prompt = engine.prompts.build(QUESTIONS[0], PASSAGES)
    for name in ("own", "query" if kind == "policy" else "none"):
        yield prompt, engine.config.blend.model_copy(update={"method": "blend", kind: name})


def test_settings_evaluation_and_errors_know_them_while_they_are_registered() -> None:
    assert parse_methods(["own+own@0.1"], ())[-1].name == "own+own@0.1"
    POLICIES.remove("own")
    try:
        with pytest.raises(ConfigError) as error:
            Config(blend={"policy": "own"})
        assert error.value.setting == "blend.policy"
    finally:
        POLICIES.add("own", f"{__name__}:LastTokens")
