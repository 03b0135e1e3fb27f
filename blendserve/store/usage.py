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

NOTE_EVERY_S = 60.0  # the notes of a store that only reads
# Their order in a counters record.
COUNTERS = ("hits", "misses", "corrupt", "evictions", "refused", "undecodable")


@dataclass(slots=True)
class Notes:
    """Uses and counts that are not written yet."""

    used: dict[ChunkKey, int] = field(default_factory=dict)
    counts: Counter[tuple[bytes, str]] = field(default_factory=Counter)  # by (namespace tag, counter)


class UsageLog:
    """Notes of one store's uses. Threads may share it."""

    def __init__(self, admission: Admission, clock: Clock = time) -> None:
        self._admission, self._clock = admission, clock
        self._notes = Notes()
        self._logged: set[str] = set()
        self._last, self._written = 0, clock.monotonic()
        self._lock = threading.Lock()

    def now(self) -> int:
        """Nanoseconds since 1970, later than at every call before."""
        with self._lock:
            return self._tick()

    def is_due(self) -> bool:
        """Whether the last call that returned True, or the opening, is a minute ago: write the notes now."""
        is_due = self._clock.monotonic() - self._written > NOTE_EVERY_S
        if is_due:
            self._written = self._clock.monotonic()
        return is_due

    def look_up(self, key: ChunkKey, found: bool) -> None:
        """Note a hit or a miss."""
        self._admission.record_access(key)
        with self._lock:
            if found:
                self._notes.used[key] = self._tick()
            self._notes.counts[key[:TAG_BYTES], "hits" if found else "misses"] += 1

    def count(self, key: ChunkKey, counter: str, why: str = "") -> None:
        """Add 1 to a counter. "undecodable" turns the chunk's hit into a miss; `why` is logged once."""
        with self._lock:
            tag, is_new = key[:TAG_BYTES], bool(why) and why not in self._logged
            self._notes.counts[tag, counter] += 1
            if counter == "undecodable":
                self._notes.counts.update({(tag, "hits"): -1, (tag, "misses"): 1})
            self._logged.add(why)
        if is_new:
            log.warning("stored chunks count as missing: %s", why)

    def used(self) -> dict[ChunkKey, int]:
        """Last uses that are not written yet."""
        with self._lock:
            return dict(self._notes.used)

    @property
    def has_notes(self) -> bool:
        return bool(self._notes.used or self._notes.counts)

    def drain(self) -> Notes:
        """Remove the notes, for the caller to write; `restore` them if that fails."""
        with self._lock:
            notes, self._notes = self._notes, Notes()
            return notes

    def drop_uses(self) -> None:
        """A store that is open for reading writes none; it keeps its counts for `stats`."""
        with self._lock:
            self._notes.used = {}

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
        self._last = max(self._last + 1, self._clock.time_ns())
        return self._last
