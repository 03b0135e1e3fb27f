"""Usage of a store: counters by namespace, and when chunks were last used. In memory until written.

A read must not cost a write, so uses are noted here. A store writes the notes with its next transaction, when it closes,
and otherwise once a minute. A killed process loses at most a minute of them.

Times are of the wall clock, because processes compare them; within a process they only rise.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from blendserve.store.clock import Clock
from blendserve.store.key import TAG_BYTES, ChunkKey
from blendserve.store.policies import Admission

log = logging.getLogger(__name__)

# Their order in a counters record.
COUNTERS = ("hits", "misses", "corrupt", "evictions", "refused", "undecodable")


@dataclass(slots=True)
class Notes:
    """Uses and counts that are not written yet."""

    used: dict[ChunkKey, int] = field(default_factory=dict)
    counts: Counter[tuple[bytes, str]] = field(default_factory=Counter)  # by (namespace tag, counter)


class UsageLog:
    """Notes of one store's uses. Safe to share between threads."""

    def __init__(self, admission: Admission, clock: Clock = time) -> None:
        self._admission, self._time = admission, clock
        self._notes = Notes()
        self._logged: set[str] = set()
        self._last = 0
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Whether there is anything to write."""
        return bool(self._notes.used or self._notes.counts)

    def now(self) -> int:
        """Nanoseconds since 1970, later than at every call before."""
        with self._lock:
            return self._tick()

    def hit(self, key: ChunkKey) -> None:
        self._admission.record_access(key)
        with self._lock:
            self._notes.used[key] = self._tick()
            self._notes.counts[key[:TAG_BYTES], "hits"] += 1

    def miss(self, key: ChunkKey) -> None:
        self._admission.record_access(key)
        self.count(key, "misses")

    def undecodable(self, key: ChunkKey, why: str) -> None:
        """Turn a chunk's hit into a miss, as it cannot be decoded here. `why` is logged once."""
        with self._lock:
            tag = key[:TAG_BYTES]
            self._notes.counts.update({(tag, "hits"): -1, (tag, "misses"): 1, (tag, "undecodable"): 1})
            new = why not in self._logged
            self._logged.add(why)
        if new:
            log.warning("stored chunks count as missing: %s", why)

    def report(self, key: ChunkKey, event: str, why: str = "") -> None:
        """ChunkRecord.report of a chunk that counted as a hit."""
        if event == "undecodable":
            self.undecodable(key, why)
        else:
            self.count(key, event)

    def count(self, key: ChunkKey, counter: str) -> None:
        with self._lock:
            self._notes.counts[key[:TAG_BYTES], counter] += 1

    def used(self) -> dict[ChunkKey, int]:
        """Last uses that are not written yet."""
        with self._lock:
            return dict(self._notes.used)

    def drain(self) -> Notes:
        """Remove the notes, for the caller to write; `restore` them if that fails."""
        with self._lock:
            notes, self._notes = self._notes, Notes()
            return notes

    def restore(self, notes: Notes) -> None:
        """Undo `drain`."""
        with self._lock:
            self._notes.used = {**notes.used, **self._notes.used}
            self._notes.counts.update(notes.counts)

    def counts(self, tag: bytes = b"") -> Counter[str]:
        """Counts that are not written yet, of one namespace or of all."""
        total: Counter[str] = Counter()
        with self._lock:
            for (owner, counter), n in self._notes.counts.items():
                total[counter] += n if owner.startswith(tag) else 0
        return total

    def _tick(self) -> int:
        self._last = max(self._last + 1, self._time.time_ns())
        return self._last
