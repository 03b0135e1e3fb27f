"""Each long run made short: it ends well, and each of its promises can be seen to break."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve.config import PromptConfig
from blendserve.core import ChunkKV
from blendserve.engine.engine import Engine
from blendserve.engine.prompt import PromptBuilder
from blendserve.serve.config import ServeConfig
from blendserve.store import LMDBStore, MemoryStore
from tests.endurance import crash, fuzz_records, soak, soak_serving, soak_sharing
from tests.endurance.driver import Figures, Promises, Soak, main
from tests.support.engines import CONFIG, PASSAGES
from tests.support.engines import toy_reader as reader
from tests.support.http import Server, ToyServer
from tests.support.valkey import needs_server

BLOCK: Figures = dict.fromkeys(("warm_up", "above_cap", "below_cap", "wrong_books"), 0)
BLOCK |= {"hit_rate": 0.6, "gain": 2.0, "reused": 0.4}
SHARED: Figures = {"wrong": 0, "hung": 0, "failed": 0, "bad": 0, "found_lately": 1}
SERVED: Figures = {"wrong": [], "bad": 0, "exit_code": 0, "memory_mb": [100.0, 104.0]}
CRASHED: Figures = {**dict.fromkeys(crash.MUST_BE_0, 0), "reads_checked": 1}
FUZZED: Figures = {"crash": 0, "wrong": 0, "detected": 99, "cases": 100}


def runs(*blocks: Figures, admission: str = "tinylfu", damaged: int = 0) -> Figures:
    """Figures of the soak with these changes to a good block, in place of good ones."""
    changed = {admission: [{**BLOCK, **block} for block in blocks]}
    return {"damaged": damaged, "runs": {"tinylfu": [BLOCK] * 2, **changed}}


GOOD: list[tuple[Promises, Figures]] = [
    (soak.PROMISES, runs({}, {"hit_rate": 0.58, "gain": 1.91}, {})),
    (soak.PROMISES, runs({"warm_up": True, "hit_rate": 0.9, "below_cap": 9}, {}, {})),
    (soak.PROMISES, runs({}, {"hit_rate": 0.1, "gain": 1.0}, admission="always")),  # for contrast alone
    (soak_sharing.PROMISES, SHARED),
    (soak_serving.PROMISES, SERVED),
    (crash.PROMISES, CRASHED),
    (fuzz_records.PROMISES, FUZZED),
]
BREAKS: dict[str, list[Figures]] = {  # by promise of the soak
    "the hit rate lasts": [runs({}, {"hit_rate": 0.7}, {"hit_rate": 0.66})],
    "the gain lasts": [runs({}, {"gain": 1.8})],
    "every block reuses something": [runs({}, {"reused": 0.0})],
    "the store keeps its cap": [runs({"above_cap": 2}, {}), runs({"above_cap": 1}, admission="always")],
    "a full store stays full": [runs({"below_cap": 3}, {}, admission="always")],
    "books and records agree": [runs({"wrong_books": 1}, {})],
    "every chunk verifies": [runs({}, {}, damaged=3)],
    "two blocks after the warm-up": [runs({"warm_up": True}, {})],
}
CHANGES: dict[str, Any] = {  # of one figure, by promises that are not "NAME is 0"
    "chunks are found after the last kill": {"found_lately": 0},
    "memory is flat": {"memory_mb": [100.0, 106.0]},
    "the reader read": {"reads_checked": 0},
    "damage is detected": {"detected": 80},
}


class Steps:
    """A workload of three steps."""

    def __init__(self, **found: Any) -> None:
        self.found, self.done = found, 0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def step(self) -> tuple[int, int]:
        self.done += 1
        return self.done, 3

    def figures(self) -> Figures:
        return {**self.found, "done": self.done}


def test_every_promise_can_break_alone() -> None:
    for promises, good in GOOD:
        assert Soak(Steps(**good), promises).run()["broken"] == []
        for name in promises:
            for bad in BREAKS.get(name, [{**good, **CHANGES.get(name, {name: 1})}]):
                assert Soak(Steps(**bad), promises).run()["broken"] == [name]


@pytest.mark.parametrize(
    ("option", "code", "done"), [("--wrong=0", 0, 3), ("--wrong=1", 1, 3), ("--seconds=0", 0, 0)]
)
def test_a_tool_prints_json_and_its_exit_code_tells(
    capsys: pytest.CaptureFixture[str], option: str, code: int, done: int
) -> None:
    assert (
        main(lambda wrong: Steps(**{**SHARED, "wrong": wrong}), soak_sharing.PROMISES, option, wrong=0)
        == code
    )
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (found["done"], found["broken"]) == (done, ["wrong"] * code)


def test_a_short_soak_hits_what_a_plain_lru_of_the_same_bytes_hits() -> None:
    """Admission off is compared with ten lines of LRU, query by query; admission on hits more."""
    corpus = soak.Corpus.make(reader(), 3, 10, 0)
    found = Soak(soak.Reuse(reader(), corpus, "blend"), soak.PROMISES).run()
    on, off = found["runs"]["tinylfu"], found["runs"]["always"]
    tokens = len(PromptBuilder(reader().tokenizer, PromptConfig()).prefix)
    prefix = tokens * reader().adapter.kv_bytes_per_token
    assert [block["hit_rate"] for block in off] == [round(rate, 4) for rate in lru_hit_rates(corpus, prefix)]
    assert sum(b["refused"] for b in on) > 0 == sum(b["refused"] for b in off)
    assert sum(b["hit_rate"] for b in on) > sum(b["hit_rate"] for b in off)
    for block in (*on, *off):
        assert 0.8 * corpus.cap_bytes < block["bytes_most"] <= corpus.cap_bytes == found["cap_bytes"]
    assert not set(found["broken"]) - {"the hit rate lasts", "the gain lasts"}  # blocks of ten may differ


def lru_hit_rates(corpus: soak.Corpus, pinned: int) -> list[float]:
    """Of a cache of `cap_bytes` in which the prefix, `pinned` bytes, stays."""
    held: OrderedDict[int, int] = OrderedDict()
    rates = []
    for block in corpus.blocks:
        hits = 0
        for query in block:
            there = [chunk for chunk in query if chunk in held]
            hits += len(there)
            for chunk in there:
                held.move_to_end(chunk)
            for chunk in (chunk for chunk in query if chunk not in there):
                while pinned + sum(held.values()) + corpus.sizes[chunk] > corpus.cap_bytes:
                    held.popitem(last=False)
                held[chunk] = corpus.sizes[chunk]
        rates.append(hits / sum(map(len, block)))
    return rates


@needs_server
def test_engines_and_server_are_killed_and_no_answer_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_sharing, "KILL_EVERY", (4, 8))
    found = Soak(soak_sharing.Sharing(20, 2, 0), soak_sharing.PROMISES).run()
    assert found["broken"] == [], found
    assert found["answers"] >= 20
    assert found["chunks_found"] > 0
    assert found["servers_killed"] + found["engines_killed"] > 0


def test_many_clients_and_a_kill_leave_nothing_wrong(tmp_path: Path) -> None:
    with Engine(CONFIG, reader(), LMDBStore(tmp_path / "kv", 2**27)) as engine:
        asks = soak_serving.make_asks(engine, PASSAGES, 6, 0)
    start = lambda: ToyServer(tmp_path)  # noqa: E731
    serving = soak_serving.Serving(start, tmp_path / "kv", asks, 80, 8, 1)
    found = Soak(serving, soak_serving.PROMISES).run()
    assert not set(found["broken"]) - {"memory is flat"}, found  # after so few requests it need not be
    assert sum(found["requests"].values()) == 80
    assert found["requests"].keys() == soak_serving.KINDS.keys()
    assert found["cut_off_and_asked_again"] > 0
    assert found["documents_written"] > 1
    assert found["good"] > len(PASSAGES)


def test_a_wrong_answer_and_a_lost_document_are_noticed(tmp_path: Path) -> None:
    server: Any = Server(tmp_path, ServeConfig())
    asks = [(ask, "another") for ask, _ in soak_serving.make_asks(server.engine, PASSAGES, 2, 0)]
    serving = soak_serving.Serving(lambda: None, tmp_path, asks, 6, 2, 1)
    serving.documents["never-there"] = 2
    server.memory_mb = 0.0
    try:
        serving.ask(server, 6)
        serving.find_documents(server)
    finally:
        server.close()
    for noticed in ("another", "never-there"):
        assert any(noticed in problem for problem in serving.wrong)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The crash test computes on one."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_two_rounds_of_kills_lose_nothing(one_thread: None) -> None:
    found = Soak(crash.Crashes(2, 6, 0), crash.PROMISES).run()
    assert found["broken"] == [], found
    assert sum(n for name, n in found.items() if name.startswith("kills_")) == 2
    assert found["reads_checked"] > 12
    assert found["commits"] >= 7


def test_a_wrong_tensor_is_told_from_a_right_one() -> None:
    made = {bytes([n]) * 28: ChunkKV(*torch.randn(2, 2, 1, 3, 4)) for n in range(3)}
    right, wrong, _ = made
    counts = Counter[str]()
    with MemoryStore(1 << 20) as store:
        store.put(right, made[right])
        store.put(wrong, ChunkKV(made[wrong].keys, made[wrong].values + 1e-6))
        with store.reading() as snapshot:
            assert crash.look(snapshot, made, counts) == {right}
    assert +counts == {"reads_checked": 2, "corrupt_reads": 1}


def test_a_chunk_that_was_reported_stored_and_is_not_there_is_lost(tmp_path: Path, one_thread: None) -> None:
    crashes = crash.Crashes(1, 3, 0)
    crashes.open(tmp_path)
    crashes.reader, there = multiprocessing.Pipe()
    said, seen, whole = list(crashes.expected)[:3]
    with LMDBStore(crashes.folder, crash.CAP) as store:
        store.put(whole, crashes.expected[whole])
    there.send((Counter(), {seen}))
    crashes.judge([crash.Said("begins", said, 0.0), crash.Said("stored", said, 0.1)])
    assert (crashes.counts["lost_chunks"], crashes.committed) == (2, {whole})
    assert not crashes.counts["wrong_sums"] + crashes.counts["unclean_verifies"]
    there.send((Counter(), set()))
    crashes.judge([crash.Said("begins", whole, 0.2)])
    assert crashes.counts["computed_twice"] == 1


def test_damaged_records_are_detected() -> None:
    found = Soak(fuzz_records.Fuzzer(100, 0), fuzz_records.PROMISES).run()
    assert found["broken"] == [], found
    assert (found["cases"], found["kinds"] > 20) == (100, True)
