"""An operation and its backends: which of them does a call. ops.py has the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from blendserve.kernels import race, race_times, samples, team, verify

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

BUSY = "not measured: the machine was busy"
TRIES = 4  # races that a busy machine left open, after which this process begins no others

_lock = Lock()  # of all races: two at once would slow each other
_unsettled = set[tuple[str, str]]()


def _always(*_: object, **__: object) -> bool:
    return True


def _no_trouble(*_: object, **__: object) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Backend(Generic[P, R]):
    """One way to compute an operation. All of its functions take what the operation takes."""

    name: str
    run: Callable[P, R]
    fits: Callable[P, bool] = _always  # whether it is made for these
    trouble: Callable[P, str] = _no_trouble  # why it may not serve on this machine, "" where it may
    is_ours: bool = False  # compiled for this CPU

    def serves(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Whether it can and may."""
        return self.fits(*args, **kwargs) and not self.trouble(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Racing(Generic[P]):
    """How an operation's backends are raced, and under which name it is kept."""

    operation: str
    class_of: Callable[P, samples.Class | None]  # None: the first that serves does it
    samples: Callable[P, Sequence[Sequence[tuple[Any, ...]]]]


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of a backend for a class of shapes."""

    operation: str
    shapes: str
    backend: str
    milliseconds: tuple[float, ...]  # of a call of each sample; none where nothing was measured
    note: str  # "serves", or why it does not

    def cells(self) -> tuple[str, ...]:
        """Backend, time and note, for a table."""
        return self.backend, " | ".join(f"{ms:.3g}" for ms in self.milliseconds), self.note


class Operation(Generic[P, R]):
    """A row of the table. The last backend is the plain form, which can do everything."""

    def __init__(self, *backends: Backend[P, R], racing: Racing[P] | None = None) -> None:
        self.backends, self.racing = backends, racing
        self._order: dict[object, list[Backend[P, R]]] = {}  # by class and threads: who serves first
        self._rows: dict[object, list[Row]] = {}

    def select_backend(self, *args: P.args, **kwargs: P.kwargs) -> Backend[P, R]:
        shapes = self.racing.class_of(*args, **kwargs) if self.racing and race.is_on() else None
        if shapes is None or verify.is_switched_off():
            return next(b for b in self.backends if b.serves(*args, **kwargs))
        found = shapes, torch.get_num_threads()
        if found not in self._order:
            with _lock:
                if found not in self._order:
                    self._race(found, shapes, *args, **kwargs)
        return next(b for b in self._order[found] if b.fits(*args, **kwargs))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.select_backend(*args, **kwargs).run(*args, **kwargs)

    def measured(self) -> list[Row]:
        """Of all classes that this process has met."""
        return [row for rows in list(self._rows.values()) for row in rows]

    def forget(self) -> None:
        """As a new process would begin."""
        self._order.clear()
        self._rows.clear()
        if self.racing is not None:
            _unsettled.difference_update([about for about in _unsettled if about[0] == self.racing.operation])

    @torch.inference_mode()
    def _race(self, found: object, shapes: samples.Class, *args: P.args, **kwargs: P.kwargs) -> None:
        call = self._usual(*args, **kwargs)
        backends: list[Any] = [b for b in self.backends if _taking(b.fits, call)]
        if self._recalled(found, shapes, backends, call):
            return
        notes = {b.name: _taking(b.trouble, call) for b in backends}
        able = [b for b in backends if not notes[b.name]]
        times = self._times(able, shapes, *args, **kwargs) if len(able) > 1 else None
        if times is not None:
            winner, reasons = race.settle(times, [b.name for b in able if b.is_ours])
        else:
            winner, reasons = able[0].name, dict.fromkeys((b.name for b in able), BUSY)
        notes |= {**reasons, winner: "serves"}
        self._rows[found] = [self._row(shapes, b.name, times or {}, notes[b.name]) for b in backends]
        able.sort(key=lambda b: b.name != winner)  # calls that do not fit the winner go by the table's order
        self._order[found] = [*able, *(b for b in self.backends[-1:] if b not in able)]

    def _recalled(
        self, found: object, shapes: samples.Class, backends: Sequence[Any], call: tuple[Any, ...]
    ) -> bool:
        """Settle it by kept times where they say that ours wins: then nobody else has to be proven right once more.

        Who has a time was proven when it was taken, on this machine; the winner is proven in each process.
        """
        assert self.racing is not None
        notes = {b.name: _taking(b.trouble, call) for b in backends if b.is_ours}
        able = [b for b in backends if not notes.get(b.name)]
        times = race_times.recall(self.racing.operation, str(shapes), [b.name for b in able])
        ours = [b.name for b in able if b.is_ours]
        if times is None or (verdict := race.settle(times, ours)).winner not in ours:
            return False
        notes |= {**verdict.reasons, verdict.winner: "serves"}
        self._rows[found] = [self._row(shapes, b.name, times, notes[b.name]) for b in backends]
        self._order[found] = [
            *(b for b in able if b.name == verdict.winner),
            *(replace(b, fits=b.serves) for b in able if b.name != verdict.winner),
        ]
        return True

    def _times(
        self, able: Sequence[Any], shapes: samples.Class, *args: P.args, **kwargs: P.kwargs
    ) -> race.Times | None:
        """Kept ones, or measured and kept; None where the machine is too busy."""
        assert self.racing is not None
        about = self.racing.operation, str(shapes)
        times = race_times.recall(*about, [b.name for b in able])
        if times is None and len(_unsettled) < TRIES:
            times = _measured(able, self.racing.samples(*args, **kwargs))
            times = times and race_times.keep(*about, times)
        if times is None:
            _unsettled.add(about)
        return times

    def _row(self, shapes: samples.Class, backend: str, times: race.Times, note: str) -> Row:
        assert self.racing is not None
        milliseconds = tuple(1e3 * seconds for seconds in times.get(backend, ()))
        return Row(self.racing.operation, str(shapes), backend, milliseconds, note)

    def _usual(self, *args: P.args, **kwargs: P.kwargs) -> tuple[Any, ...]:
        """The call at hand where its tensors lie as our kernels want them, else a sample: an odd call settles nothing."""
        if not kwargs and any(b.is_ours and b.fits(*args, **kwargs) for b in self.backends):
            return args
        assert self.racing is not None
        return self.racing.samples(*args, **kwargs)[0][0]


def _measured(
    backends: Sequence[Backend[..., object]], works: Sequence[Sequence[tuple[Any, ...]]]
) -> race.Times | None:
    """Seconds of a call of each sample."""
    runs: race.Runs = {b.name: [partial(_run_all, b.run, work) for work in works] for b in backends}
    with team.at_most(None):  # torch's own have all threads, however few the pass has that asks
        found = race.measure(runs, [b.name for b in backends if b.is_ours])
    return found and {
        name: [took / len(work) for took, work in zip(times, works, strict=True)]
        for name, times in found.items()
    }


def _taking(function: Callable[..., T], call: tuple[Any, ...]) -> T:
    return function(*call)


def _run_all(run: Callable[..., object], calls: Sequence[tuple[Any, ...]]) -> None:
    for call in calls:
        run(*call)
