"""`blendserve bench crowded`: TTFT and decoding beside busy processes, and with one core's worth of time.

A subject (subject.py) is one process whose threads wait in one way: as blendserve settles it, as libgomp does when it is
left alone, or as was asked for. In each round every subject runs every request in every situation, in turns; ratios to
alone are taken round by round.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from blendserve.bench.config import CrowdedConfig
from blendserve.bench.figures import Figures, Update, ratios, spread
from blendserve.bench.harness import scratch
from blendserve.bench.load import busy, one_core, start
from blendserve.errors import InputError
from blendserve.threads import COUNT, SETTLED, SPIN

Say = Callable[[str], None]
Start = Callable[[list[str], dict[str, str]], Any]
Taken = dict[tuple[str, str, str, str], list[float]]  # situation, subject, request, figure -> by round

OURS, LIBGOMP = "blendserve", "libgomp alone"
ALONE, ONE_CORE = "alone", "one core"
LIBGOMP_SPINS = "300000"  # its default (libgomp/env.c)


def measure(
    config: CrowdedConfig, say: Say = lambda text: None, update: Update = lambda done, total: None
) -> Figures:
    """Everything that the bench prints. Raises ConfigError, InputError."""
    taken: Taken = {}
    with scratch(config.folder) as folder, one_core() as limited, ExitStack() as started:
        whole, limit = {}, {}
        for name, environment in environments(config).items():
            say(f"Starting the measured process: {name}")
            whole[name] = started.enter_context(_subject(config, folder, environment, start))
            limit[name] = started.enter_context(_subject(config, folder, environment, limited.popen))
        situations = [
            (ALONE, 0, whole),
            *((f"beside {n}", n, whole) for n in config.busy),
            (ONE_CORE, 0, limit),
        ]
        for done in range(config.repeats):
            for place, (situation, others, subjects) in enumerate(situations):
                with busy(others):
                    _round(taken, situation, _turned(subjects, done))
                update(done * len(situations) + place + 1, config.repeats * len(situations))
        threads = {ALONE: _threads(whole), ONE_CORE: _threads(limit)}
    return {
        "bench": "crowded",
        **{part: whole[OURS].about[part] for part in ("versions", "machine", "reader", "cpus")},
        "settings": config.model_dump(mode="json"),
        "niceness": os.nice(0),
        "load_average": os.getloadavg(),  # others' work counts, too
        "one_core_by": limited.how,
        "threads": threads,
        "subjects": _figures(taken),
        "alone_against_libgomp": _cost(taken),
    }


class Subject:
    """A process that runs requests when asked."""

    def __init__(self, process: Any, task: Figures, log: Path) -> None:
        self._process, self._log = process, log
        self.about: Figures = self._ask(task)

    def take(self, request: Any) -> Figures:
        """What came of one request. Raises InputError when the process has ended."""
        return self._ask(request)

    def _ask(self, value: Any) -> Figures:
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = self._process.wait()
            why = (self._log.read_text().strip() or f"exit code {code}").splitlines()[-1]
            raise InputError(f"a process that was to be measured ended early: {why}")
        return dict(json.loads(answer))


@contextmanager
def subject_of(module: str, task: Figures, log: Path, environment: Mapping[str, str]) -> Iterator[Subject]:
    """A module of ours in a process of its own, which is killed at the end. Raises InputError."""
    with log.open("w") as told:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=told,
            text=True,
            env={**os.environ, **environment},
        )
    try:
        yield Subject(process, task, log)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def _subject(
    config: CrowdedConfig, folder: Path, environment: Mapping[str, str], begin: Start
) -> Iterator[Subject]:
    given = {name: value for name, value in os.environ.items() if name not in SETTLED.ours}
    log = folder / f"{len(list(folder.iterdir()))}.log"
    command = ["sh", "-c", 'exec "$@" 2>"$0"', str(log), sys.executable, "-m", "blendserve.bench.subject"]
    process = begin(command, {**given, **environment})
    try:
        kv = folder / "kv"
        yield Subject(process, {"config": config.model_dump(mode="json"), "folder": str(kv)}, log)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def environments(config: CrowdedConfig) -> dict[str, dict[str, str]]:
    """Subject -> what its environment has beside this process's own."""
    cores = str(SETTLED.cpus.affinity)
    asked = {words: dict(word.split("=", 1) for word in words.split()) for words in config.environments}
    libgomp = {} if config.ours_alone else {LIBGOMP: {SPIN: LIBGOMP_SPINS, COUNT: cores}}
    return {OURS: {}, **libgomp, **asked}


def _threads(subjects: dict[str, Subject]) -> dict[str, int]:
    return {name: subject.about["machine"]["threads"] for name, subject in subjects.items()}


def _turned(subjects: dict[str, Subject], n: int) -> dict[str, Subject]:
    """The same, beginning with another one each round."""
    names = list(subjects)
    first = n % len(names)
    return {name: subjects[name] for name in names[first:] + names[:first]}


def _round(taken: Taken, situation: str, subjects: dict[str, Subject]) -> None:
    for request in next(iter(subjects.values())).about["names"]:
        for name, subject in subjects.items():
            for figure, seconds in subject.take(request).items():
                if seconds is not None:
                    taken.setdefault((situation, name, request, figure), []).append(seconds)


def _figures(taken: Taken) -> Figures:
    """subject -> request -> figure -> situation -> seconds, and how many times those of alone."""
    figures: Figures = {}
    for (situation, name, request, figure), seconds in taken.items():
        cell = {
            "seconds": spread(seconds),
            "times_alone": ratios(seconds, taken[ALONE, name, request, figure]),
        }
        figures.setdefault(name, {}).setdefault(request, {}).setdefault(figure, {})[situation] = cell
    return figures


def _cost(taken: Taken) -> Figures:
    """request -> figure -> what our way of waiting takes alone, as a multiple of libgomp's own."""
    cost: Figures = {}
    for (situation, name, request, figure), seconds in taken.items():
        theirs = taken.get((ALONE, LIBGOMP, request, figure))
        if theirs and (situation, name) == (ALONE, OURS):
            cost.setdefault(request, {})[figure] = ratios(seconds, theirs)
    return cost
