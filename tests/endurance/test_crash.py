"""The crash test, made short: nothing is lost, and each of its promises can be seen to break."""

from __future__ import annotations

import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blendserve.core import ChunkKV
from blendserve.store import LMDBStore, MemoryStore
from tests.endurance import crash
from tests.endurance.helpers import last_line

FEW = 10  # chunks: as many as are reached before a kill at most


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The crash test computes on one."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_two_rounds_of_kills_lose_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["crash", "--rounds", "2", "--chunks", str(FEW), "--json"])
    code, shown = crash.main(), capsys.readouterr()
    assert code == 0, shown
    result = last_line(shown.out)
    assert result["broken"] == []
    assert sum(n for name, n in result.items() if name.startswith("kills_")) == 2
    assert result["reads_checked"] > 2 * FEW
    assert result["commits"] >= FEW + 1


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
    trial = crash.Trial(tmp_path, 0, here, 3)
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
