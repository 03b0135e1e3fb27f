"""Chunks of a remote store, read whole into memory: all that a request lacks in one go, or ahead of it.

    passages known -> start()  .  .  .  reading in a thread  .  .  .
    look-up                                    take() -> what is here by then; the rest is waited for, or read now

A request never computes while it depends on a network: what it uses has arrived and was checked. What was read
ahead and is not taken goes when others need the room, or after a while.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from blendserve.errors import CorruptRecord, StoreError, StoreVersion, unraised
from blendserve.store.base import KVStore
from blendserve.store.clock import Clock
from blendserve.store.codecs.base import SLOW, UNREACHABLE, Undecodable
from blendserve.store.codecs.raw import Raw
from blendserve.store.key import ChunkKey
from blendserve.store.record import ChunkRecord
from blendserve.store.request_reads import Coming, Meanwhile, Reads, TimeSaved
from blendserve.store.view import ChunkView, RecordView, whole

READERS = 2  # requests that are read ahead at a time
KEPT_S = 60.0  # what nobody took until then, nobody will
REST_S = 1.0  # after a failure nothing is asked for: one request waits for it, not each of its chunks

Fetched: TypeAlias = "ChunkRecord | CorruptRecord | StoreVersion | Undecodable"
"""A chunk as it is coded, or why there is none to use. What the remote store does not have is left out."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Chunks that are read ahead together."""

    read: Future[dict[ChunkKey, Fetched]]
    since: float


