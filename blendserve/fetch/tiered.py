"""A machine's own store in front of a remote one: what one machine has computed, all can use.

    put     -> local store, then in the background the remote store
    delete  -> local store, remote store, and all that waits to be written

This is the writing side; prompts read through the fetcher. A store that fails is left out, and a remote one is not asked
for a moment. A deletion reaches both stores, or says which one it did not reach.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from blendserve.errors import CorruptBlob, StoreCircuitOpen, StoreError, StoreUnavailable
from blendserve.fetch.source import RemoteSource, StoreSource
from blendserve.fetch.write_queue import WriteQueue
from blendserve.store import ChunkKey, ChunkRecord, KVStore, Snapshot, StoreStats, VerifyReport, read_record
from blendserve.store.base import LOCAL, REMOTE, ChunkInfo, Progress, RemoteStats
from blendserve.store.blobs import BlobInfo, BlobReader, BlobStore
from blendserve.store.bounded import Breaker
from blendserve.store.clock import TimeSource
from blendserve.store.codecs.base import NO_TABLES
from blendserve.store.last_messages import LastMessages

T = TypeVar("T")
REST_S = 1.0  # after a failure of the remote store

log = logging.getLogger(__name__)


class TieredStore(KVStore):
    """The local store and a remote one. It closes both."""

    def __init__(
        self,
        local: KVStore,
        remote: KVStore | RemoteSource,
        waiting_bytes: int | None = None,
        clock: TimeSource = time,
    ) -> None:
        """remote: a source alone is not written to. waiting_bytes: limit of what waits to be written."""
        self.local = local
        self.kind = local.kind
        self.location = local.location
        self.read_only = local.read_only
        self.cap_bytes = local.cap_bytes
        self._breaker = Breaker("the remote KV store", REST_S, REST_S, clock.monotonic)
        self.remote: KVStore | None = None
        if isinstance(remote, KVStore):
            self.source: RemoteSource = StoreSource(remote, self._breaker, clock)
            self.remote = None if remote.read_only else remote
        else:
            self.source = remote
        self._opened = remote
        self.blobs: TieredBlobs = TieredBlobs(self)
        self.queue = WriteQueue(waiting_bytes)
        self._counts = dict.fromkeys(("hits", "misses", "failures", "written", "dropped"), 0)
        self._warned = LastMessages()
        self._lock = threading.Lock()

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Open a snapshot of the local store, and of the remote one for chunks that it lacks."""
        with self.local.snapshot() as local:
            yield TieredSnapshot(local, self.remote)

    # Writing

    def put(self, key: ChunkKey, record: ChunkRecord, pin: bool = False) -> bool:
        """Store a chunk in each store that admits it. Raises StoreError if neither does, and one fails."""
        trouble: StoreError | None = None
        is_here = False
        try:
            is_here = self.local.put(key, record, pin)
        except StoreError as error:
            trouble = error
        is_there = self._put_remote(key, record, pin)
        if trouble and not is_there:
            raise trouble
        if trouble:
            self._warn("the local KV store did not store a chunk", trouble)
        return is_here or is_there

    def put_local(self, key: ChunkKey, record: ChunkRecord) -> None:
        """Store a fetched chunk here, after the tables that it needs. Raises nothing."""

        def put() -> None:
            self.blobs.copy(record.coding.tables, self.source.blobs, self.local.blobs)
            self.local.put(key, record)

        self.ask(self.local, put, None)

    def admits(self, key: ChunkKey, n_bytes: int) -> bool:
        return any(self.ask(store, partial(store.admits, key, n_bytes), False) for store in stores_of(self))

    def lease(self, keys: Sequence[ChunkKey], seconds: float) -> set[ChunkKey]:
        """Lease from the remote store; from the local one if the remote one is only read."""
        if self.remote is None:
            return self.local.lease(keys, seconds)
        return self.ask(self.remote, partial(self.remote.lease, keys, seconds), set(keys))

    def release(self, keys: Iterable[ChunkKey]) -> None:
        """Release leases, except of chunks that wait to be written: their leases end with that."""
        if written := [key for key in keys if not self.queue.has(key)]:
            (self.remote or self.local).release(written)

    def pin(self, keys: Iterable[ChunkKey], pinned: bool = True) -> int:
        """Pin in both stores -> how many one of them has. Unpin here alone: other machines may use the remote ones."""
        asked = list(keys)
        here = self.local.pin(asked, pinned)
        if not (self.remote and pinned and asked):
            return here
        return max(here, self.ask(self.remote, partial(self.remote.pin, asked), 0))

    def delete(self, keys: Iterable[ChunkKey], wait: bool = True) -> int:
        """Delete from both stores and the queue. Raises StoreUnavailable, saying which one could not be reached."""
        asked = list(keys)
        found: set[ChunkKey] = set()
        unreached: dict[str, StoreError] = {}
        for key in asked:
            self.queue.forget(key)
        for name, store in zip((LOCAL, REMOTE), stores_of(self), strict=False):
            try:
                found |= store.contains(asked)
                store.delete(asked, wait)
            except StoreError as error:
                unreached[name] = error
        if unreached:
            which = " and ".join(f"the {name} store ({error})" for name, error in unreached.items())
            raise StoreUnavailable(
                f"chunks could not be deleted from {which}, and are gone elsewhere on this machine: delete them again "
                "when that can be reached"
            )
        return len(found)

    # Looking

    def contains(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Return the chunks in a store that this process writes to."""
        asked = list(keys)
        found: set[ChunkKey] = set()
        for store in stores_of(self):
            if left := [key for key in asked if key not in found]:
                found |= self.ask(store, partial(store.contains, left), set[ChunkKey]())
        return found

    def describe(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkInfo]:
        """Describe chunks by the local store first."""
        asked = list(keys)
        found: dict[ChunkKey, ChunkInfo] = {}
        for store in stores_of(self):
            if left := [key for key in asked if key not in found]:
                infos = self.ask(store, partial(store.describe, left), dict[ChunkKey, ChunkInfo]())
                if store is not self.local:
                    infos = {key: replace(info, tier=REMOTE) for key, info in infos.items()}
                found |= infos
        return found

    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        """The keys of the local store."""
        return self.local.keys(namespace)

    def stats(self, namespace: str | None = None) -> StoreStats:
        """The statistics of the local store, and this process's use of the remote one."""
        stats = self.local.stats(namespace)
        waiting = self.queue.bytes
        if namespace is not None:
            return stats
        with self._lock:
            return replace(stats, remote=RemoteStats(**self._counts, waiting_bytes=waiting))

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Verify the local store."""
        return self.local.verify(progress)

    def flush(self) -> None:
        """Wait until the queue is written."""
        self.queue.flush()

    def close(self) -> None:
        """Write the queue first."""
        if n_bytes := self.queue.bytes:
            log.info("%d bytes of chunks are not written yet", n_bytes)
        self.queue.close()
        for opened in (self.local, self.source, self._opened):
            opened.close()

    # Inside

    def _put_remote(self, key: ChunkKey, record: ChunkRecord, pin: bool) -> bool:
        """Queue a chunk for the remote store -> whether it was queued."""
        if not self.remote:
            return False
        # Precomputed chunks wait for room; those of a request do not hold up the next one.
        write = partial(self._write_remote, self.remote, key, record, pin)
        queued = self.queue.add(key, record.n_bytes, write, wait=pin)
        if not queued:
            self.count("dropped")
            self._warn("chunks are not written to the remote KV store", "too many wait for it already")
        return queued

    def _write_remote(self, remote: KVStore, key: ChunkKey, record: ChunkRecord, pin: bool) -> bool:
        stored = False
        try:
            self.blobs.copy(record.coding.tables, self.local.blobs, remote.blobs)
            stored = remote.put(key, record, pin)
        except StoreError as error:
            self._failed(error)
            if isinstance(error, StoreUnavailable):
                self._breaker.failure(f"failed ({error})")
                return False  # the lease expires
        if not stored:
            remote.release([key])
        self.count("written", stored)
        return stored

    def ask(self, store: KVStore | RemoteSource, call: Callable[[], T], default: T) -> T:
        """Return the result of a call to this store, or the default if it fails. A failed remote store then rests."""
        try:
            with self._breaker.call() if store is self.remote else nullcontext():
                return call()
        except StoreCircuitOpen:
            pass  # its breaker has logged it
        except StoreError as error:
            if store is self.remote:
                self._failed(error)
            else:
                self._warn(f"the {LOCAL if store is self.local else REMOTE} KV store failed", error)
        return default

    def _failed(self, error: StoreError) -> None:
        self.count("failures")
        if not isinstance(error, StoreUnavailable):  # the breaker logs those
            self._warn("the remote KV store failed", error)

    def count(self, what: str, n: int = 1) -> None:
        """Add to a field of RemoteStats."""
        with self._lock:
            self._counts[what] += n

    def _warn(self, what: str, why: object) -> None:
        """Log a warning, unless the same one was logged last."""
        if self._warned.is_new(message := f"{what}: {why}"):
            log.warning("%s", message)


def stores_of(store: KVStore) -> list[KVStore]:
    """The stores that a store consists of, the local one first."""
    if isinstance(store, TieredStore):
        return [store.local, *([store.remote] if store.remote else [])]
    return [store]


class TieredSnapshot:
    """The local store's snapshot, and the remote store for chunks that it lacks."""

    def __init__(self, local: Snapshot, remote: KVStore | None) -> None:
        self._local = local
        self._remote = remote

    def get(self, key: ChunkKey, count: bool = True) -> ChunkRecord | None:
        return self._local.get(key, count) or (read_record(self._remote, key) if self._remote else None)


class TieredBlobs(BlobStore):
    """The blobs of both stores; a blob that is read from the remote one is copied to the local one."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._copied: set[tuple[BlobStore, bytes]] = set()  # where a blob is known to be

    def put(self, kind: str, owner: str, raw: bytes, current: bool = True) -> bytes:
        if remote := self._store.remote:
            self._store.ask(self._store.source, partial(remote.blobs.put, kind, owner, raw, current), b"")
        return self._store.local.blobs.put(kind, owner, raw, current)

    def get(self, hash: bytes, seconds: float | None = None) -> bytes | None:
        store = self._store
        if raw := store.ask(store.local, partial(store.local.blobs.get, hash), None):
            return raw
        if raw := store.ask(store.source, partial(store.source.blobs.get, hash, seconds), None):
            store.ask(store.local, partial(self.copy, hash, store.source.blobs, store.local.blobs), None)
        return raw

    def list(self) -> Sequence[BlobInfo]:
        store = self._store
        infos: dict[bytes, BlobInfo] = {}
        nothing: Sequence[BlobInfo] = ()
        for each in (store.local, store.source):
            infos |= {info.hash: info for info in store.ask(each, each.blobs.list, nothing)}
        return [infos[hash] for hash in sorted(infos)]

    def delete(self, hash: bytes) -> bool:
        store = self._store
        self._copied = {known for known in self._copied if known[1] != hash}
        here = store.local.blobs.delete(hash)
        return (store.remote is not None and store.remote.blobs.delete(hash)) or here

    def copy(self, hash: bytes, source: BlobReader, target: BlobStore) -> None:
        """Copy the tables that a chunk needs, unless the target has them. Raises StoreError."""
        if hash == NO_TABLES or (target, hash) in self._copied:
            return
        there = raw = None
        with suppress(CorruptBlob):  # copied anew
            there = target.get(hash)
        with suppress(CorruptBlob):
            raw = None if there else source.get(hash)
        info = next((info for info in source.list() if info.hash == hash), None) if raw else None
        if raw and info:
            target.put(info.kind, info.owner, raw, current=False)
        self._copied.add((target, hash))
