"""The choice by time: the rule by hand, the runs that count, the cache, and the calls that follow the choice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve.kernels import autotune, ops, switches
from blendserve.kernels.autotune import Times, choose, load, measure, save
from blendserve.kernels.dispatch import Backend, KernelOp, Tuning
from tests.support.files import own_cache
from tests.support.kernels import threads

NATIVE = ["tiles", "vectors"]


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
    assert choose(times, [name for name in times if name in NATIVE]) == winner


@pytest.mark.parametrize(
    ("tiles", "plain", "found"),
    [
        ([9.0, 3.0, 1.0], [2.0], {"tiles": [1.0], "plain": [2.0]}),  # the least time counts
        ([None, None, 1.0], [None] * 9 + [2.0], {"tiles": [1.0], "plain": [2.0]}),  # none of a busy machine
        ([1.0], [None], None),
    ],
)
def test_runs_that_count(tiles: Any, plain: Any, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"tiles": chain(tiles, repeat(tiles[-1])), "plain": chain(plain, repeat(plain[-1]))}
    monkeypatch.setattr(
        autotune, "timed", lambda name, sample: [x for x in [next(seconds[name])] if x is not None]
    )
    runs: Any = {name: name for name in seconds}
    assert measure(runs, [[()]]) == found


# The cache


FOUND = {"tiles": [1.0, 2.0], "plain": [3.0, 4.5]}


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "blendserve" / "kernels"


def test_kept_times_hold_for_the_same_machine_and_all_backends(cache: Path) -> None:
    names = list(FOUND)
    assert load("attend", "few", names) is None
    assert save("attend", "few", FOUND) == FOUND
    save("attend", "many", {"plain": [9.0]})
    assert list((load("attend", "few", names[::-1]) or {}).items()) == list(FOUND.items())[::-1]
    assert load("attend", "few", [*names, "vectors"]) is None
    save("attend", "uneven", {"tiles": [1.0], "plain": [1.0, 2.0]})
    assert load("attend", "uneven", names) is None
    assert load("linear", "few", names) is None
    with threads(torch.get_num_threads() + 1):
        assert load("attend", "few", names) is None
    later = {"tiles": [7.0, 7.0], "plain": [1.0, 1.0]}  # of two processes the first one's times hold
    assert save("attend", "few", later) == FOUND


DAMAGED = (b"", b"{", b"\xff\xfe\x00", b"[" * 10**5, b"[]", b'{"attend": 1}', b'{"attend": {"few": [1]}}')
NO_TIMES = (b'{"attend": {"few": {"tiles": [1.0, null], "plain": [1.0, 2.0]}}}', None)


@pytest.mark.parametrize("content", DAMAGED + NO_TIMES)
def test_a_damaged_cache_is_empty(content: bytes | None, cache: Path) -> None:
    file = autotune.cache_file()
    if content is None:
        cache.parent.write_text("a file where the folder should be")
    else:
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
    assert load("attend", "few", list(FOUND)) is None
    assert save("attend", "few", FOUND) == FOUND
    assert load("attend", "few", list(FOUND)) == (FOUND if content is not None else None)


# Calls


class Measured:
    """Autotuning is on; the last entry of `times` is what is measured."""

    def __init__(self) -> None:
        self.times: list[Times | None] = [None]
        self.asked: list[list[str]] = []

    def measure(self, runs: Any, calls: Any) -> Times | None:
        self.asked.append(list(runs))
        for run in runs.values():
            for sample in calls:
                for args in sample:
                    run(*args)
        return self.times[-1]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Measured]:
    own_cache(tmp_path, monkeypatch)
    monkeypatch.setenv(switches.AUTOTUNE, "1")
    monkeypatch.delenv(switches.NATIVE, raising=False)
    found = Measured()
    monkeypatch.setattr(autotune, "measure", found.measure)
    monkeypatch.setattr(autotune, "busy", type(autotune.busy)())
    ops.forget()
    yield found
    monkeypatch.undo()
    ops.forget()


def toy() -> KernelOp[..., str]:
    """Classes are 1 number, 4, which is not tuned, and more."""

    def supports(x: torch.Tensor) -> bool:
        return x.stride(0) == 1

    def shapes(x: torch.Tensor) -> Any:
        return None if len(x) == 4 else "wide" if len(x) > 4 else "narrow"

    return KernelOp(
        Backend("tiles", lambda x: "tiles", supports, lambda x: "no tiles", is_native=True),
        Backend("vectors", lambda x: "vectors", supports, is_native=True),
        Backend("plain", lambda x: "plain"),
        tuning=Tuning("toy", shapes, lambda found: [[(torch.zeros(8 if found == "wide" else 1),)] * 2]),
    )


def test_calls_go_to_the_fastest_of_their_class(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = toy()
    measured.times.append({"vectors": [0.5], "plain": [0.25]})
    assert operation(torch.zeros(8)) == "plain"
    measured.times.append({"vectors": [1.0], "plain": [2.0]})
    assert operation(torch.zeros(9)) == "plain", "a class is measured once"
    assert operation(torch.zeros(1)) == "vectors"
    assert operation(torch.zeros(2)[::2]) == "plain", "which the fastest does not support"
    assert operation(torch.zeros(4)) == "vectors", "where nothing is measured, the table's order"
    assert measured.asked == [["vectors", "plain"]] * 2
    rows = {row.backend: row for row in operation.tuning_results()[:3]}
    assert [rows[n].milliseconds for n in ("tiles", "vectors", "plain")] == [(), (500.0,), (250.0,)]
    assert [name for name, row in rows.items() if row.note == "serves"] == ["plain"]
    assert toy()(torch.zeros(8)) == "plain"
    assert len(measured.asked) == 2, "the next process reads what the first has measured"
    monkeypatch.setenv(switches.AUTOTUNE, "0")
    switches.read_again()
    assert toy()(torch.zeros(8)) == "vectors", "switched off, the table's order"


def test_a_busy_machine_is_asked_once(measured: Measured) -> None:
    operation = toy()
    assert [operation(torch.zeros(n)) for n in (8, 1)] == ["vectors"] * 2
    assert len(measured.asked) == 1
    assert {row.note for row in operation.tuning_results()} == {"no tiles", "serves", autotune.NOT_TUNED}
