"""Long runs made short: each ends well, and each of its promises can be seen to break."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from blendserve.config import ServeConfig
from blendserve.core import Document
from blendserve.engine.engine import Engine
from blendserve.kv import ChunkKV, stacked
from blendserve.store import LMDBStore
from tests.endurance import crash, faults, kill_index, kill_serving, soak_serving
from tests.endurance import soak as reuse
from tests.endurance.driver import Figures, Promises, Workload, main, soak
from tests.support.engines import CONFIG, PASSAGES
from tests.support.engines import toy_model as model
from tests.support.http import Server, ToyServer
from tests.support.kernel_switches import threads
from tests.support.stores import put_kv

BLOCK: Figures = {"warm_up": False, "bytes_most": 100, "hit_rate": 0.6, "gain": 2.0, "reused": 0.4}


def blocks(*changes: Figures, damaged: int = 0) -> Figures:
    """Figures of the soak: good blocks with these changes."""
    return {"damaged": damaged, "cap_bytes": 100, "blocks": [{**BLOCK, **change} for change in changes]}


GOOD: list[tuple[Promises, Figures]] = [
    (reuse.PROMISES, blocks({}, {"hit_rate": 0.58, "gain": 1.91}, {})),
    (reuse.PROMISES, blocks({"warm_up": True, "hit_rate": 0.9, "gain": 9.0, "reused": 0.0}, {}, {})),
    (faults.PROMISES, {"wrong": 0, "longest_s": 59.0}),
    (kill_serving.PROMISES, {"wrong": [], "bad": 0, "exit_code": 0, "memory_mb": [100.0, 104.0]}),
    (
        soak_serving.PROMISES,
        {
            **{"wrong": [], "failed": [], "tracebacks": 0, "exit_code": 0, "good": [{"n": 1}]},
            **{"rss_mb": [300.0, 20.0], "descriptors": [30.0, 9.0], "threads": [20.0, 1.0]},
            "after": {"slots": 0.0, "queue": 0.0, "held_chunks": 0.0},
        },
    ),
    (crash.PROMISES, {**dict.fromkeys(crash.MUST_BE_0, 0), "reads_checked": 1}),
    (kill_index.PROMISES, {**dict.fromkeys(kill_index.MUST_BE_0, 0), "kills_inside": 1}),
]
BAD: dict[str, Figures] = {  # by promises that are not "NAME is 0"
    "the hit rate lasts": blocks({}, {"hit_rate": 0.7}, {"hit_rate": 0.66}),
    "the gain lasts": blocks({}, {"gain": 1.8}),
    "every block reuses something": blocks({}, {"reused": 0.0}),
    "the store keeps its cap": blocks({}, {"bytes_most": 101}),
    "every chunk verifies": blocks({}, {}, damaged=3),
    "two blocks after the warm-up": blocks({"warm_up": True}, {}),
    "memory is flat": {"memory_mb": [100.0, 106.0], "rss_mb": [300.0, 30.0]},
    "descriptors are flat": {"descriptors": [30.0, 60.0]},
    "threads are flat": {"threads": [20.0, 10.0]},
    "nothing is held at the end": {"after": {"slots": 0.0, "queue": 0.0, "held_chunks": 1.0}},
    "the good client is answered": {"good": [{"n": 1}, {"n": 0}]},
    "the reader read": {"reads_checked": 0},
    "no request hangs": {"longest_s": 60.0},
    "some kills hit a change": {"kills_inside": 0},
}


def parts(**found: Any) -> Workload:
    """A workload of three parts."""
    for n in range(3):
        if (yield n, 3):
            break
    else:
        n = 3
    return {**found, "done": n}


def test_every_promise_can_break_alone() -> None:
    for promises, good in GOOD:
        assert soak(parts(**good), promises)["broken"] == []
        for name in promises:
            assert soak(parts(**{**good, **BAD.get(name, {name: 1})}), promises)["broken"] == [name]


@pytest.mark.parametrize(
    ("option", "code", "done"), [("--wrong=0", 0, 3), ("--wrong=1", 1, 3), ("--seconds=0", 0, 0)]
)
def test_a_tool_prints_json_and_its_exit_code_tells(
    capsys: pytest.CaptureFixture[str], option: str, code: int, done: int
) -> None:
    promises, good = GOOD[2]
    assert main(lambda wrong: parts(**{**good, "wrong": wrong}), promises, option, wrong=0) == code
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (found["done"], found["broken"]) == (done, ["wrong"] * code)


def test_blocks_have_one_mix_and_no_query_twice() -> None:
    blocks = list(reuse.zipf_blocks(400, 10, 50, 3))
    queries = {query for block in blocks for query in block}
    assert ({len(set(query)) for query in queries}, len(queries)) == ({reuse.PER_QUERY}, 500)
    mixes = [Counter(chunk for query in block for chunk in query) for block in blocks]
    assert all(abs(mixes[0][n] - mix[n]) <= 1 for mix in mixes for n in range(400))
    assert mixes[0][0] > 3 * mixes[0][9]


def test_reuse_lasts() -> None:
    found = soak(reuse.reuse(model(), 3, 10, "blend", 0), reuse.PROMISES)
    assert not set(found["broken"]) - {"the hit rate lasts", "the gain lasts"}  # blocks of ten may differ
    assert all(block["bytes_most"] > 0.8 * found["cap_bytes"] for block in found["blocks"])


@pytest.mark.floors  # as the server, which is another process
def test_many_clients_and_a_kill_leave_nothing_wrong(tmp_path: Path) -> None:
    with Engine(CONFIG, model(), LMDBStore(tmp_path / "kv", 2**27)) as engine:
        asks = kill_serving.make_asks(engine, PASSAGES, 6, 0)
    start = lambda: ToyServer(tmp_path)  # noqa: E731
    found = soak(kill_serving.Serving(start, tmp_path / "kv", asks, 50, 8, 1).run(), kill_serving.PROMISES)
    assert not set(found["broken"]) - {"memory is flat"}, found  # after so few requests it need not be
    assert sum(found["requests"].values()) == 50
    assert found["requests"].keys() == kill_serving.KINDS.keys()
    assert found["cut_off_and_asked_again"] > 0
    assert found["documents_written"] > 0
    assert found["good"] > len(PASSAGES)


def test_a_wrong_answer_and_a_lost_document_are_noticed(tmp_path: Path) -> None:
    server: Any = Server(tmp_path, ServeConfig())
    asks = [(ask, "another") for ask, _ in kill_serving.make_asks(server.engine, PASSAGES, 2, 0)]
    serving = kill_serving.Serving(lambda: None, tmp_path, asks, 6, 2, 1)
    serving.documents["never-there"] = 2
    server.memory_mb = 0.0
    try:
        serving.ask(server, 6)
        serving.find_documents(server)
    finally:
        server.close()
    for noticed in ("another", "never-there"):
        assert any(noticed in problem for problem in serving.wrong)


def test_killed_changes_of_an_index_lose_nothing() -> None:
    found = soak(kill_index.Kills(7, 0).run(), kill_index.PROMISES)
    assert not set(found["broken"]) - {"some kills hit a change"}, found  # of so few, none may
    assert {name for name in found if name.startswith("kills_of_")} == {
        f"kills_of_{kind}" for kind in kill_index.KINDS.split(",")
    }


def test_lost_and_torn_documents_are_noticed(tmp_path: Path) -> None:
    kills = kill_index.Kills(1, 0)
    kills.folder, kills.held = tmp_path, {"lost": "one", "torn": "w1 " * 90}
    index = kill_index.open_index(tmp_path)
    index.add([Document("w1 " * 30, id="torn"), Document("was deleted", id="returned")])
    kills.judge("add", {"under way": "two"})
    assert kills.counts["lost"] > 1
    assert kills.counts["torn_or_returned"] > 1


@threads(1)
def test_two_rounds_of_kills_lose_nothing() -> None:
    found = soak(crash.Crashes(2, 6, 0).run(), crash.PROMISES)
    assert found["broken"] == [], found
    assert sum(n for name, n in found.items() if name.startswith("kills_")) == 2
    assert found["reads_checked"] > 0
    assert found["commits"] > 0  # how many depends on when a process is killed


@threads(1)
def test_lost_and_wrong_chunks_are_noticed(tmp_path: Path) -> None:
    """One was reported stored, another was seen; neither is there. A third is there, then with a wrong tensor."""
    crashes = crash.Crashes(1, 3, 0)
    crashes.open(tmp_path)
    crashes.reader, there = multiprocessing.Pipe()
    said, seen, whole = list(crashes.expected)[:3]
    with LMDBStore(crashes.folder, crash.CAP) as store:
        put_kv(store, whole, crashes.expected[whole])
    there.send((Counter(), {seen}))
    crashes.judge([("begins", said, 0.0), ("stored", said, 0.1)])
    assert (crashes.counts["lost_chunks"], crashes.committed) == (2, {whole})
    assert not crashes.counts["wrong_sums"] + crashes.counts["unclean_verifies"]
    there.send((Counter(), set()))
    kv = crashes.expected[whole]
    crashes.expected[whole] = ChunkKV(stacked(kv.keys), stacked(kv.values) + 1e-6)
    crashes.judge([("begins", whole, 0.2)])
    assert (crashes.counts["computed_twice"], crashes.counts["corrupt_reads"]) == (1, 1)
