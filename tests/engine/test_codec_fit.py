"""The codec of the settings codes what an engine stores; its tables are fitted once, on text that the model samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from blendserve import Config, Engine, Passage
from blendserve.config import BlendConfig, StoreConfig
from blendserve.core import Document
from blendserve.engine import codec_fit as module
from blendserve.engine.codec_fit import chunks_of, fit, self_generated_text, writing_codec
from blendserve.errors import InputError, TablesMissing
from blendserve.models import sources
from blendserve.store import KVStore, LMDBStore, MemoryStore
from blendserve.store.codecs.base import Codec, forget_ready, known_codec
from tests.support.engines import toy_engine, toy_model

CAP, LENGTH, TOGETHER = 2**28, 8, 4
WORDS = [f"The {n}th owl of the wood sleeps by day and hunts by night, silent as snow." for n in range(40)]
PASSAGES = [Passage(text) for text in WORDS[:3]]
needs_constriction = pytest.mark.skipif(
    known_codec("cachegen") is None, reason="constriction is not installed: pip install '.[codecs]'"
)


def engine(store: KVStore, codec: str) -> Engine:
    return toy_engine(store, Config(store=StoreConfig(codec=codec)))


def codec_of(made: Engine) -> Codec:
    return writing_codec(made.config, made.model, made.prompts, made.store)


def compression(made: Engine) -> float:
    stats = made.store.stats()
    return stats.raw_bytes / stats.bytes


@needs_constriction
def test_an_engine_stores_coded_kv_and_answers_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of a bundled model are fitted on first use."""
    monkeypatch.setitem(sources.BUNDLED, "tiny", sources.BUNDLED["smollm2-135m"])
    monkeypatch.setattr(module, "FIT_TOKENS", 100)
    monkeypatch.setattr(module, "TEXT_TOKENS", 50)
    config = Config(store=StoreConfig(codec="cachegen", location="memory"), blend=BlendConfig(method="reuse"))
    with Engine.open(config, model=toy_model()) as made:
        assert made.store.stats().tables == 1
        made.precompute(PASSAGES)
        assert made.answer("Who sleeps?", PASSAGES, max_new_tokens=3).report.chunks_hit == 3
        assert compression(made) > 8  # of 32 bits


@needs_constriction
def test_tables_are_fitted_once_and_found_by_the_next_process(tmp_path: Path) -> None:
    with LMDBStore(tmp_path, CAP) as store, engine(store, "cachegen@2") as made:
        store.blobs.put("cachegen", made.model.fingerprint, b"what an older blendserve has fitted")
        with pytest.raises(TablesMissing) as error:
            codec_of(made)
        assert error.value.setting == "store.codec"
        updates: list[tuple[int, int]] = []
        chunks = chunks_of([Document("\n\n".join(WORDS))], 400, made.config, made.prompts)
        hash = fit(
            "cachegen", chunks, made.model, made.prompts, store, lambda *update: updates.append(update)
        )
        assert updates[-1][0] == updates[-1][1] <= 400
        codec = codec_of(made)
        assert (codec.coding.level, codec.coding.tables) == (2, hash)
        made.blender.writer.codec = codec
        made.precompute(PASSAGES)
        assert compression(made) > 8
    forget_ready()
    with LMDBStore(tmp_path, CAP) as store, engine(store, "cachegen") as made:
        assert codec_of(made).coding.tables == hash
        assert made.answer("Who?", PASSAGES, method="reuse", max_new_tokens=2).report.chunks_hit == 3


def test_chunks_to_fit_on_are_whole_passages_up_to_the_tokens_asked_for() -> None:
    made = engine(MemoryStore(CAP), "raw")
    some, every = (
        chunks_of([Document("\n\n".join(WORDS))], n, made.config, made.prompts) for n in (300, 10**6)
    )
    assert sum(map(len, some)) == 300
    assert every[: len(some) - 1] == some[:-1]
    with pytest.raises(InputError):
        fit("int8", [], made.model, made.prompts, made.store)


@pytest.mark.parametrize("tokens", [LENGTH - 1, TOGETHER * LENGTH + 10])
def test_own_words_are_as_many_tokens_as_asked_for_the_same_each_time(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TEXT_TOKENS", LENGTH)
    monkeypatch.setattr(module, "BATCH", TOGETHER)
    updates: list[tuple[int, int]] = []
    texts = self_generated_text(toy_model(), tokens, lambda *update: updates.append(update))
    assert sum(map(len, texts)) == tokens
    assert updates == sorted(updates)
    assert updates[-1] == (tokens, tokens)
    assert self_generated_text(toy_model(), tokens) == texts
    assert len({text[0] for text in texts}) == len(texts)
