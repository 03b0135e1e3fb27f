"""A machine's own store before one that it shares with others: what one has computed, all can use.

    look-up -> own store -> remote store          a chunk found there is copied here, in the background
    put     -> own store        -> remote store          in the background ("back"), or before it counts ("through")

Content-addressed records never change, so a copy here needs no word from there: what is near is used without asking.
A failing store is a miss, wherever it is. A deletion reaches all places that this process knows of, or says which not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Literal

from blendserve.core import TokenIds
from blendserve.errors import CorruptBlob, StoreError, StoreLeftAlone, StoreUnavailable
from blendserve.store.backlog import Backlog
from blendserve.store.base import ChunkInfo, KVStore, RemoteStats, Snapshot, StoreStats, read_record
from blendserve.store.blobs import BlobInfo, BlobStore
from blendserve.store.clock import Clock
from blendserve.store.codecs.base import NO_TABLES
from blendserve.store.fetching import Fetched, Fetcher
from blendserve.store.key import ChunkKey
from blendserve.store.layered_snapshot import LayeredSnapshot
from blendserve.store.record import ChunkRecord
from blendserve.store.request_reads import LOCAL, REMOTE, Meanwhile, Reads, Sample, TimeSaved
from blendserve.store.view import ChunkView, RecordView
from blendserve.store.wrapped import WrappedStore

log = logging.getLogger(__name__)

Write = Literal["back", "through"]
WAITING_BYTES = 1 << 30  # of chunks that are to be written, there or here


class LayeredStore(WrappedStore):
    """The own store and a remote one. It closes both."""

    def __init__(
        self,
        near: KVStore,
        far: KVStore,
        write: Write = "back",
        prefetch_bytes: int = 0,
        waiting_bytes: int = WAITING_BYTES,
        clock: Clock = time,
    ) -> None:
        """prefetch_bytes: of chunks that are read ahead of requests. waiting_bytes: of what is to be written."""
        super().__init__(near)
        self._near, self._far, self._write = near, far, write
        self.tells_ids = near.tells_ids or far.tells_ids
        self.blobs = _Blobs(self, near, far)
        self._fetcher = Fetcher(far, prefetch_bytes, clock)
        self._backlog = Backlog(waiting_bytes)
        self._arriving: dict[ChunkKey, ChunkRecord] = {}  # fetched, and not copied here yet
        self._deletions: dict[ChunkKey, int] = {}  # chunk -> the number of its last one
        self._n_deletions = 0
        self._carried: set[tuple[str, bytes]] = set()  # where tables are known to be
        self._counts: Counter[str] = Counter()
        self._told: set[str] = set()
        self._lock = threading.Lock()

    # Reading

    @contextmanager
    def reading(self) -> Iterator[Reads]:
        with ExitStack() as stack:
            try:
                near: Reads | None = stack.enter_context(self._store.reading())
            except StoreError as error:
                self._warn("the machine's own KV store cannot be read", error)
                near = None
            snapshot = LayeredSnapshot(self, near, self._n_deletions)
            try:
                yield snapshot
            finally:
                self._copy_here(snapshot)

    # For its snapshots (layered_snapshot.Source)

    def arriving(self, key: ChunkKey) -> ChunkRecord | None:
        return self._arriving.get(key)

    def fetch(
        self, keys: Sequence[ChunkKey], meanwhile: Meanwhile | None, saved: TimeSaved | None
    ) -> dict[ChunkKey, Fetched]:
        return self._fetcher.take(keys, meanwhile, saved)

    def view(self, record: ChunkRecord) -> ChunkView:
        return RecordView(record, self.blobs.get)

    def count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    # Reading ahead, and what is there

    def prefetch(self, keys: Iterable[ChunkKey], saved: TimeSaved | None = None) -> None:
        far = [key for key in keys if key not in self._arriving]
        with suppress(StoreError):
            there = self._near.contains(far)
            far = [key for key in far if key not in there]
        self._fetcher.start(far, saved)

    @property
    def far(self) -> bool:
        return True

    @property
    def compares_cost(self) -> bool:
        return self._far.compares_cost

    def sample(self, keys: Sequence[ChunkKey], n_bytes: int) -> Sample | None:
        """Of a remote store that cannot give a part of a chunk, a whole one."""
        if self._fetcher.resting:
            return None
        return self._far.sample(keys, n_bytes) if self._far.far else _whole(self._far, keys)

    def present(self, keys: Iterable[ChunkKey], remote: bool = True) -> set[ChunkKey]:
        asked = list(keys)
        found = self._near_present(asked)
        if remote and len(found) < len(asked) and not self._fetcher.resting:
            with self.or_rest():
                found |= self._far.present([key for key in asked if key not in found])
        return found

    def _near_present(self, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
        with self.or_warn("the machine's own KV store cannot be read"):
            return self._near.present(keys)
        return set()

    def describe(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkInfo]:
        """Of the own store first."""
        asked, found = list(keys), dict[ChunkKey, ChunkInfo]()
        with self.or_warn("the machine's own KV store cannot be read"):
            found = self._store.describe(asked)
        if len(found) < len(asked) and not self._fetcher.resting:
            with self.or_rest():
                there = self._far.describe(key for key in asked if key not in found)
                found |= {key: replace(known, tier=REMOTE) for key, known in there.items()}
        return found

    def ids(self, keys: Iterable[ChunkKey]) -> Iterator[tuple[ChunkKey, TokenIds]]:
        """Of the own store first."""
        left = dict.fromkeys(keys)
        with self.or_warn("the machine's own KV store cannot be read"):
            for key, ids in self._near.ids(list(left)):
                del left[key]
                yield key, ids
        if left and self._far.tells_ids:
            with self._or_failed():
                yield from self._far.ids(left)

    def donor_keys(self, namespace: str) -> Iterator[ChunkKey]:
        here: set[ChunkKey] = set()
        with self.or_warn("the machine's own KV store cannot be read"):
            here.update(self._near.keys(namespace))
        yield from here
        if self._far.tells_ids:
            with self._or_failed():
                yield from (key for key in self._far.keys(namespace) if key not in here)

    def contains(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """In a store that this process writes to."""
        return self.present(keys, remote=not self._far.read_only)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Of the own store, and of the remote one for what it lacks."""
        with self._near.snapshot() as near:
            yield _Records(near, self._far)

    # Writing

    def put(self, key: ChunkKey, record: ChunkRecord, pin: bool = False) -> bool:
        """In both stores, as far as they take it. Raises StoreError where neither does for the reason of an error."""
        trouble: list[StoreError] = []
        try:
            here = self._store.put(key, record, pin)
        except StoreError as error:
            here = False
            trouble.append(error)
        there = self._put_far(key, record, pin)
        if trouble and not there:
            raise trouble[0]
        if trouble:
            self._warn("the machine's own KV store did not take a chunk", trouble[0])
        return here or there

    def admits(self, key: ChunkKey, n_bytes: int) -> bool:
        admitted = False
        with self.or_warn("the machine's own KV store cannot be read"):
            admitted = self._near.admits(key, n_bytes)
        if not admitted and not self._far.read_only and not self._fetcher.resting:
            with self.or_rest():
                admitted = self._far.admits(key, n_bytes)
        return admitted

    def lease(self, keys: Sequence[ChunkKey], seconds: float) -> set[ChunkKey]:
        """Of the remote store."""
        if not self._far.read_only and not self._fetcher.resting:
            try:
                return self._far.lease(keys, seconds)
            except StoreError as error:
                self._fetcher.failed(error)
        return set(keys)

    def release(self, keys: Iterable[ChunkKey]) -> None:
        """Those of chunks that are on their way are given back when they are there."""
        for key in keys:
            release = partial(self._far.release, [key])
            if not (self._backlog.has(key) and self._backlog.add(key, 0, release)):
                release()

    def pin(self, keys: Iterable[ChunkKey], pinned: bool = True) -> int:
        """In both stores -> how many of them one has. Unpinned here alone: others may want them in the remote store."""
        asked, there = list(keys), 0
        here = self._near.pin(asked, pinned)
        if pinned and asked and not self._far.read_only and not self._fetcher.resting:
            with self.or_rest():
                there = self._far.pin(asked)
        return max(here, there)

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        """From both stores, and all that is on its way. Raises StoreUnavailable, saying which could not be reached."""
        n, unreached = 0, dict[str, StoreError]()
        stores = {LOCAL: self._near} | ({} if self._far.read_only else {REMOTE: self._far})
        for key in keys:
            self._forget(key)
            there = 0
            for name, store in stores.items():
                try:
                    there |= store.delete([key])
                except StoreError as error:
                    unreached[name] = error
            self._forget(key)  # also what a request read in the meantime
            n += there
        if unreached:
            which = " and ".join(f"the {name} store ({error})" for name, error in unreached.items())
            raise StoreUnavailable(
                f"chunks could not be deleted from {which}, and are gone elsewhere on this machine: delete them again "
                "when that can be reached"
            )
        return n

    def _forget(self, key: ChunkKey) -> None:
        """Drop every copy that is not in a store; snapshots that are open now make no new one."""
        with self._lock:
            self._n_deletions += 1
            self._deletions[key] = self._n_deletions
            self._arriving.pop(key, None)
        self._backlog.forget(key)
        self._fetcher.forget(key)

    def forget_blob(self, hash: bytes) -> None:
        """It is to be brought along again where it is needed."""
        self._carried = {known for known in self._carried if known[1] != hash}

    # The whole

    def stats(self, namespace: str | None = None) -> StoreStats:
        """Of the own store; what it lacks counts as missing, and once more in what the remote store had of that."""
        stats = self._store.stats(namespace)
        return stats if namespace is not None else replace(stats, remote=self._remote_stats())

    def flush(self) -> None:
        """Wait until all is written that is on its way."""
        self._backlog.flush()

    def close(self) -> None:
        self._fetcher.close()
        if self._backlog.bytes:
            log.info("%d bytes of chunks are still to be written", self._backlog.bytes)
        self._backlog.close()
        self._store.close()
        self._far.close()

    def _remote_stats(self) -> RemoteStats:
        with self._lock:
            counts = Counter(self._counts)
        return RemoteStats(
            hits=counts["hits"],
            misses=counts["misses"],
            failures=self._fetcher.failures,
            written=counts["written"],
            dropped=counts["dropped"],
            waiting_bytes=self._backlog.bytes,
        )

    def _put_far(self, key: ChunkKey, record: ChunkRecord, pin: bool) -> bool:
        """Whether it is there, or on its way."""
        if self._far.read_only:
            return False
        if self._write == "through":
            return self._write_far(key, record, pin)
        # What is computed to be kept waits for room; what a request left behind does not hold up the next one.
        queued = self._backlog.add(key, record.n_bytes, partial(self._write_far, key, record, pin), wait=pin)
        if not queued:
            self.count("dropped")
            self._warn("chunks are not written to the remote KV store", "too many wait for it already")
        return queued

    def _write_far(self, key: ChunkKey, record: ChunkRecord, pin: bool) -> bool:
        stored = False
        with self.or_rest():
            self.carry(record.coding.tables, self._near, self._far, REMOTE)
            stored = self._far.put(key, record, pin)
        if stored:
            self._fetcher.forget(key)  # it may have been missing when it was read ahead
            self.count("written")
        return stored

    def _copy_here(self, snapshot: LayeredSnapshot) -> None:
        """What a snapshot had to fetch, unless it was deleted meanwhile."""
        for key, record in snapshot.fetched.items():
            with self._lock:
                if self._deletions.get(key, 0) > snapshot.deletions or key in self._arriving:
                    continue
                self._arriving[key] = record
            if not self._backlog.add(key, record.n_bytes, partial(self._put_here, key, record)):
                self._arriving.pop(key, None)

    def _put_here(self, key: ChunkKey, record: ChunkRecord) -> None:
        try:
            with self.or_warn("the machine's own KV store did not take a chunk"):
                self.carry(record.coding.tables, self._far, self._near, LOCAL)
                self._near.put(key, record)
        finally:
            self._arriving.pop(key, None)

    def carry(self, hash: bytes, source: KVStore, target: KVStore, name: str) -> None:
        """Bring along the tables that a chunk needs. Raises StoreError."""
        if hash == NO_TABLES or (name, hash) in self._carried:
            return
        there = raw = None
        with suppress(CorruptBlob):  # brought anew
            there = target.blobs.get(hash)
        with suppress(CorruptBlob):
            raw = None if there else source.blobs.get(hash)
        if raw:
            info = next((info for info in source.blobs.list() if info.hash == hash), None)
            if info:
                target.blobs.put(info.kind, info.owner, raw, current=False)
        self._carried.add((name, hash))

    @contextmanager
    def or_rest(self) -> Iterator[None]:
        """What the remote store fails at is left out, and it is left alone for a moment."""
        try:
            yield
        except StoreError as error:
            self._fetcher.failed(error)
            if not isinstance(error, StoreLeftAlone):  # that was said when it was
                self._warn("the remote KV store failed", error)

    @contextmanager
    def _or_failed(self) -> Iterator[None]:
        """What the remote store fails at is raised, and it is left alone for a moment. Raises StoreUnavailable."""
        if self._fetcher.resting:
            raise StoreLeftAlone("the remote KV store has just failed, and is left alone for a moment")
        try:
            yield
        except StoreError as error:
            self._fetcher.failed(error)
            raise

    @contextmanager
    def or_warn(self, what: str) -> Iterator[None]:
        """What the own store fails at is left out."""
        try:
            yield
        except StoreError as error:
            self._warn(what, error)

    def _warn(self, what: str, why: object) -> None:
        """Once for each reason."""
        if (message := f"{what}: {why}") not in self._told:
            self._told.add(message)
            log.warning("%s", message)