class Fetcher:
    """Reads from one remote store. Safe to share between threads."""

    def __init__(self, remote: KVStore, cap_bytes: int, clock: Clock = time) -> None:
        """cap_bytes: of what is read ahead and not taken yet; what is just being read comes on top."""
        self._remote, self._cap, self._clock = remote, cap_bytes, clock
        self.failures = 0
        self._ahead: OrderedDict[ChunkKey, _Batch] = OrderedDict()  # the oldest first
        self._wanted: Counter[ChunkKey] = Counter()  # requests that are to come, of each
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="blendserve-fetch")
        self._trouble, self._rest_until = "", 0.0

    def start(self, keys: Iterable[ChunkKey], saved: TimeSaved | None = None) -> None:
        """Read these ahead, if there is room."""
        with self._lock:
            self._trim()
            asked = list(dict.fromkeys(keys))
            new = [key for key in asked if key not in self._ahead]
            for key in new:
                self._wanted.pop(key, None)
            self._wanted.update(asked)
            if new and self._held() < self._cap:
                batch = _Batch(self._pool.submit(self.read, new, None, saved), self._clock.monotonic())
                self._ahead.update(dict.fromkeys(new, batch))

    def take(
        self, keys: Sequence[ChunkKey], meanwhile: Meanwhile | None = None, saved: TimeSaved | None = None
    ) -> dict[ChunkKey, Fetched]:
        """These chunks, as far as the remote store has them, and `meanwhile` lets it give them.

        A chunk that was left when it was read ahead, as computing it saved more, is asked for again with this `saved`.
        """
        begun = self.begun(keys)
        now = [key for key in keys if key not in begun]
        found = (
            self.read(now, meanwhile, saved) if now else {}
        )  # first: what is read ahead arrives meanwhile, not after it
        found |= {key: fetched for key, wait in begun.items() if (fetched := wait())}
        left = [key for key in begun if was_left(found.get(key))]
        return found | (self.read(left, None if now else meanwhile, saved) if left else {})

    def begun(
        self, keys: Sequence[ChunkKey], shared: bool = False
    ) -> dict[ChunkKey, Callable[[], Fetched | None]]:
        """Those of the chunks that are being read ahead, or have been: each to be waited for.

        shared: leave what other requests, for which it was read, too, have not taken yet.
        """
        with self._lock:
            self._trim()
            batches = {key: batch for key in keys if (batch := self._ahead.get(key))}
            for key, batch in batches.items():
                batch.read.cancel()  # unless it has begun: it would come after others
                self._wanted[key] -= 1
                if not shared or self._wanted[key] <= 0 or batch.read.cancelled():
                    del self._ahead[key], self._wanted[key]
        return {
            key: partial(_of, batch.read, key) for key, batch in batches.items() if not batch.read.cancelled()
        }

    def forget(self, key: ChunkKey) -> None:
        """Drop what was read ahead of a chunk."""
        with self._lock:
            self._ahead.pop(key, None)
            self._wanted.pop(key, None)

    def read(
        self, keys: Sequence[ChunkKey], meanwhile: Meanwhile | None = None, saved: TimeSaved | None = None
    ) -> dict[ChunkKey, Fetched]:
        """From the remote store, now and in one go. What cannot be reached is told as such."""
        found: dict[ChunkKey, Fetched] = {}
        if self._clock.monotonic() >= self._rest_until:
            try:
                with self._remote.reading() as snapshot:
                    snapshot.expect(keys, _undecoded(meanwhile), saved)
                    for key in keys:
                        found |= _fetched(snapshot, key)
                self.failures += any(
                    isinstance(f, Undecodable) and f.kind == UNREACHABLE for f in found.values()
                )
                return found
            except StoreError as error:
                self.failed(error)
        reason = Undecodable(f"the remote store cannot be read: {self._trouble}", UNREACHABLE)
        return {**dict.fromkeys(keys, reason), **found}

    def failed(self, error: StoreError) -> None:
        """Rest for a moment."""
        self.failures += 1
        self._trouble, self._rest_until = str(error), self._clock.monotonic() + REST_S

    @property
    def resting(self) -> bool:
        """Whether the remote store has just failed."""
        return self._clock.monotonic() < self._rest_until

    @property
    def bytes(self) -> int:
        """Bytes of chunks that were read ahead and not used yet."""
        with self._lock:
            return self._held()

    def close(self) -> None:
        """Wait for what is being read."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def _trim(self) -> None:
        """Drop what is too old, and the oldest that is too much."""
        oldest_kept = self._clock.monotonic() - KEPT_S
        for key, batch in list(self._ahead.items()):
            if batch.since < oldest_kept or (batch.read.done() and self._held() > self._cap):
                del self._ahead[key], self._wanted[key]

    def _held(self) -> int:
        """Bytes of what was read ahead."""
        return sum(_bytes(batch.read, key) for key, batch in self._ahead.items())


@dataclass(frozen=True, slots=True)
class _Undecoded:
    """Chunks on their way that are to be kept as they are coded."""

    coming: Coming

    def wait(self, seconds: float) -> bool:
        return self.coming.wait(seconds)

    def decode(self) -> bool:
        return False

    def withdraw(self, seconds: Mapping[ChunkKey, float]) -> ChunkKey | None:
        return self.coming.withdraw(seconds)

    def begin(self) -> bool:
        return False

    @property
    def waited(self) -> float:
        return self.coming.waited


def _undecoded(meanwhile: Meanwhile | None) -> Meanwhile | None:
    return meanwhile and (lambda coming: meanwhile(_Undecoded(coming)))


def was_left(fetched: Fetched | None) -> bool:
    """Whether a request's `saved` was too little to fetch this chunk; another request's may be enough."""
    return isinstance(fetched, Undecodable) and fetched.kind == SLOW


def _of(read: Future[dict[ChunkKey, Fetched]], key: ChunkKey) -> Fetched | None:
    return read.result().get(key)


def record_of(key: ChunkKey, view: ChunkView) -> ChunkRecord:
    """A copy of a chunk's record, every segment checked; uncoded where the view knows no coding."""
    if isinstance(view, RecordView):
        return view.record.copy()
    return ChunkRecord.encode(key, whole(view), Raw())


def _fetched(snapshot: Reads, key: ChunkKey) -> Mapping[ChunkKey, Fetched]:
    """Empty for a chunk that is not there. Raises StoreError when the store fails."""
    try:
        view = snapshot.get(key)
        if view is not None:
            return {key: record_of(key, view)}
    except (CorruptRecord, StoreVersion) as error:
        return {key: unraised(error)}
    why = snapshot.undecodable.get(key)
    return {key: why} if why else {}


def _bytes(read: Future[dict[ChunkKey, Fetched]], key: ChunkKey) -> int:
    if not read.done() or read.cancelled() or read.exception():
        return 0
    fetched = read.result().get(key)
    return fetched.n_bytes if isinstance(fetched, ChunkRecord) else 0
