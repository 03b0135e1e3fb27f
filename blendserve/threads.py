"""CPUs that this process may use, and how OpenMP threads wait for each other. Set before torch is loaded.

A barrier that spins saves microseconds on an idle machine. Beside other work it loses milliseconds: a spinning thread
holds the core that the last thread needs. libgomp, which torch and the compiled kernels share, spins 300,000 times by
default. It reads its environment once, when it is loaded, so `blendserve` sets it in its first line. Variables that the
user has set stay.

libgomp counts CPUs by affinity and ignores cgroup quotas. More threads than the quota allows are all throttled for a
part of each period, so the count is limited here. (models/thread_tuner.py uses fewer threads for small passes.)
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
    """The CPUs that the system lets this process use."""

    affinity: int  # number of CPUs that it may run on
    quota: float | None = None  # of its cgroups, in CPUs; None = no limit

    @property
    def count(self) -> int:
        """Threads that can run at the same time, at least 1."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, math.ceil(self.quota)))


@dataclass(frozen=True, slots=True)
class Settled:
    """The thread settings of this process, as of the import of the package."""

    cpus: Cpus
    ours: dict[str, str]  # variables set here
    theirs: dict[str, str]  # variables set by the user
    too_late: bool  # torch was loaded before, and its OpenMP had read the environment

    @property
    def count(self) -> int | None:
        """Maximum number of torch's threads; None if the user has set it."""
        return None if COUNT in self.theirs else self.cpus.count

    def __str__(self) -> str:
        """One line for a person."""
        quota = "no quota" if self.cpus.quota is None else f"a quota of {self.cpus.quota:g}"
        values = [f"{name}={value}" for name, value in self.theirs.items()]
        values += [f"{name}={value} by blendserve" for name, value in self.ours.items()]
        if self.too_late:
            remedy = f"import blendserve first, or set {SPIN}={SPINS} in the environment"
            values = [f"torch was loaded before blendserve, so its threads spin: {remedy}"]
        return f"{self.cpus.affinity} CPUs by affinity, {quota}; {', '.join(values)}"


def settle(environment: MutableMapping[str, str], cpus: Cpus, too_late: bool) -> Settled:
    """Set the variables in `environment` that the user has not set; none if it is too late."""
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
    """Set the number of torch's threads; None = no more than there are CPUs for them."""
    import torch  # a second; the environment is set first

    count = asked or SETTLED.count
    if asked or (count and torch.get_num_threads() > count):
        torch.set_num_threads(count or 1)


def find_cpus(own: Path = OWN_CGROUP, cgroups: Path = CGROUPS) -> Cpus:
    """own: the list of this process's cgroups. cgroups: where cgroup v2 is mounted."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Cpus(affinity, min(_quotas(own, cgroups), default=None))


def _quotas(own: Path, cgroups: Path) -> Iterator[float]:
    """The quotas of this process's cgroup and all above it: the smallest one holds.

    In a container, the path may be the host's, of which only the root is mounted: missing files are skipped.
    """
    paths = [line.removeprefix("0::") for line in _read(own).splitlines() if line.startswith("0::")]
    for path in paths:
        parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for n in range(len(parts) + 1):
            quota, _, period = _read(cgroups.joinpath(*parts[:n], "cpu.max")).strip().partition(" ")
            if quota.isdigit() and period.isdigit() and int(period):
                yield int(quota) / int(period)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


SETTLED = settle(os.environ, find_cpus(), "torch" in sys.modules)
