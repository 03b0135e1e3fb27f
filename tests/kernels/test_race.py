"""The choice by time: the rule against its words, times that count, what is kept, and calls that go by it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve.kernels import ops, race, race_times, verify
from blendserve.kernels.operation import Backend, Operation, Racing
from blendserve.kernels.race import Times, measure, settle
from tests.support.files import own_cache
from tests.support.kernels import threads


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "blendserve" / "kernels"


OURS = ["tiles", "vectors"]


# The rule


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ({"tiles": [1.04], "plain": [1.0]}, "tiles"),
        ({"tiles": [1.06], "plain": [1.0]}, "plain"),
        ({"tiles": [0.1, 1.06], "plain": [1.0, 1.0]}, "plain"),
        ({"tiles": [1.0], "vectors": [0.96], "plain": [3.0]}, "tiles"),
        ({"tiles": [1.0], "vectors": [0.9], "plain": [3.0]}, "vectors"),
        ({"tiles": [9.0], "vectors": [0.9], "plain": [1.0]}, "vectors"),
        ({"fused": [1.0, 5.0], "plain": [2.0, 2.0]}, "plain"),
        ({"tiles": [1.0, 2.0], "fused": [1.0, 5.0], "plain": [2.0, 2.0]}, "tiles"),
        ({"tiles": [1.0, 1.2], "vectors": [1.1, 1.0], "fused": [1.05, 3.0], "plain": [1.1, 1.1]}, "vectors"),
        ({"vectors": [5.0]}, "vectors"),
        ({"fused": [2.0], "plain": [1.96]}, "plain"),
    ],
)
def test_the_rule_by_hand(times: Times, winner: str) -> None:
    verdict = settle(times, [name for name in times if name in OURS])
    assert verdict.winner == winner
    assert verdict.reasons.keys() == times.keys() - {winner}


# Times


@pytest.mark.parametrize(
    ("tiles", "plain", "found"),
    [
        ([9.0, 3.0, 1.0], [2.0], {"tiles": [1.0], "plain": [2.0]}),  # the least time counts
        (
            [None, None, 1.0],
            [None] * 9 + [2.0],
            {"tiles": [1.0], "plain": [2.0]},
        ),  # and none of a busy machine
        ([1.0], [None], None),
    ],
)
def test_times_that_count(tiles: Any, plain: Any, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {"tiles": chain(tiles, repeat(tiles[-1])), "plain": chain(plain, repeat(plain[-1]))}
    monkeypatch.setattr(race, "timed", lambda name: [x for x in [next(needs[name])] if x is not None])
    runs: Any = {name: [name] for name in needs}
    assert measure(runs, OURS) == found


# What is kept


FOUND = {"tiles": [1.0, 2.0], "plain": [3.0, 4.5]}


def test_what_was_kept_is_found_again_by_the_same_machine_alone(cache: Path) -> None:
    names = list(FOUND)
    assert race_times.recall("attend", "few", names) is None
    assert race_times.keep("attend", "few", FOUND) == FOUND
    race_times.keep("attend", "many", {"plain": [9.0]})
    assert list((race_times.recall("attend", "few", names[::-1]) or {}).items()) == list(FOUND.items())[::-1]
    assert race_times.recall("attend", "few", [*names, "vectors"]) is None
    race_times.keep("attend", "uneven", {"tiles": [1.0], "plain": [1.0, 2.0]})
    assert race_times.recall("attend", "uneven", names) is None
    assert race_times.recall("linear", "few", names) is None
    with threads(torch.get_num_threads() + 1):
        assert race_times.recall("attend", "few", names) is None
    later = {"tiles": [7.0, 7.0], "plain": [1.0, 1.0]}  # of two processes the first one's times hold
    assert race_times.keep("attend", "few", later) == FOUND


DAMAGED = (b"", b"{", b"\xff\xfe\x00", b"[" * 10**5, b"[]", b'{"attend": 1}', b'{"attend": {"few": [1]}}')
NO_TIMES = (b'{"attend": {"few": {"tiles": [1.0, null], "plain": [1.0, 2.0]}}}', None)


@pytest.mark.parametrize("said", DAMAGED + NO_TIMES)
def test_a_file_that_says_something_else_is_none(said: bytes | None, cache: Path) -> None:
    file = race_times.file_of_machine()
    if said is None:
        cache.parent.write_text("a file where the folder should be")
    else:
        file.parent.mkdir(parents=True)
        file.write_bytes(said)
    assert race_times.recall("attend", "few", list(FOUND)) is None
    assert race_times.keep("attend", "few", FOUND) == FOUND
    assert race_times.recall("attend", "few", list(FOUND)) == (FOUND if said is not None else None)


# Calls that go by it


class Raced:
    """Races are on, and their outcome is said here: the last table, as often as it is asked for."""

    def __init__(self) -> None:
        self.said: list[Times] = []
        self.asked: list[list[str]] = []

    def measure(self, runs: Any, ours: Any) -> Times | None:
        self.asked.append(list(runs))
        for works in runs.values():
            for work in works:
                work()
        return self.said[-1] if self.said else None


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Raced]:
    own_cache(tmp_path, monkeypatch)
    monkeypatch.setenv(race.SWITCH, "1")
    monkeypatch.delenv(verify.SWITCH, raising=False)
    found = Raced()
    monkeypatch.setattr(race, "measure", found.measure)
    yield found
    for operation in (*ops.RACED, toy()):
        operation.forget()


def size(x: torch.Tensor) -> Any:
    return "wide" if len(x) > 4 else None if len(x) == 4 else f"narrow {len(x)}"


def toy(*more: Backend[..., str], class_of: Any = size, samples: Any = None) -> Operation[..., str]:
    def fits(x: torch.Tensor) -> bool:
        return x.stride(0) == 1

    return Operation(
        Backend("tiles", lambda x: "tiles", fits, lambda x: "no tiles", is_ours=True),
        Backend("vectors", lambda x: "vectors", fits, is_ours=True),
        *more,
        Backend("plain", lambda x: "plain"),
        racing=Racing("toy", class_of, samples or (lambda x: [[(x.contiguous(),)] * 2])),
    )


def test_calls_go_to_the_winner_of_their_class(raced: Raced, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = toy()
    raced.said.append({"vectors": [1.0], "plain": [0.5]})  # two calls
    assert operation(torch.zeros(8)) == "plain"
    raced.said.append({"vectors": [1.0], "plain": [2.0]})
    assert operation(torch.zeros(9)) == "plain", "a class is settled once"
    assert operation(torch.zeros(3)) == "vectors"
    assert operation(torch.zeros(6)[::2]) == "plain", "what the winner does not fit"
    assert operation(torch.zeros(4)) == "vectors", "where nothing is measured, the table's order"
    assert raced.asked == [["vectors", "plain"]] * 2
    rows = {row.backend: row for row in operation.measured()[:3]}
    assert [rows[n].milliseconds for n in ("tiles", "vectors", "plain")] == [(), (500.0,), (250.0,)]
    assert [name for name, row in rows.items() if row.note == "serves"] == ["plain"]
    known = toy(samples=lambda x: 1 / 0)
    assert known(torch.zeros(8)) == "plain", "the next process goes by what the first found"
    monkeypatch.setenv(race.SWITCH, "0")
    assert operation(torch.zeros(8)) == "vectors", "switched off, the table's order"


def test_a_kept_winner_that_is_not_ours_is_proven_in_every_process(raced: Raced) -> None:
    proven: list[str] = []
    other = Backend("torch's", lambda x: "torch's", trouble=lambda x: proven.append("torch's") or "")  # type: ignore[func-returns-value]
    raced.said.append({"vectors": [3.0], "torch's": [1.0], "plain": [3.0]})
    assert [toy(other)(torch.zeros(3)) for _ in range(2)] == ["torch's"] * 2
    assert len(proven) == 2
