"""The codec that the settings name codes what an engine stores; its tables are fitted, kept, and found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from blendserve import Config, Engine, Passage
from blendserve.config import StoreConfig, changed
from blendserve.core import Document
from blendserve.engine.calibration import chunks_of, fit, samples, writing_codec
from blendserve.errors import ConfigError, InputError, TablesMissing
from blendserve.models import loader
from blendserve.registry import CODECS
from blendserve.store import LMDBStore, MemoryStore, open_store
from blendserve.store.codecs.base import forget_ready, known_codec
from tests.engine.helpers import reader

CAP = 2**28
WORDS = [f"The {n}th owl of the wood sleeps by day and hunts by night, silent as snow." for n in range(40)]
PASSAGES = [Passage(text) for text in WORDS[:3]]
needs_constriction = pytest.mark.skipif(
    known_codec("cachegen") is None, reason="constriction is not installed: pip install 'blendserve[codecs]'"
)


def config(codec: str) -> Config:
    return Config(store=StoreConfig(codec=codec))


def engine(store: MemoryStore | LMDBStore, codec: str) -> Engine:
    return Engine(config(codec), reader(), store)


def smaller(made: Engine) -> float:
    """How many times, of what is coded: the prefix is not."""
    stats, prefix = made.store.stats(), len(made.prompts.prefix) * made.reader.adapter.kv_bytes_per_token
    return (stats.raw_bytes - prefix) / (stats.bytes - prefix)


def test_a_wrong_codec_is_told_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"store\.codec.*did you mean 'int8'"):
        StoreConfig(codec="int9")
    with pytest.raises(ConfigError, match="known are int8@0"):
        StoreConfig(codec="int8@2")
    assert StoreConfig().codec == CODECS.default


def test_a_store_that_is_opened_writes_by_the_settings_codec(tmp_path: Path) -> None:
    from tests.support.stores import chunk, key_of

    for kind in ("lmdb", "memory"):
        with open_store(StoreConfig(codec="int8", kind=kind), tmp_path / kind) as store:
            store.put(key_of(1), chunk(50, head_dim=32))
            assert store.stats().bytes < store.stats().raw_bytes / 2


def test_an_engine_answers_from_coded_kv_and_says_what_it_takes(tmp_path: Path) -> None:
    with LMDBStore(tmp_path, CAP) as store, engine(store, "int8") as made:
        store.write_by(writing_codec(made.config, made.reader, made.prompts, store))
        made.precompute(PASSAGES)
        answer = made.answer("Who sleeps?", PASSAGES, method="reuse", max_new_tokens=3)
        assert answer.report.chunks_hit == 3
        assert smaller(made) > 2.5  # of 32 bits


@needs_constriction
def test_without_tables_the_way_to_them_is_told() -> None:
    with engine(MemoryStore(CAP), "cachegen") as made, pytest.raises(TablesMissing, match="codec fit"):
        writing_codec(made.config, made.reader, made.prompts, made.store)


def test_tables_of_another_version_are_as_none() -> None:
    with engine(MemoryStore(CAP), "predict") as made:
        made.store.put_tables("predict", made.reader.fingerprint, b"what an older blendserve has fitted")
        with pytest.raises(TablesMissing, match=r"none for this version.*codec fit"):
            writing_codec(made.config, made.reader, made.prompts, made.store)


@needs_constriction
def test_tables_are_fitted_once_and_found_by_the_next_process(tmp_path: Path) -> None:
    documents = [Document("\n\n".join(WORDS))]
    with LMDBStore(tmp_path, CAP) as store, engine(store, "cachegen@2") as made:
        seen: list[tuple[int, int]] = []
        parts = (made.config, made.reader, made.prompts, store)
        chunks = chunks_of(documents, 400, made.config, made.prompts)
        hash = fit("cachegen", chunks, *parts[1:], lambda *update: seen.append(update))
        assert seen[-1][0] == seen[-1][1] <= 400
        codec = writing_codec(*parts)
        assert (codec.coding.level, codec.coding.tables) == (2, hash)
        store.write_by(codec)
        made.precompute(PASSAGES)
        assert smaller(made) > 8
    forget_ready()
    with LMDBStore(tmp_path, CAP) as store, engine(store, "cachegen") as made:
        assert writing_codec(made.config, made.reader, made.prompts, store).coding.tables == hash
        assert made.answer("Who?", PASSAGES, method="reuse", max_new_tokens=2).report.chunks_hit == 3


@needs_constriction
def test_a_bundled_readers_tables_are_fitted_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setitem(loader.BUNDLED, "tiny", loader.BUNDLED["smollm2-135m"])
    monkeypatch.setattr("blendserve.engine.calibration.FIT_TOKENS", 300)
    with engine(MemoryStore(CAP), "cachegen") as made:
        made._ready(said.append)
        assert "Fitting tables" in " ".join(said)
        assert made.store.stats().tables == 1
        made.precompute(PASSAGES)
        assert smaller(made) > 8


def test_chunks_to_fit_on_are_whole_passages_up_to_the_tokens_asked_for() -> None:
    made = engine(MemoryStore(CAP), "raw")
    documents = [Document("\n\n".join(WORDS)), Document("")]
    chunks = chunks_of(documents, 300, changed(made.config), made.prompts)
    assert sum(map(len, chunks)) == 300
    assert chunks_of(documents, 10**6, made.config, made.prompts)[:-1]
    for (ids, kv), expected in zip(samples(chunks, made.reader, made.prompts), chunks, strict=True):
        assert ids == expected
        assert kv.n_tokens == len(ids)
    with pytest.raises(InputError):
        fit("int8", [], made.reader, made.prompts, made.store)
