"""The choice by time: the rule against its words, times that count, what is kept, and calls that go by it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.kernels import ops, race, race_times, samples, team, verify
from blendserve.kernels.operation import BUSY, Backend, Operation, Racing
from blendserve.kernels.race import ENOUGH, LEAST, MORE, ROUNDS, Times, measure, settle
from blendserve.kernels.rows import plan_rows
from blendserve.kernels.types import AttentionSpec
from tests.support.files import own_cache
from tests.support.kernels import NAN, TABLE, Draw, Options, threads

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


class Machine:
    """Backends that need the seconds said here, one number a call, the last again and again; None = held up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **needs: Sequence[float | None]) -> None:
        self.needs, self.calls = needs, dict.fromkeys(needs, 0)
        monkeypatch.setattr(race, "timed", self.timed)

    def timed(self, name: Any) -> list[float]:
        time = self.needs[name][min(self.calls[name], len(self.needs[name]) - 1)]
        self.calls[name] += 1
        return [] if time is None else [time]

    def measure(self) -> Times | None:
        runs: Any = {name: [name] for name in self.needs}
        return measure(runs, [name for name in self.needs if name in OURS])


@pytest.mark.parametrize(
    ("needs", "found", "calls"),
    [
        # the least time counts
        ({"tiles": [9.0, 3.0, 1.0, 2.0], "plain": [2.0]}, (1.0, 2.0), (ENOUGH, ENOUGH)),
        # ours has more tries where torch leads
        ({"tiles": [2.0] * (MORE - 2) + [1.0], "plain": [1.0]}, (1.0, 1.0), (MORE - 1, MORE - 1)),
        ({"tiles": [2.0], "plain": [1.0]}, (2.0, 1.0), (MORE, MORE)),
        # what has lost is not tried again
        ({"tiles": [1.0], "plain": [50.0]}, (1.0, 50.0), (ENOUGH, LEAST)),
        # times of a busy machine do not count
        ({"tiles": [None, None, 1.0, None, 1.0, None, 1.0], "plain": [None] * 9 + [2.0]}, (1.0, 2.0), None),
        ({"tiles": [1.0], "plain": [None]}, None, None),
    ],
)
def test_times_that_count(needs: Any, found: Any, calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, **needs)
    assert machine.measure() == (found and {"tiles": [found[0]], "plain": [found[1]]})
    assert max(machine.calls.values()) <= ROUNDS
    assert calls is None or tuple(machine.calls.values()) == calls


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
    assert len(race.timed(lambda: None)) == 1
    assert race.timed(lambda: (tmp_path / "7" / "schedstat").write_text("55 9000000000 3")) == []
    monkeypatch.setattr(race, "TASKS", tmp_path / "nowhere")
    assert race.waited() == 0.0


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


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["attend", "few", "tiles", "plain", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    said=json_values.map(lambda x: json.dumps(x).encode())
    | st.sampled_from([b"", b"{", b"\xff\xfe\x00", b"[" * 10**5])
)
def test_a_file_that_says_something_else_is_none(
    tmp_path_factory: pytest.TempPathFactory, said: bytes
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        file = race_times.file_of_machine()
        file.parent.mkdir(parents=True)
        file.write_bytes(said)
        assert race_times.recall("attend", "few", list(FOUND)) is None
        assert race_times.keep("attend", "few", FOUND) == FOUND
        assert race_times.recall("attend", "few", list(FOUND)) == FOUND


def test_where_nothing_can_be_written_nothing_is_kept(cache: Path) -> None:
    cache.parent.parent.joinpath("blendserve").write_text("a file where the folder should be")
    assert race_times.keep("attend", "few", FOUND) == FOUND
    assert race_times.recall("attend", "few", list(FOUND)) is None


# Calls that go by it


class Raced:
    """Races are on, and their outcome is said here: the last table, as often as it is asked for."""

    def __init__(self) -> None:
        self.said: list[Times] = []
        self.asked: list[list[str]] = []
        self.threads: list[int] = []

    def measure(self, runs: Any, ours: Any) -> Times | None:
        self.asked.append(list(runs))
        self.threads.append(team.size())
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


def test_an_odd_call_does_not_settle_for_others(raced: Raced) -> None:
    operation = toy()
    raced.said.append({"vectors": [1.0], "plain": [2.0]})
    assert operation(torch.zeros(20)[::2]) == "plain"
    assert operation(torch.zeros(8)) == "vectors"


def test_a_race_has_all_threads_however_few_the_pass_has_that_asks(raced: Raced) -> None:
    with threads(3), team.at_most(1):
        toy()(torch.zeros(1))
        assert team.size() == 1
    assert raced.threads == [3]


def test_what_a_kept_time_beats_is_proven_only_when_it_is_to_serve(raced: Raced) -> None:
    """Where ours won; where another did, that one is proven in every process."""
    proven: list[str] = []

    def prove(x: torch.Tensor) -> str:
        proven.append("torch's")
        return ""

    other = Backend("torch's", lambda x: "torch's", trouble=prove)
    raced.said.append({"vectors": [1.0], "torch's": [2.0], "plain": [3.0]})
    again = toy(other)
    for operation in (toy(other), again):
        assert operation(torch.zeros(8)) == "vectors"
        assert len(proven) == 1
    assert again(torch.zeros(12)[::2]) == "torch's"
    assert len(proven) == 2
    raced.said.append({"vectors": [3.0], "torch's": [1.0], "plain": [3.0]})
    assert [toy(other)(torch.zeros(3)) for _ in range(2)] == ["torch's"] * 2
    assert len(proven) == 4


def test_a_busy_machine_settles_nothing_and_is_asked_a_few_times_only(raced: Raced) -> None:
    for n in range(6):
        operation = toy(class_of=lambda x, n=n: f"class {n}")
        assert operation(torch.zeros(8)) == "vectors"
        assert operation.measured()[2].note == BUSY
    assert len(raced.asked) == 4
    assert race_times.recall("toy", "class 0", ["vectors", "plain"]) is None


# The samples of the operations

CALLS: list[tuple[str, Options]] = [
    *(("attend", {"at": at}) for at in ([9], list(range(40)), [5, 6, 7, 8])),
    ("attend", {"at": [3, 9, 200], "window": 50}),
    ("attend_with_scores", {"at": [8, 9], "absent": 0.2}),
    *(("linear", {"rows": rows, "outs": 32, "depth": 64}) for rows in (1, 8, 9, 90)),
    ("linear", {"rows": 50, "outs": 6000, "depth": 3000}),
    ("correct", {"lengths": [20, 9], "n": 9}),
]


@pytest.mark.parametrize(("name", "options"), CALLS)
@torch.inference_mode()
def test_samples_are_of_the_class_that_they_stand_for(name: str, options: Options) -> None:
    call = TABLE[name].make(Draw(torch.bfloat16, "cpu", 0, NAN), **options)
    racing = ops.OPERATIONS[name].racing
    assert racing is not None
    before = torch.random.get_rng_state()
    shapes: Any = racing.class_of(*call)
    found: list[Any] = [racing.class_of(*sample) for works in racing.samples(*call) for sample in works]
    if name == "linear":  # a large layer is tried by a part of its outputs
        assert {(x.depth, x.is_few) for x in found} == {(shapes.depth, shapes.is_few)}
    else:
        assert set(found) == {shapes}
    assert torch.equal(before, torch.random.get_rng_state())


def test_on_a_gpu_and_in_fp32_linear_layers_nothing_is_raced() -> None:
    q = torch.zeros(2, 3, 64, device="meta")
    parts = q, q, q, AttentionSpec(1.0), plan_rows(torch.arange(3), 1)
    with torch.inference_mode():
        assert samples.attention_class(*parts) is None
        assert samples.linear_class(q[0].bfloat16(), q[0].bfloat16(), None) is None
        assert samples.linear_class(torch.zeros(3, 64), torch.zeros(3, 64), None) is None
