"""Who serves is measured: the rule against its words, times that count, what is kept, and calls that go by it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.kernels import ops, race, race_times, reference, samples, verify
from blendserve.kernels.operation import Backend, Operation, Racing, Row
from blendserve.kernels.race import ENOUGH, LEAST, MARGIN, MORE, ROUNDS, Times, measure, settle
from blendserve.kernels.rows import plan_rows
from blendserve.kernels.types import AttentionSpec
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
    assert race._waiting() == pytest.approx(2.5)
    assert len(race._timed(lambda: None)) == 1

    def held_up() -> None:
        (tmp_path / "7" / "schedstat").write_text("55 9000000000 3")

    assert race._timed(held_up) == []
    monkeypatch.setattr(race, "TASKS", tmp_path / "nowhere")
    assert race._waiting() == 0.0


# What is kept


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "blendserve" / "kernels"


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


# Calls

ASKED: list[list[str]] = []  # who was raced, a list each time


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[list[Times]]:
    """Races are on, and their outcome is said here: the last table, as often as it is asked for."""
    said: list[Times] = []
    monkeypatch.setenv(race.SWITCH, "1")
    monkeypatch.delenv(verify.SWITCH, raising=False)
    monkeypatch.setattr("blendserve.kernels.operation._unsettled", set())

    def measured(runs: Any, ours: Any) -> Times | None:
        for works in runs.values():
            for work in works:
                work()
        ASKED.append(list(runs))
        return said[-1] if said else None

    ASKED.clear()
    monkeypatch.setattr(race, "measure", measured)
    yield said
    for operation in ops.RACED:
        operation.forget()


def toy() -> Operation[..., str]:
    def size(x: torch.Tensor) -> Any:
        return "wide" if len(x) > 4 else None if len(x) == 4 else "narrow"

    def fits(x: torch.Tensor) -> bool:
        return x.stride(0) == 1

    return Operation(
        Backend("tiles", lambda x: "tiles", fits, lambda x: "no tiles", is_ours=True),
        Backend("vectors", lambda x: "vectors", fits, is_ours=True),
        Backend("plain", lambda x: "plain"),
        racing=Racing("toy", size, lambda x: [[(x.contiguous(),)] * 2]),
    )


def test_calls_go_to_the_winner_of_their_class(raced: list[Times]) -> None:
    operation = toy()
    raced.append({"vectors": [1.0], "plain": [0.5]})  # two calls
    assert operation(torch.zeros(8)) == "plain"
    raced.append({"vectors": [1.0], "plain": [2.0]})
    assert operation(torch.zeros(9)) == "plain", "a class is settled once"
    assert operation(torch.zeros(3)) == "vectors"
    assert operation(torch.zeros(6)[::2]) == "plain", "whom the winner does not fit"
    assert operation(torch.zeros(4)) == "vectors", "where nothing is measured, the table's order"
    assert ASKED == [["vectors", "plain"]] * 2
    assert operation.measured()[:3] == [
        Row("toy", "wide", "tiles", (), "no tiles"),
        Row("toy", "wide", "vectors", (500.0,), "slower than torch's own"),
        Row("toy", "wide", "plain", (250.0,), "serves"),
    ]


def test_the_next_process_goes_by_what_the_first_found(raced: list[Times]) -> None:
    raced.append({"vectors": [2.0], "plain": [1.0]})
    assert toy()(torch.zeros(8)) == "plain"
    raced.append({"vectors": [1.0], "plain": [2.0]})
    assert toy()(torch.zeros(8)) == "plain"
    assert len(ASKED) == 1


def test_what_is_known_already_needs_no_samples(raced: list[Times]) -> None:
    raced.append({"vectors": [2.0], "plain": [1.0]})
    toy()(torch.zeros(8))
    operation = toy()
    operation._racing = replace(operation._racing, samples=lambda x: 1 / 0)  # type: ignore[type-var]
    assert operation(torch.zeros(8)) == "plain"


def test_an_odd_call_does_not_settle_for_others(raced: list[Times]) -> None:
    operation = toy()
    raced.append({"vectors": [1.0], "plain": [2.0]})
    assert operation(torch.zeros(20)[::2]) == "plain"
    assert operation(torch.zeros(8)) == "vectors"


def test_a_busy_machine_settles_nothing_and_is_asked_a_few_times_only(raced: list[Times]) -> None:
    for n in range(6):
        operation = toy()
        operation._racing = replace(operation._racing, class_of=lambda x, n=n: f"class {n}")  # type: ignore[type-var]
        assert operation(torch.zeros(8)) == "vectors"
        assert operation.measured()[2].note == "not measured: the machine was busy"
    assert len(ASKED) == 4
    raced.append({"vectors": [2.0], "plain": [1.0]})
    assert race_times.recall("toy", "class 0", ["vectors", "plain"]) is None


def test_switched_off_the_table_s_order_holds(raced: list[Times], monkeypatch: pytest.MonkeyPatch) -> None:
    raced.append({"vectors": [2.0], "plain": [1.0]})
    operation = toy()
    assert operation(torch.zeros(8)) == "plain"
    monkeypatch.setenv(race.SWITCH, "0")
    assert operation(torch.zeros(8)) == "vectors"


def attention(at: torch.Tensor, window: int | None = None) -> Any:
    q, keys = torch.randn(4, len(at), 32), torch.randn(2, int(at[-1]) + 1, 32)
    return q, keys, keys, AttentionSpec(0.2, window), plan_rows(at, 2, window)


CALLS: list[tuple[Operation[..., Any], tuple[Any, ...]]] = [
    *((ops.ATTEND, attention(at)) for at in (torch.tensor([9]), torch.arange(40), torch.arange(5, 9))),
    (ops.ATTEND, attention(torch.tensor([3, 9, 200]), window=50)),
    *(
        (ops.LINEAR, (torch.randn(rows, 64).bfloat16(), torch.randn(32, 64).bfloat16(), None))
        for rows in (1, 8, 9, 90)
    ),
    (ops.LINEAR, (torch.randn(50, 3000).bfloat16(), torch.randn(6000, 3000).bfloat16(), None)),
]


@pytest.mark.parametrize(("operation", "call"), CALLS)
@torch.inference_mode()
def test_samples_are_of_the_class_that_they_stand_for(operation: Operation[..., Any], call: Any) -> None:
    racing = operation._racing
    assert racing is not None
    before = torch.random.get_rng_state()
    shapes = racing.class_of(*call)
    assert shapes is not None
    for works in racing.samples(*call):
        for sample in works:
            found = racing.class_of(*sample)
            if operation is ops.LINEAR:  # a large layer is tried by a part of its outputs
                assert (found.depth, found.is_few) == (shapes.depth, shapes.is_few)  # type: ignore[union-attr]
            else:
                assert found == shapes
    assert torch.equal(before, torch.random.get_rng_state())


@torch.inference_mode()
def test_whoever_wins_the_result_is_the_same_to_rounding(raced: list[Times]) -> None:
    for operation, call in CALLS:
        works = operation._racing.samples(*call)  # type: ignore[union-attr]
        able = [b.name for b in operation.backends if b.serves(*works[0][0])]
        wanted = operation.backends[-1].run(*call)
        for winner in able:
            operation.forget()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(race_times, "recall", lambda *_: None)
                patch.setattr(race_times, "keep", lambda *args: args[2])
                raced.append({name: [1.0 + (name != winner)] * len(works) for name in able})
                assert operation.select_backend(*call).name == winner
                got = operation(*call)
            torch.testing.assert_close(got, wanted, rtol=2**-6, atol=0.02)


def test_torch_s_own_ways_are_always_asked() -> None:
    """Attention by SDPA and plainly, linear layers by torch; in fp32 nobody else does those."""
    names = [backend.name for backend in ops.ATTEND.backends if not backend.is_ours]
    assert names[-2:] == ["torch's SDPA", "plain torch"]
    assert ops.LINEAR.backends[-1].run is reference.linear_reference
    x = torch.randn(3, 64)
    with torch.inference_mode():
        assert samples.linear_class(x, x, None) is None
        assert [b.name for b in ops.LINEAR.backends if b.fits(x, x, None)] == ["torch"]


def test_on_a_gpu_nothing_is_raced() -> None:
    q = torch.zeros(2, 3, 64, device="meta")
    parts = q, q, q, AttentionSpec(1.0), plan_rows(torch.arange(3), 1)
    with torch.inference_mode():
        assert samples.attention_class(*parts) is None
        assert samples.linear_class(q[0].bfloat16(), q[0].bfloat16(), None) is None
