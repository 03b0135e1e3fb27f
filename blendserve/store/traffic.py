"""What requests asked of a store: counters per tenant, and which chunks were used when. In memory until written.

A read must not cost a write. So reads are noted here, and a store on disk writes the notes into the next
transaction that it makes anyway, when it closes, and otherwise once a minute. A kill loses at most that: chunks then
look less recently used than they are, and nothing else.

Times are of the wall clock, because they are compared over processes and restarts; within a process they only rise.
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

COUNTERS = (
    "hits",
    "misses",
    "corrupt",
    "evictions",
    "refused",
    "undecodable",
)  # their order in a counters record


@dataclass(slots=True)
class Notes:
    """What is not written yet."""

    used: dict[ChunkKey, int] = field(default_factory=dict)
    counts: Counter[tuple[bytes, str]] = field(default_factory=Counter)  # by (namespace tag, counter)


class Traffic:
    """Takes notes; safe to share between threads."""

    def __init__(self, admission: Admission, clock: Clock = time) -> None:
        self._admission, self._time = admission, clock
        self._notes = Notes()
        self._logged: set[str] = set()
        self._clock = 0
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Whether there is anything to write."""
        return bool(self._notes.used or self._notes.counts)

    def now(self) -> int:
        """Nanoseconds since 1970, later than ever before."""
        with self._lock:
            return self._tick()

    def hit(self, key: ChunkKey) -> None:
        self._admission.record_access(key)
        with self._lock:
            self._notes.used[key] = self._tick()
            self._notes.counts[key[:TAG_BYTES], "hits"] += 1

    def miss(self, key: ChunkKey, undecodable: str = "") -> None:
        """undecodable: why a chunk that is there cannot be used; logged once."""
        self._admission.record_access(key)
        self.count(key, "misses")
        if undecodable:
            self.count(key, "undecodable")
            if undecodable not in self._logged:
                self._logged.add(undecodable)
                log.warning("stored chunks count as missing: %s", undecodable)

    def count(self, key: ChunkKey, counter: str) -> None:
        with self._lock:
            self._notes.counts[key[:TAG_BYTES], counter] += 1

    def used(self) -> dict[ChunkKey, int]:
        """When chunks were used, as far as that is not written yet."""
        with self._lock:
            return dict(self._notes.used)

    def take(self) -> Notes:
        """The notes so far, which are the caller's to write now; `put_back` if that fails."""
        with self._lock:
            notes, self._notes = self._notes, Notes()
            return notes

    def put_back(self, notes: Notes) -> None:
        """Undo `take`."""
        with self._lock:
            self._notes.used = {**notes.used, **self._notes.used}
            self._notes.counts.update(notes.counts)

    def counts(self, tag: bytes = b"") -> Counter[str]:
        """Sums of what is not written yet, of one namespace or of all."""
        with self._lock:
            return add_up(self._notes.counts, tag)

    def _tick(self) -> int:
        self._clock = max(self._clock + 1, self._time.time_ns())
        return self._clock


def add_up(counts: Counter[tuple[bytes, str]], tag: bytes = b"") -> Counter[str]:
    """Counters summed over one namespace or all."""
    total: Counter[str] = Counter()
    for (owner, counter), n in counts.items():
        if owner.startswith(tag):
            total[counter] += n
    return total
