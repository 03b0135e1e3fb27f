"""What this machine has to spare: memory within the limits of its cgroups, and room on a disk."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
UNKNOWN_BYTES = 4 << 30  # assumed where the system does not tell
SHARE = 8  # of the available memory, that one cache takes by default

log = logging.getLogger(__name__)


def fit(default: int, share: int = SHARE) -> int:
    """Return a default number of bytes, or one part in `share` of the available memory where that is less."""
    return min(default, available_memory() // share)


def checked_cap(n_bytes: int, setting: str, available: int | None = None, what: str = "memory") -> int:
    """Return the bytes that a setting allows, with a warning if the machine has fewer. available: by default memory."""
    available = available_memory() if available is None else available
    if n_bytes > available:
        text = "%s allows %d MB, and %d MB of %s are available: lower it, or the process may fail when it fills up"
        log.warning(text, setting, n_bytes // 10**6, available // 10**6, what)
    return n_bytes


def available_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the bytes of memory that this process can still use without swapping or being killed.

    That is the least of what the system has available and what each cgroup of the process (v1 or v2) has left. proc,
    cgroups: where these are mounted.
    """
    return min([_of_system(proc), *_of_cgroups(proc, cgroups)])


def _of_system(proc: Path) -> int:
    for line in _read(proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    try:  # pages of the whole memory, as on macOS
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):
        return UNKNOWN_BYTES


def _of_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    """What is left of the limit of each cgroup of this process and of all above it.

    In a container the path may be the host's, of which only the root is mounted: missing files are skipped.
    """
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = cgroups
            limit = "memory.max"
            used = "memory.current"
            cache = "inactive_file"
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            limit = "memory.limit_in_bytes"
            used = "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for n in range(len(parts) + 1):
            folder = root.joinpath(*parts[:n])
            most = _read(folder / limit).strip()
            now = _read(folder / used).strip()
            if most.isdigit() and now.isdigit():
                yield max(0, int(most) - int(now) + _reclaimable(folder, cache))


def _reclaimable(folder: Path, name: str) -> int:
    """Bytes of files that the kernel keeps and drops at need."""
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def free_disk(folder: Path) -> int | None:
    """Return the free bytes of the disk on which a folder lies, or will lie; None where the system does not tell."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
