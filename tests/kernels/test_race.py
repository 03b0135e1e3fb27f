"""Who serves is measured: the rule against its words, times that count, what is kept, and calls that go by it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.kernels import race, race_times
from blendserve.kernels.race import ENOUGH, LEAST, MARGIN, MORE, ROUNDS, Times, measure, settle
from tests.kernels.cpu.test_attend import threads

OURS = ["tiles", "vectors"]
NAMES = [*OURS, "fused", "plain"]


# The rule

seconds = st.sampled_from([0.9, 0.94, 1.0, 1.04, 1.06, 1.1, 2.0])


@st.composite
def tables(draw: st.DrawFn) -> Times:
    n = draw(st.integers(1, 3))
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True).map(sorted_by_table))
    return {name: draw(st.lists(seconds, min_size=n, max_size=n)) for name in names}


def sorted_by_table(names: list[str]) -> list[str]:
    return sorted(names, key=NAMES.index)


@given(tables())
def test_nobody_serves_who_is_slower_than_torch_by_more_than_the_margin(times: Times) -> None:
    ours = [name for name in times if name in OURS]
    torchs = [name for name in times if name not in OURS]
    winner, reasons = settle(times, ours)
    assert {winner, *reasons} == set(times)
    assert winner not in reasons
    if torchs and winner in OURS:
        for n, took in enumerate(times[winner]):
            assert took <= MARGIN * min(times[name][n] for name in torchs)
    if winner not in OURS:
        assert sum(times[winner]) == min(sum(times[name]) for name in torchs)
        for (
            name
        ) in ours:  # each is either too slow on some sample, or slower than torch by more than the margin
            bounds = [MARGIN * min(times[t][n] for t in torchs) for n in range(len(times[name]))]
            assert any(map(float.__gt__, times[name], bounds)) or sum(times[name]) > MARGIN * sum(
                times[winner]
            )


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
    ],
)
def test_the_rule_by_hand(times: Times, winner: str) -> None:
    assert settle(times, [name for name in times if name in OURS]).winner == winner


# Times


class Machine:
    """Backends that take the seconds said here, one number a call, the last again and again; None = held up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **takes: Sequence[float | None]) -> None:
        self.takes, self.calls = takes, dict.fromkeys(takes, 0)
        monkeypatch.setattr(race, "_timed", self.timed)

    def timed(self, name: Any) -> list[float]:
        took = self.takes[name][min(self.calls[name], len(self.takes[name]) - 1)]
        self.calls[name] += 1
        return [] if took is None else [took]

    def measure(self) -> Times | None:
        runs: Any = {name: [name] for name in self.takes}
        return measure(runs, [name for name in self.takes if name in OURS])


def test_the_least_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, tiles=[9.0, 3.0, 1.0, 2.0], plain=[2.0])
    assert machine.measure() == {"tiles": [1.0], "plain": [2.0]}
    assert machine.calls == dict.fromkeys(machine.takes, ENOUGH)


def test_ours_has_more_tries_where_torch_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, tiles=[2.0] * (MORE - 2) + [1.0], plain=[1.0])
    assert machine.measure() == {"tiles": [1.0], "plain": [1.0]}
    assert machine.calls["tiles"] < MORE
    slow = Machine(monkeypatch, tiles=[2.0], plain=[1.0])
    assert slow.measure() == {"tiles": [2.0], "plain": [1.0]}
    assert slow.calls == {"tiles": MORE, "plain": MORE}


def test_who_has_lost_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, tiles=[1.0], plain=[50.0])
    assert machine.measure() == {"tiles": [1.0], "plain": [50.0]}
    assert machine.calls == {"tiles": ENOUGH, "plain": LEAST}


def test_times_of_a_busy_machine_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, tiles=[None, None, 1.0, None, 1.0, None, 1.0], plain=[None] * 9 + [2.0])
    assert machine.measure() == {"tiles": [1.0], "plain": [2.0]}
    busy = Machine(monkeypatch, tiles=[1.0], plain=[None])
    assert busy.measure() is None
    assert busy.calls["plain"] <= ROUNDS


def test_a_race_ends_when_patience_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "PATIENCE", -1.0)
    machine = Machine(monkeypatch, tiles=[1.0], plain=[2.0])
    assert machine.measure() is None
    assert machine.calls == {"tiles": 1, "plain": 1}


def test_waiting_for_a_core_is_what_linux_says_of_every_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(race, "TASKS", tmp_path)
    for task, said in (("7", "55 2000000000 3"), ("8", "55 500000000 3"), ("9", "")):
        (tmp_path / task).mkdir()
        (tmp_path / task / "schedstat").write_text(said)
    (tmp_path / "10").mkdir()
    assert race.waited() == pytest.approx(2.5)
    assert len(race._timed(lambda: None)) == 1

    def held_up() -> None:
        (tmp_path / "7" / "schedstat").write_text("55 9000000000 3")

    assert race._timed(held_up) == []
    monkeypatch.setattr(race, "TASKS", tmp_path / "nowhere")
    assert race.waited() == 0.0


# What is kept


FOUND = {"tiles": [1.0, 2.0], "plain": [3.0, 4.5]}


def test_what_was_kept_is_found_again_by_the_same_machine_alone(cache: Path) -> None:
    names = list(FOUND)
    assert race_times.recall("attend", "few", names) is None
    assert race_times.keep("attend", "few", FOUND) == FOUND
    race_times.keep("attend", "many", {"plain": [9.0]})
    assert race_times.recall("attend", "few", names[::-1]) == FOUND
    assert list(race_times.recall("attend", "few", names[::-1]) or {}) == names[::-1]
    assert race_times.recall("attend", "few", [*names, "vectors"]) is None
    race_times.keep("attend", "uneven", {"tiles": [1.0], "plain": [1.0, 2.0]})
    assert race_times.recall("attend", "uneven", names) is None
    assert race_times.recall("linear", "few", names) is None
    with threads(torch.get_num_threads() + 1):
        assert race_times.recall("attend", "few", names) is None


def test_of_two_processes_the_first_one_s_times_hold(cache: Path) -> None:
    race_times.keep("attend", "few", FOUND)
    assert race_times.keep("attend", "few", {"tiles": [7.0, 7.0], "plain": [1.0, 1.0]}) == FOUND


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["attend", "few", "tiles", "plain", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(said=json_values)
def test_a_file_that_says_something_else_is_none(
    tmp_path_factory: pytest.TempPathFactory, said: object
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        file = race_times._file()
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(said))
        assert race_times.recall("attend", "few", list(FOUND)) is None
        assert race_times.keep("attend", "few", FOUND) == FOUND
        assert race_times.recall("attend", "few", list(FOUND)) == FOUND


@pytest.mark.parametrize("bytes_", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_damaged_file_is_none(cache: Path, bytes_: bytes) -> None:
    cache.mkdir(parents=True)
    race_times._file().write_bytes(bytes_)
    assert race_times.recall("attend", "few", list(FOUND)) is None
    race_times.keep("attend", "few", FOUND)
    assert race_times.recall("attend", "few", list(FOUND)) == FOUND


def test_where_nothing_can_be_written_nothing_is_kept(cache: Path) -> None:
    cache.parent.parent.joinpath("blendserve").write_text("a file where the folder should be")
    assert race_times.keep("attend", "few", FOUND) == FOUND
    assert race_times.recall("attend", "few", list(FOUND)) is None
