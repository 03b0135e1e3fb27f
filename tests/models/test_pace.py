"""How many threads a pass of few rows uses, on a simulated machine; no bit depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from blendserve.kernels import team
from blendserve.models import adapter as adapter_module
from blendserve.models import forward, pace
from blendserve.models.kv_cache import KVCache
from blendserve.models.pace import PAUSE, ROWS, WINDOW, Pacer
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
    """Layers of 12 ms of computing, shared evenly; a core that others use costs every loop `stall_ms`."""

    def __init__(self, in_use: int = 0, stall_ms: float = 40.0) -> None:
        self.now = self.computed = 0.0
        self.in_use, self.stall_ms = in_use, stall_ms
        self.used: list[int] = []  # threads of each layer
        self.pacer = Pacer(lambda: ALL, lambda: self.now, lambda: self.computed)

    def layer(self) -> int:
        threads = team.size()
        self.used.append(threads)
        work = 12e-3 / threads
        self.computed += work
        self.now += work + (1e-3 * self.stall_ms if threads > ALL - self.in_use else 0.0)
        return len(self.used)

    def run(self, layers: int = LAYERS) -> list[int]:
        """The threads of a pass's layers."""
        before, found = len(self.used), self.pacer.pass_of(1)
        assert found
        assert [found.layer(self.layer) for _ in range(layers)] == [*range(before + 1, before + layers + 1)]
        return self.used[before:]


@pytest.mark.parametrize(("in_use", "found"), [(0, ALL), (1, ALL // 2), (2, ALL // 2), (3, 1)])
def test_a_pass_finds_how_many_cores_are_free(in_use: int, found: int) -> None:
    machine = Machine(in_use)
    used = machine.run()
    assert used[:WINDOW] == [ALL] * WINDOW
    assert machine.pacer.threads == found
    assert set(used[-WINDOW:]) == {found}
    if not in_use:
        assert {n for _ in range(100) for n in machine.run()} == {ALL}


def test_more_threads_are_tried_after_a_pause_and_used_again_when_cores_are_free() -> None:
    machine = Machine(in_use=2)
    machine.run()
    began, tried = machine.now, 0
    while machine.now < began + 10 * PAUSE:
        tried += sum(n == ALL for n in machine.run())
    assert machine.pacer.threads == ALL // 2
    assert 5 <= tried <= 10  # a lost trial is one layer here, as that is slower than a whole window
    machine.in_use, free_since = 0, machine.now
    while machine.pacer.threads < ALL:
        machine.run()
    assert machine.now - free_since <= PAUSE + 2 * LAYERS * 6e-3


def test_waiting_that_fewer_threads_do_not_cure_is_tried_once_a_pause() -> None:
    machine = Machine(in_use=ALL, stall_ms=20)  # a slow disk
    while machine.now < 10 * PAUSE:
        machine.run()
    assert machine.pacer.threads == ALL
    assert sum(n < ALL for n in machine.used) <= 10 * WINDOW


@pytest.mark.parametrize(("left", "threads"), [(1, ALL - 1), (3, 1), (9, 1)])
def test_cores_left_to_decoding_are_not_used_and_change_no_decision(left: int, threads: int) -> None:
    machine = Machine(in_use=1)
    team.leave(left)
    try:
        assert machine.run() == LAYERS * [threads]
        assert machine.pacer.threads == ALL
    finally:
        team.leave(0)
    assert machine.run(1) == [ALL]


def test_many_rows_one_core_and_other_devices_have_no_choice() -> None:
    assert Pacer(lambda: ALL).pass_of(ROWS + 1) is None
    assert pace.pass_of(1, torch.device("meta")) is None
    cores = count(ALL, -3)  # fewer than were found
    fewer = Pacer(lambda: next(cores))
    assert fewer.pass_of(1) is None
    assert fewer.threads == 1


def test_logits_have_the_same_bits_for_any_number_of_threads_changed_at_any_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter, seen, size = bundled_reader("bfloat16").adapter, set[int](), team.size
    torch.set_num_threads(ALL)  # loading a reader limits them
    monkeypatch.setattr(team, "size", lambda: seen.add(size()) or size())  # type: ignore[func-returns-value]

    def logits(*threads: int) -> list[Tensor]:
        turns, cache = iter(threads * 10 * LAYERS), KVCache(adapter, 64)

        def layer(run: Callable[[], Tensor | None]) -> Tensor | None:
            with team.at_most(next(turns)):
                return run()

        monkeypatch.setattr(forward, "pass_of", lambda rows, device: SimpleNamespace(layer=layer))
        monkeypatch.setattr(adapter_module, "as_found", lambda rows, device: team.at_most(next(turns)))
        tokens = {0: [7 * n % 1000 for n in range(40)], 40: [1], 41: [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}
        return [forward.append(adapter, cache, at, ids) for at, ids in tokens.items()]

    expected = logits(ALL)
    for threads in ((1,), (2,), (3, 1, ALL)):
        assert all(map(torch.equal, logits(*threads), expected))
    assert seen in (set(), {1, 2, 3, ALL})  # where kernels serve, they ran with each of them
