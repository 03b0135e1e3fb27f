"""The long runs, made short: they end well, and each of their promises can be seen to break."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from blendserve.config import PromptConfig
from blendserve.core import ChunkKV
from blendserve.engine.prompt import PromptBuilder
from blendserve.store import LMDBStore, MemoryStore

SCRIPTS = Path(__file__).parent.parent / "scripts"


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


soak, crash = script("soak"), script("crash_test")


def last_line(text: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return result


def test_a_short_soak_hits_what_a_plain_lru_of_the_same_bytes_hits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admission off is checked query by query against ten lines of LRU; admission on, to be another thing."""
    monkeypatch.setattr(
        sys, "argv", ["soak.py", "--model", "tiny", "--queries", "40", "--block", "10", "--json"]
    )
    reader = soak.toy_reader()
    work = soak.workload(reader, 4, 10, 0)
    monkeypatch.setattr(soak, "toy_reader", lambda: reader)
    monkeypatch.setattr(soak, "workload", lambda *_: work)
    soak.main()
    result = last_line(capsys.readouterr().out)
    on, off = result["runs"]
    prefix = len(PromptBuilder(reader.tokenizer, PromptConfig()).prefix) * reader.adapter.kv_bytes_per_token
    rates = [round(rate, 4) for rate in lru_hit_rates(work, prefix)]
    assert [block["hit_rate"] for block in off["blocks"]] == rates
    assert [run["admission"] for run in (on, off)] == ["tinylfu", "always"]
    assert sum(b["refused"] for b in on["blocks"]) > 0 == sum(b["refused"] for b in off["blocks"])
    assert sum(b["hit_rate"] for b in on["blocks"]) > sum(b["hit_rate"] for b in off["blocks"])
    for block in (*on["blocks"], *off["blocks"]):
        assert 0.8 * result["cap_bytes"] < block["bytes_most"] <= result["cap_bytes"] == work.cap_bytes
        assert block["methods"] == {"blend": 10}
        assert block["ratios"]["blend"]["n"] == 1
    assert not [promise for promise in result["broken"] if "fell" not in promise]  # blocks of ten may differ


def lru_hit_rates(work: Any, pinned: int) -> list[float]:
    """Of a cache of `work.cap_bytes` in which the prefix, `pinned` bytes, stays."""
    held: OrderedDict[int, int] = OrderedDict()
    rates = []
    for block in work.blocks:
        hits = 0
        for query in block:
            there = [chunk for chunk in query if chunk in held]
            hits += len(there)
            for chunk in there:
                held.move_to_end(chunk)
            for chunk in (chunk for chunk in query if chunk not in there):
                while pinned + sum(held.values()) + work.sizes[chunk] > work.cap_bytes:
                    held.popitem(last=False)
                held[chunk] = work.sizes[chunk]
        rates.append(hits / sum(map(len, block)))
    return rates


def a_block(**values: Any) -> Any:
    spread = soak.Spread(1.0, 1.0, 1.0, 1)
    block = soak.Block(
        warm_up=False,
        hit_rate=0.6,
        gain=2.0,
        reused=0.4,
        methods={"blend": 50},
        ttft_ms=spread,
        ratios={"blend": spread},
        after_ms=1.0,
        bytes_most=1,
        file_bytes=1,
        chunks=1,
        evictions=1,
        refused=1,
        above_cap=0,
        below_cap=0,
        wrong_books=0,
    )
    return replace(block, **values)


def a_run(blocks: Sequence[Any], admission: str = "tinylfu", damaged: int = 0) -> Any:
    return soak.Run(admission, "blend", tuple(blocks), damaged)


@pytest.mark.parametrize(
    ("run", "promise"),
    [
        (a_run([a_block(), a_block(hit_rate=0.7), a_block(hit_rate=0.66)]), "hit_rate fell by 5.7%"),
        (a_run([a_block(), a_block(gain=1.8)]), "gain fell by 10.0%"),
        (a_run([a_block(), a_block(reused=0.0)]), "1 blocks reused nothing"),
        (a_run([a_block(above_cap=2), a_block()]), "above its cap after 2"),
        (a_run([a_block(above_cap=1), a_block()], "always"), "above its cap after 1"),
        (a_run([a_block(below_cap=3), a_block()], "always"), "room to spare after 3"),
        (a_run([a_block(wrong_books=1), a_block()]), "differed after 1"),
        (a_run([a_block(), a_block()], damaged=3), "3 chunks do not verify"),
        (a_run([a_block(warm_up=True), a_block()]), "fewer than two blocks"),
    ],
)
def test_each_promise_of_the_soak_can_break(run: Any, promise: str) -> None:
    (broken,) = run.broken()
    assert promise in broken


@pytest.mark.parametrize(
    "run",
    [
        a_run([a_block(), a_block(hit_rate=0.58, gain=1.91), a_block()]),
        a_run([a_block(warm_up=True, hit_rate=0.9, below_cap=9), a_block(), a_block()]),
        a_run([a_block(), a_block(hit_rate=0.1, gain=1.0)], "always"),  # for contrast: shown, not promised
    ],
)
def test_a_good_soak_keeps_them(run: Any) -> None:
    assert run.broken() == []


def test_two_rounds_of_kills_lose_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "crash_test.py"), "--rounds", "2", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = last_line(done.stdout)
    assert result["broken"] == []
    assert sum(n for name, n in result.items() if name.startswith("kills_")) == 2
    assert result["reads_checked"] > 100
    assert result["commits"] >= crash.CHUNKS + 1


@pytest.mark.parametrize("promise", crash.MUST_BE_0)
def test_each_promise_of_the_crash_test_can_break(promise: str) -> None:
    good = Counter({"reads_checked": 1})
    assert crash.figures(good, 1, 0)["broken"] == []
    assert crash.figures(good + Counter({promise: 1}), 1, 0)["broken"] == [promise]


def test_a_crash_test_that_read_nothing_fails() -> None:
    assert crash.figures(Counter(), 1, 0)["broken"] == ["no reads"]


def test_a_wrong_tensor_and_a_damaged_one_are_told_from_right_ones() -> None:
    made = {bytes([n]) * 28: ChunkKV(*torch.randn(2, 2, 1, 3, 4)) for n in range(3)}
    right, wrong, absent = made
    tally = crash.Tally()
    with MemoryStore(1 << 20) as store:
        store.put(right, made[right])
        store.put(wrong, ChunkKV(made[wrong].keys, made[wrong].values + 1e-6))
        with store.reading() as snapshot:
            assert tally.look(snapshot, made) == {right}
    assert (tally.reads, tally.corrupt, tally.damaged, tally.seen) == (2, 1, 0, {right})
    assert absent not in tally.seen


def test_what_was_reported_stored_and_is_not_there_is_lost(tmp_path: Path) -> None:
    here, there = multiprocessing.Pipe()
    LMDBStore(tmp_path, crash.CAP).close()
    trial = crash.Trial(tmp_path, 0, here)
    said, seen, whole = list(trial.expected)[:3]
    with LMDBStore(tmp_path, crash.CAP) as store:
        store.put(whole, trial.expected[whole])
    there.send(crash.Tally(seen={seen}))
    trial.judge([crash.Said("begins", said, 0.0), crash.Said("stored", said, 0.1)])
    assert trial.counts["lost_chunks"] == 2
    assert trial.committed == {whole}
    assert not trial.counts["wrong_sums"] + trial.counts["unclean_verifies"]
    there.send(crash.Tally())
    trial.judge([crash.Said("begins", whole, 0.2)])
    assert trial.counts["computed_twice"] == 1
