"""Other work on the machine, and less of the machine: busy processes beside who is measured, or one core's worth of time.

Whatever is begun here ends with its `with`, and by itself if this process is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from blendserve.errors import InputError

LONGEST = 1800  # seconds that a busy process lives, at most
OURS = "blendserve-bench-"  # a cgroup's name, before the process that made it
PERIOD = 100_000  # microseconds, in which a quota is spent
# Ends with the one who started it (PR_SET_PDEATHSIG, Linux alone), and after so many seconds anywhere.
BUSY = """
import ctypes, os, sys, time
os.setpgid(0, 0)  # whoever interrupts the bench does not interrupt this
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
end = time.monotonic() + float(sys.argv[1])
print(flush=True)
while time.monotonic() < end:
    for _ in range(100_000):
        pass
"""
JOIN = 'echo $$ > "$0" && exec "$@"'  # a shell that joins a cgroup and becomes the command


@contextmanager
def busy(n: int) -> Iterator[None]:
    """n processes, each as busy as one core allows, as nice as this one. Raises InputError when one ended too early.

    They are of this one's session: a system that shares its time out by sessions (Linux's autogroup) would give each of
    several as much as all that is measured.
    """
    command = [sys.executable, "-S", "-c", BUSY, str(LONGEST)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(n):  # one by one: those that have started end, whatever happens
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            started.append(process)
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()  # it is past its start
        yield
        if any(process.poll() is not None for process in started):
            raise InputError(
                f"a busy process ended early; one measurement may take {LONGEST} s: ask for less"
            )
    finally:
        for process in started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@dataclass(frozen=True, slots=True)
class OneCore:
    """One core's worth of time for processes started through it."""

    folder: Path | None  # the cgroup; None = one CPU by affinity, as no cgroup can be made

    @property
    def how(self) -> str:
        return "cgroup quota" if self.folder else "affinity"

    def popen(self, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """Start a command that is under the limit from its first instruction on, its stdin and stdout piped."""
        if self.folder:
            return start(["sh", "-c", JOIN, str(self.folder / "cgroup.procs"), *command], environment)
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(before)})
        try:
            return start(command, environment)
        finally:
            os.sched_setaffinity(0, before)


def start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """A process whose stdin and stdout are piped."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


@contextmanager
def one_core(cgroups: Path = Path("/sys/fs/cgroup")) -> Iterator[OneCore]:
    """A cgroup of version 2 or 1 where one may be made, else one CPU by affinity. Its processes must have ended."""
    candidates = ((cgroups, "cpu.max"), (cgroups / "cpu", "cpu.cfs_quota_us"))
    for parent, _ in candidates:
        _clear(parent)
    folder = next((made for parent, file in candidates if (made := _limited(parent, file))), None)
    try:
        yield OneCore(folder)
    finally:
        if folder:
            with suppress(OSError):
                folder.rmdir()


def _clear(parent: Path) -> None:
    """Remove what a bench left behind that was killed."""
    for folder in parent.glob(f"{OURS}*"):
        if not Path("/proc", folder.name.removeprefix(OURS)).exists():
            with suppress(OSError):
                folder.rmdir()


def _limited(parent: Path, file: str) -> Path | None:
    """A new cgroup in `parent` with a quota of one core; None where it cannot be had."""
    folder = parent / f"{OURS}{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        if not (folder / file).exists():  # an ordinary folder, or a cgroup without this controller
            raise OSError
        if file == "cpu.max":
            (folder / file).write_text(f"{PERIOD} {PERIOD}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD))
            (folder / file).write_text(str(PERIOD))
    except OSError:
        folder.rmdir()
        return None
    return folder
