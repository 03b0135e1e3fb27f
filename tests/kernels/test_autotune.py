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
from blendserve.kernels.dispatch import Backend, KernelOp
from tests.support.files import own_cache
from tests.support.kernels import threads


@pytest.mark.parametrize(
    ("times", "first"),
    [
        ({"tiles": [1.04], "plain": [1.0]}, "tiles"),
        ({"tiles": [1.06], "plain": [1.0]}, "plain"),
        ({"tiles": [1.0, 2.0], "plain": [0.9, 3.0]}, "tiles"),
        ({"tiles": [9.0], "vectors": [0.9], "plain": [1.0]}, "vectors"),
        ({"tiles": [1.0, 5.0], "vectors": [2.0, 2.0], "plain": [2.1, 2.1]}, "vectors"),
        ({"vectors": [5.0]}, "vectors"),
    ],
)
def test_the_rule_by_hand(times: Times, first: str) -> None:
    assert choose(times) == first


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
    assert measure(runs, [[()]], budget_s=0.3) == found


# The cache


FOUND = {"tiles": [1.0, 2.0], "plain": [3.0, 4.5]}


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "blendserve" / "kernels"


def test_kept_times_hold_for_the_same_machine_and_all_backends(cache: Path) -> None:
    names = list(FOUND)
    assert load("few", names) is None
    save("few", FOUND)
    save("many", {"plain": [9.0]})
    assert list((load("few", names[::-1]) or {}).items()) == list(FOUND.items())[::-1]
    assert load("few", [*names, "vectors"]) is None
    save("uneven", {"tiles": [1.0], "plain": [1.0, 2.0]})
    assert load("uneven", names) is None
    with threads(torch.get_num_threads() + 1):
        assert load("few", names) is None


DAMAGED = (b"", b"{", b"\xff\xfe\x00", b"[" * 10**5, b"[]", b'{"few": 1}', b'{"few": [1]}')
NO_TIMES = (
    b'{"few": {"tiles": [1.0, null], "plain": [1.0, 2.0]}}',
    b'{"few": {"tiles": [], "plain": []}}',
    None,
)


@pytest.mark.parametrize("content", DAMAGED + NO_TIMES)
def test_a_damaged_cache_is_empty(content: bytes | None, cache: Path) -> None:
    file = autotune.cache_file()
    if content is None:
        cache.parent.write_text("a file where the folder should be")
    else:
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
    assert load("few", list(FOUND)) is None
    save("few", FOUND)
    assert load("few", list(FOUND)) == (FOUND if content is not None else None)


# Calls


class Measured:
    """Autotuning is on; `times` is what is measured next."""

    def __init__(self) -> None:
        self.times: Times | None = None
        self.asked: list[list[str]] = []

    def measure(self, runs: Any, calls: Any, budget_s: float) -> Times | None:
        self.asked.append(list(runs))
        return self.times


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Measured]:
    own_cache(tmp_path, monkeypatch)
    monkeypatch.setenv(switches.AUTOTUNE, "1")
    monkeypatch.delenv(switches.NATIVE, raising=False)
    found = Measured()
    monkeypatch.setattr(autotune, "measure", found.measure)
    for rows in ("narrow", "wide"):
        monkeypatch.setitem(autotune.SAMPLES, rows, lambda draw: [[(draw(8),)]])
    ops.forget()
    yield found
    monkeypatch.undo()
    ops.forget()


def toy() -> KernelOp[..., str]:
    """Calls of 1 number are narrow, of 4 not measured, of more wide."""

    def plain(x: torch.Tensor) -> str:
        return "plain torch"

    def supports(x: torch.Tensor) -> bool:
        return x.stride(0) == 1

    return KernelOp(
        plain,
        Backend("tiles", lambda x: "tiles", supports, lambda x: "no tiles"),
        Backend("vectors", lambda x: "vectors", supports),
        rows=lambda x: "" if len(x) == 4 else "wide" if len(x) > 4 else "narrow",
    )


def test_calls_go_to_the_fastest_of_their_kind(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = toy()
    measured.times = {"vectors": [0.5], "plain torch": [0.25]}
    assert operation(torch.zeros(8)) == "plain torch"
    measured.times = {"vectors": [1.0], "plain torch": [2.0]}
    assert operation(torch.zeros(9)) == "plain torch", "a kind is measured once"
    assert operation(torch.zeros(1)) == "vectors"
    assert operation(torch.zeros(2)[::2]) == "plain torch", "which the fastest does not support"
    assert operation(torch.zeros(4)) == "vectors", "where nothing is measured, the table's order"
    assert measured.asked == [["vectors", "plain torch"]] * 2
    rows = {row.backend: row for row in autotune.results()[:3]}
    assert [rows[n].milliseconds for n in ("tiles", "vectors", "plain torch")] == [(), (500.0,), (250.0,)]
    assert [name for name, row in rows.items() if row.note == "serves"] == ["plain torch"]
    assert toy()(torch.zeros(8)) == "plain torch"
    assert len(measured.asked) == 2, "the next process reads what the first has measured"
    monkeypatch.setenv(switches.AUTOTUNE, "0")
    switches.read_again()
    assert toy()(torch.zeros(8)) == "vectors", "switched off, the table's order"


def test_a_busy_or_slow_machine_is_measured_once(measured: Measured) -> None:
    operation = toy()
    assert [operation(torch.zeros(n)) for n in (8, 1)] == ["vectors"] * 2
    assert len(measured.asked) == 1
    assert {row.note for row in autotune.results()} == {"no tiles", "serves", autotune.NOT_TUNED}
