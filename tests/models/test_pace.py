"""Who runs with how many threads, on a clock of its own; and that no bit depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch
from torch import Tensor

from blendserve.kernels import team
from blendserve.models import forward, pace
from blendserve.models.kv_cache import KVCache
from blendserve.models.pace import PAUSE, ROWS, WINDOW, Pacer
from tests.support.models import tiny_adapter
from tests.support.tokenizers import bundled_reader

ALL = 4
LAYERS = 30


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(ALL)
    yield
    torch.set_num_threads(before)


class Machine:
    """Layers that take 12 ms of computing, shared evenly; a core that is taken costs every loop `stall` ms."""

    def __init__(self, taken: int = 0, stall: float = 40.0) -> None:
        self.now = self.computed = 0.0
        self.taken, self.stall = taken, stall
        self.used: list[int] = []  # threads of each layer
        self.pacer = Pacer(lambda: ALL, lambda: self.now, lambda: self.computed)

    def layer(self) -> int:
        threads = team.size()
        self.used.append(threads)
        work = 12e-3 / threads
        self.computed += work
        self.now += work + (1e-3 * self.stall if threads > ALL - self.taken else 0.0)
        return len(self.used)

    def run(self, layers: int = LAYERS, rows: int = 1) -> list[int]:
        """The threads of a pass's layers."""
        before = len(self.used)
        found = self.pacer.pass_of(rows)
        assert found
        assert [found.layer(self.layer) for _ in range(layers)] == list(
            range(before + 1, before + layers + 1)
        )
        return self.used[before:]


@pytest.mark.parametrize(("left", "threads"), [(1, ALL - 1), (3, 1), (9, 1)])
def test_cores_that_are_left_to_others_are_not_used_and_teach_nothing(left: int, threads: int) -> None:
    machine = Machine(taken=1)
    team.leave(left)
    try:
        assert machine.run() == LAYERS * [threads]
        assert machine.pacer.threads == ALL
    finally:
        team.leave(0)
    assert machine.run(1) == [ALL]


def test_alone_nothing_is_tried() -> None:
    machine = Machine()
    assert {n for _ in range(100) for n in machine.run()} == {ALL}


@pytest.mark.parametrize(("taken", "found"), [(1, ALL // 2), (2, ALL // 2), (3, 1)])
def test_where_cores_are_taken_a_pass_finds_how_many_are_free(taken: int, found: int) -> None:
    machine = Machine(taken)
    used = machine.run()
    assert used[:WINDOW] == [ALL] * WINDOW
    assert machine.pacer.threads == found
    assert set(used[-WINDOW:]) == {found}


def test_what_is_found_holds_for_the_next_pass_and_is_tried_again_after_a_pause() -> None:
    machine = Machine(taken=2)
    machine.run()
    began, tried = machine.now, 0
    while machine.now < began + 10 * PAUSE:
        tried += sum(n == ALL for n in machine.run())
    assert machine.pacer.threads == ALL // 2
    assert 5 <= tried <= 10  # a lost trial is one layer here, as that took longer than a whole window


def test_when_the_others_have_gone_all_threads_are_back_within_a_pause_and_two_windows() -> None:
    machine = Machine(taken=2)
    machine.run()
    machine.taken, gone = 0, machine.now
    while machine.pacer.threads < ALL:
        machine.run()
    assert machine.now - gone <= PAUSE + 2 * LAYERS * 6e-3


def test_waiting_that_fewer_threads_do_not_cure_is_tried_no_more_often_than_every_pause() -> None:
    machine = Machine(taken=ALL, stall=20)  # a slow disk, say
    while machine.now < 10 * PAUSE:
        machine.run()
    assert machine.pacer.threads == ALL
    assert sum(n < ALL for n in machine.used) <= 10 * WINDOW


def test_a_lucky_trial_of_more_is_seen_through_at_once() -> None:
    machine = Machine(taken=2)
    machine.run()
    machine.pacer.threads = ALL
    machine.pacer.not_before = -1.0
    used = machine.run()
    assert used.count(ALL) == WINDOW


def test_a_pass_in_between_does_not_mix_its_times_with_those_of_the_pass_around_it() -> None:
    machine = Machine()
    outer = machine.pacer.pass_of(ROWS)
    assert outer
    for _ in range(WINDOW - 1):
        outer.layer(machine.layer)
    machine.taken = 2
    machine.run()  # goes down
    assert machine.pacer.threads == ALL // 2
    machine.pacer.not_before, before = -1.0, len(machine.used)
    for _ in range(WINDOW + 1):
        outer.layer(machine.layer)
    assert machine.used[before:] == [ALL // 2] * WINDOW + [ALL]  # a whole window of its own first


def test_many_rows_one_core_and_other_devices_have_nothing_to_choose() -> None:
    assert Pacer(lambda: ALL).pass_of(ROWS + 1) is None
    assert Pacer(lambda: 1).pass_of(1) is None
    assert pace.pass_of(1, torch.device("meta")) is None


def test_fewer_threads_are_asked_for_than_were_found() -> None:
    cores = count(ALL, -3)
    pacer = Pacer(lambda: next(cores))
    assert pacer.pass_of(1) is None
    assert pacer.threads == 1


def test_an_error_in_a_layer_leaves_the_threads_as_they_were() -> None:
    found = Pacer(lambda: ALL).pass_of(1)
    assert found
    found._with = found._pacer.threads = 1
    with pytest.raises(ZeroDivisionError):
        found.layer(lambda: 1 // 0)
    assert team.size() == ALL


class _Fixed:
    """A pace that says how many threads, layer by layer."""

    def __init__(self, threads: Iterator[int]) -> None:
        self._threads = threads

    def layer(self, run: Callable[[], Tensor | None]) -> Tensor | None:
        with team.at_most(next(self._threads)):
            return run()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_have_the_same_bits_for_any_number_of_threads_changed_at_any_layer(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = bundled_reader(dtype).adapter
    seen: set[int] = set()
    size = team.size

    def noted() -> int:
        seen.add(size())
        return size()

    monkeypatch.setattr(team, "size", noted)

    def logits(*threads: int) -> list[Tensor]:
        turns = iter(threads * 10 * LAYERS)
        monkeypatch.setattr(forward, "pass_of", lambda rows, device: _Fixed(turns))
        monkeypatch.setattr(
            "blendserve.models.adapter.as_found", lambda rows, device: team.at_most(next(turns))
        )
        cache = KVCache(adapter, 64)
        tokens = [[7 * n % 1000 for n in range(40)], [1], [2], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]
        starts = [0, 40, 41, 42]
        return [forward.append(adapter, cache, at, t) for at, t in zip(starts, tokens, strict=True)]

    wanted = logits(ALL)
    for threads in ((1,), (2,), (1, ALL, 2), (3, 1)):
        assert all(map(torch.equal, logits(*threads), wanted))
    if seen:  # where kernels serve, they ran with each of them
        assert seen == {1, 2, 3, ALL}


def test_the_loop_over_layers_asks_for_its_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, asked = tiny_adapter("llama"), []

    def pass_of(rows: int, device: torch.device) -> None:
        asked.append(rows)

    monkeypatch.setattr(forward, "pass_of", pass_of)
    forward.append(adapter, KVCache(adapter, 8), 0, [1, 2, 3])
    assert asked == [3]
