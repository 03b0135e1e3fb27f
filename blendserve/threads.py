"""How many CPUs this process may use, and how its threads wait for each other: settled before torch is loaded.

A barrier that spins wins microseconds on an idle machine. Beside other work it loses milliseconds: the thread that is
waited for has been put aside by the system, and whoever spins meanwhile holds the core that it needs. (Small passes
ask for fewer threads then, models/thread_tuner.py.) Left alone,
libgomp, the OpenMP that torch brings and the compiled kernels share, spins 300,000 times. It reads its environment once,
when it is loaded, so `blendserve` settles this in its own first line. What the user has set stays.

It counts threads by CPU affinity itself, and knows nothing of cgroup quotas: more threads than a quota pays for run a
part of each period and stand still, all of them, for the rest.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SPIN, POLICY, COUNT = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"
SPINS = "4000"
OWN_CGROUP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Cpus:
    """What the system lets this process use."""

    affinity: int  # CPUs that it may run on
    quota: float | None = None  # CPUs' worth of time that its cgroups pay for; None = no limit

    @property
    def count(self) -> int:
        """Threads that can run at the same time, at least 1."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, math.ceil(self.quota)))


@dataclass(frozen=True, slots=True)
class Settled:
    """What was found when the package was imported, and what was done about it."""

    cpus: Cpus
    ours: dict[str, str]  # set by us in the environment
    theirs: dict[str, str]  # found there
    too_late: bool  # torch had been loaded, and its OpenMP had read its environment

    @property
    def count(self) -> int | None:
        """Threads that torch may have at most; None where the user has said how many there are."""
        return None if COUNT in self.theirs else self.cpus.count

    def __str__(self) -> str:
        """One line for a person."""
        quota = "no quota" if self.cpus.quota is None else f"a quota of {self.cpus.quota:g}"
        found = f"{self.cpus.affinity} CPUs by affinity, {quota}"
        values = [f"{name}={value}" for name, value in self.theirs.items()]
        if self.too_late:
            return (
                f"{found}; torch was loaded before blendserve, so its threads wait as they did: import blendserve first, "
                f"or set {SPIN}={SPINS} in the environment, or beside other work they get far less than their share"
            )
        values += [f"{name}={value} by blendserve" for name, value in self.ours.items()]
        return f"{found}; {', '.join(values)}"


def settle(environment: MutableMapping[str, str], cpus: Cpus, too_late: bool) -> Settled:
    """Write into `environment` what the user has not set; nothing when it would not be read any more."""
    theirs = {name: environment[name] for name in (POLICY, SPIN, COUNT) if environment.get(name)}
    ours = {}
    if not too_late:
        if POLICY not in theirs and SPIN not in theirs:
            ours[SPIN] = SPINS
        if COUNT not in theirs and cpus.count < cpus.affinity:
            ours[COUNT] = str(cpus.count)
    environment.update(ours)
    return Settled(cpus, ours, theirs, too_late)


def limit_torch(asked: int | None) -> None:
    """Let torch have as many threads as asked for; None = as it has, but no more than there are CPUs for them."""
    import torch  # a second, and what is settled above must come first

    count = asked or SETTLED.count
    if asked or (count and torch.get_num_threads() > count):
        torch.set_num_threads(count or 1)


def find_cpus(own: Path = OWN_CGROUP, cgroups: Path = CGROUPS) -> Cpus:
    """own: the list of this process's cgroups; cgroups: where their file systems are mounted."""
    can_tell = hasattr(os, "sched_getaffinity")
    affinity = len(os.sched_getaffinity(0)) if can_tell else os.cpu_count() or 1
    return Cpus(affinity, min(_quotas(own, cgroups), default=None))


def _quotas(own: Path, cgroups: Path) -> Iterator[float]:
    """Of every cgroup from this process's own up to the root: the least of them holds."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        for folder in _up(path, _mounts(controllers, cgroups)):
            yield from _quota_v2(folder) if not controllers else _quota_v1(folder)


def _mounts(controllers: str, cgroups: Path) -> tuple[Path, ...]:
    if not controllers:  # version 2, alone or beside version 1
        return cgroups, cgroups / "unified"
    return (cgroups / controllers, cgroups / "cpu") if "cpu" in controllers.split(",") else ()


def _up(path: str, mounts: tuple[Path, ...]) -> Iterator[Path]:
    """In a container the path may be the host's, of which only the mount itself is there: missing folders say nothing."""
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    for mount in mounts:
        for n in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:n])


def _quota_v2(folder: Path) -> Iterator[float]:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        if quota != "max":
            yield int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return


def _quota_v1(folder: Path) -> Iterator[float]:
    try:
        quota, period = (int((folder / f"cpu.cfs_{part}_us").read_text()) for part in ("quota", "period"))
        if quota > 0:
            yield quota / period
    except (OSError, ValueError, ZeroDivisionError):
        return


SETTLED = settle(os.environ, find_cpus(), "torch" in sys.modules)
