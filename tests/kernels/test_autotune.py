"""The choice by time: the rule by hand, the runs that count, the cache, and the calls that follow the choice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from blendserve.kernels import autotune, switches
from blendserve.kernels.autotune import Times, choose, load, measure, save
from blendserve.kernels.dispatch import Backend, KernelOp
from tests.support.files import own_cache
from tests.support.kernel_switches import forget, threads

RULE: list[tuple[str, Times]] = [  # the first, and what was measured
    ("tiles", {"tiles": [1.04], "plain": [1.0]}),
    ("plain", {"tiles": [1.06], "plain": [1.0]}),
    ("tiles", {"tiles": [1.0, 2.0], "plain": [0.9, 3.0]}),
    ("vectors", {"tiles": [9.0], "vectors": [0.9], "plain": [1.0]}),
    ("vectors", {"tiles": [1.0, 5.0], "vectors": [2.0, 2.0], "plain": [2.1, 2.1]}),
    ("vectors", {"vectors": [5.0]}),
]


def test_the_rule_by_hand() -> None:
    assert [choose(times) for _, times in RULE] == [first for first, _ in RULE]


@pytest.mark.parametrize(
    ("tiles", "plain", "found"),
    [
        ([9.0, 3.0, 1.0], [2.0], {"tiles": [1.0], "plain": [2.0]}),  # the least time counts
        ([None, None, 1.0], [None] * 9 + [2.0], {"tiles": [1.0], "plain": [2.0]}),  # none of a busy machine
        ([1.0], [None], None),
    ],
)
def test_runs_that_count(tiles: Any, plain: Any, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: Any = {name: chain(x, repeat(x[-1])) for name, x in (("tiles", tiles), ("plain", plain))}
    monkeypatch.setattr(autotune, "timed", lambda run, sample: [x for x in [next(run)] if x is not None])
    assert measure(runs, [[()]], budget_s=0.3) == found


def test_a_run_counts_unless_threads_waited_for_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = iter([1.0, 1.0, 1.0, 9.0])
    for thread, report in enumerate(("9 1500000000 3", "9 500000000 3", "")):  # the last one has ended
        (tmp_path / str(thread)).mkdir()
        (tmp_path / str(thread) / "schedstat").write_text(report)
    monkeypatch.setattr(autotune, "TASKS", tmp_path)
    assert autotune.run_queue_wait_seconds() == 2.0
    monkeypatch.setattr(autotune, "run_queue_wait_seconds", lambda: next(waits))
    assert [len(autotune.timed(lambda: None, [(), ()])) for _ in "ab"] == [1, 0]


# The cache

FOUND = {"tiles": [1.0, 2.0], "plain": [3.0, 4.5]}
NAMES = list(FOUND)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "blendserve" / "kernels"


@pytest.mark.usefixtures("cache")
def test_kept_times_hold_for_the_same_machine_and_all_backends() -> None:
    assert load("few", NAMES) is None
    save("few", FOUND)
    save("many", {"plain": [9.0]})
    save("uneven", {"tiles": [1.0], "plain": [1.0, 2.0]})
    assert list((load("few", NAMES[::-1]) or {}).items()) == list(FOUND.items())[::-1]
    assert load("few", [*NAMES, "vectors"]) is load("uneven", NAMES) is None
    with threads(torch.get_num_threads() + 1):
        assert load("few", NAMES) is None


DAMAGED = b"", b"{", b"\xff\xfe\x00", b"[" * 10**5, b"[]", b'{"few": 1}', b'{"few": [1]}'
NO_TIMES = b'{"few": {"tiles": [1.0, null], "plain": [1.0, 2.0]}}', b'{"few": {"tiles": [], "plain": []}}'


def test_a_damaged_cache_is_empty(cache: Path) -> None:
    cache.mkdir(parents=True)
    for content in DAMAGED + NO_TIMES:
        autotune.cache_file().write_bytes(content)
        assert load("few", NAMES) is None
        save("few", FOUND)
        assert load("few", NAMES) == FOUND


# Calls


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Mock]:
    """Autotuning is on; the value that it returns is what is measured next."""
    own_cache(tmp_path, monkeypatch)
    monkeypatch.setenv(switches.AUTOTUNE, "1")
    monkeypatch.delenv(switches.NATIVE, raising=False)
    monkeypatch.setattr(autotune, "measure", found := Mock(return_value=None))
    for rows in ("narrow", "wide"):
        monkeypatch.setitem(autotune.SAMPLES, rows, lambda draw: [[(draw(8),)]])
    forget()
    yield found
    monkeypatch.undo()
    forget()


def toy() -> KernelOp[..., str]:
    """Calls of 1 number are narrow, of 4 not measured, of more wide."""

    def plain(x: Tensor) -> str:
        return "plain torch"

    def supports(x: Tensor) -> bool:
        return x.stride(0) == 1

    return KernelOp(
        plain,
        Backend("tiles", lambda x: "tiles", supports, lambda x: "no tiles"),
        Backend("vectors", lambda x: "vectors", supports),
        rows=lambda x: "" if len(x) == 4 else "wide" if len(x) > 4 else "narrow",
    )


def test_calls_go_to_the_fastest_of_their_kind(measured: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = toy()
    measured.return_value = {"vectors": [0.5], "plain torch": [0.25]}
    assert operation(torch.zeros(8)) == "plain torch"
    measured.return_value = {"vectors": [1.0], "plain torch": [2.0]}
    assert operation(torch.zeros(9)) == "plain torch", "a kind is measured once"
    assert operation(torch.zeros(1)) == "vectors"
    assert operation(torch.zeros(2)[::2]) == "plain torch", "which the fastest does not support"
    assert operation(torch.zeros(4)) == "vectors", "where nothing is measured, the table's order"
    assert [list(call.args[0]) for call in measured.call_args_list] == [["vectors", "plain torch"]] * 2
    rows = [(row.backend, row.milliseconds, row.note == "serves") for row in autotune.results()[:3]]
    assert rows == [("tiles", (), False), ("vectors", (500.0,), False), ("plain torch", (250.0,), True)]
    assert toy()(torch.zeros(8)) == "plain torch"
    assert measured.call_count == 2, "the next process reads what the first has measured"
    monkeypatch.setenv(switches.AUTOTUNE, "0")
    switches.is_autotune_on.cache_clear()
    assert toy()(torch.zeros(8)) == "vectors", "switched off, the table's order"


def test_a_busy_or_slow_machine_is_measured_once(measured: Mock) -> None:
    operation = toy()
    assert [operation(torch.zeros(n)) for n in (8, 1)] == ["vectors"] * 2
    assert measured.call_count == 1
    assert {row.note for row in autotune.results()} == {"no tiles", "serves", autotune.NOT_TUNED}
