"""Four engine processes on one server answer as one engine does."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from blendserve.config import BlendConfig, Config, DecodeConfig, ValkeyConfig
from blendserve.core import Passage, TokenIds
from blendserve.engine.engine import Engine
from blendserve.models.loader import Reader
from blendserve.models.toy import toy_reader
from blendserve.store import KVStore, MemoryStore
from blendserve.store.policies import LRU
from blendserve.store.valkey.store import ValkeyStore
from tests.support.forked import process
from tests.store.valkey.servers import needs_server, settings

CAP = 1 << 30
ENGINES = 4
CONFIG = Config(blend=BlendConfig(method="blend"), decode=DecodeConfig(max_new_tokens=6))
PASSAGES = [Passage(f"Passage {n} says {n * n}, and nothing beside it.") for n in range(6)]
QUESTIONS = [(f"What does passage {n} say?", [PASSAGES[(n + k) % 6] for k in range(3)]) for n in range(6)]


def answers(reader: Reader, store: KVStore, filled: Callable[[], object] = lambda: None) -> list[TokenIds]:
    """Asked twice: the first time fills the store, the second time finds all there."""
    with Engine(CONFIG, reader, store) as engine:
        for question, passages in QUESTIONS:
            engine.answer(question, passages)
        filled()
        found = [engine.answer(question, passages) for question, passages in QUESTIONS]
    assert all(answer.report.chunks_hit == 3 for answer in found)
    return [answer.token_ids for answer in found]


def engines(line: Connection, server: ValkeyConfig) -> None:
    """As many processes, forked from one that has loaded the reader: loading takes longer than all the rest."""
    reader, forking = toy_reader(), multiprocessing.get_context("fork")
    filled, results = forking.Barrier(ENGINES), forking.Queue()

    def engine() -> None:
        results.put(answers(reader, ValkeyStore(server, CAP, eviction=LRU()), filled.wait))

    running = [forking.Process(target=engine, daemon=True) for _ in range(ENGINES)]
    for one in running:
        one.start()
    line.send([results.get() for _ in running])


@needs_server
def test_building_an_index_leaves_what_others_have_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendserve.engine.engine.load_reader", lambda config, say: toy_reader())
    store = {"kind": "valkey", "valkey": settings(tmp_path)}
    config = Config(store=store, blend=BlendConfig(method="blend"))
    for n, name in enumerate(("one", "two"), start=1):
        with Engine.build(tmp_path / name, [{"id": name, "text": f"What {name} says."}], config) as engine:
            engine.precompute()
            assert engine.store.stats().pins == n + 1  # and the prefix


@needs_server
def test_four_engines_on_one_server_answer_as_one_engine_does(tmp_path: Path) -> None:
    with process(engines, settings(tmp_path)) as (_, line):
        expected = answers(toy_reader(), MemoryStore(CAP))  # while the other process loads its own
        assert line.recv() == [expected] * ENGINES
    with ValkeyStore(settings(tmp_path), CAP) as store:
        assert store.stats().chunks == len(PASSAGES) + 1  # and the prefix
        assert store.verify().bad == ()