def _whole(store: KVStore, keys: Sequence[ChunkKey]) -> Sample | None:
    """The first of these that is there. Raises StoreError."""
    for key in keys:
        start = time.perf_counter()
        if record := read_record(store, key):
            return Sample(0.0, time.perf_counter() - start, 1.0, record.n_tokens)
    return None


class _Records:
    """The own store's snapshot, and the remote store for what it lacks."""

    def __init__(self, near: Snapshot, far: KVStore) -> None:
        self._near, self._far = near, far

    def get(self, key: ChunkKey, count: bool = True) -> ChunkRecord | None:
        return self._near.get(key, count) or read_record(self._far, key)


class _Blobs(BlobStore):
    """Those of both stores; what is read of the remote one's is copied."""

    def __init__(self, store: LayeredStore, near: KVStore, far: KVStore) -> None:
        self._store, self._near, self._far = store, near, far

    def put(self, kind: str, owner: str, raw: bytes, current: bool = True) -> bytes:
        if not self._far.read_only:
            with self._store.or_rest():
                self._far.blobs.put(kind, owner, raw, current)
        return self._near.blobs.put(kind, owner, raw, current)

    def get(self, hash: bytes) -> bytes | None:
        with self._store.or_warn("the machine's own KV store cannot be read"), suppress(CorruptBlob):
            if raw := self._near.blobs.get(hash):
                return raw
        with self._store.or_rest():
            if raw := self._far.blobs.get(hash):
                self._store.carry(hash, self._far, self._near, LOCAL)
                return raw
        return None

    def list(self) -> Sequence[BlobInfo]:
        infos: dict[bytes, BlobInfo] = {}
        with self._store.or_warn("the machine's own KV store cannot be read"):
            infos = {info.hash: info for info in self._near.blobs.list()}
        with self._store.or_rest():
            infos |= {info.hash: info for info in self._far.blobs.list()}
        return [infos[hash] for hash in sorted(infos)]

    def delete(self, hash: bytes) -> bool:
        self._store.forget_blob(hash)
        here = self._near.blobs.delete(hash)
        return (not self._far.read_only and self._far.blobs.delete(hash)) or here
