"""A machine's own store before one that it shares with others: what one has computed, all can use.

    look-up -> tiers, own store -> remote store          a chunk found there is copied here, in the background
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

from blendserve.core import ChunkKV, TokenIds
from blendserve.errors import StoreError, StoreLeftAlone, StoreUnavailable
from blendserve.store.backlog import Backlog
from blendserve.store.base import (
    LOCAL,
    REMOTE,
    ChunkInfo,
    ChunkView,
    KVStore,
    Lease,
    Meanwhile,
    RemoteStats,
    Sample,
    Snapshot,
    StoreStats,
    TimeSaved,
)
from blendserve.store.chunk import StoredChunk
from blendserve.store.clock import Clock
from blendserve.store.codecs.base import NO_TABLES, ChunkShape, Codec, Undecodable
from blendserve.store.codecs.raw import Raw
from blendserve.store.fetching import Fetched, Fetcher
from blendserve.store.key import ChunkKey
from blendserve.store.layered_snapshot import LayeredSnapshot
from blendserve.store.record import Coded, seal, validate_kv
from blendserve.store.tables import TablesInfo
from blendserve.store.tiers import HeldChunk, Tier, TieredStore, TieredView, places_of
from blendserve.store.wrapped import WrappedStore

log = logging.getLogger(__name__)

Write = Literal["back", "through"]
WAITING_BYTES = 1 << 30  # of chunks that are to be written, there or here


class LayeredStore(WrappedStore):
    """The own store, behind its tiers, and a remote one. It closes both."""

    def __init__(
        self,
        near: KVStore,
        far: KVStore,
        tiers: Sequence[Tier] = (),
        write: Write = "back",
        prefetch_bytes: int = 0,
        waiting_bytes: int = WAITING_BYTES,
        clock: Clock = time,
    ) -> None:
        """prefetch_bytes: of chunks that are read ahead of requests. waiting_bytes: of what is to be written."""
        super().__init__(TieredStore(near, tiers))
        self._near, self._far, self._tiers, self._write = near, far, tuple(tiers), write
        self.tells_ids = near.tells_ids or far.tells_ids
        self._codec: Codec = Raw()
        self._fetcher = Fetcher(far, prefetch_bytes, clock)
        self._backlog = Backlog(waiting_bytes)
        self._arriving: dict[ChunkKey, Coded] = {}  # fetched, and not copied here yet
        self._deletions: dict[ChunkKey, int] = {}  # chunk -> the number of its last one
        self._n_deletions = 0
        self._carried: set[tuple[str, bytes]] = set()  # where tables are known to be
        self._counts: Counter[str] = Counter()
        self._told: set[str] = set()
        self._lock = threading.Lock()

    # Reading

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        with ExitStack() as stack:
            try:
                near: Snapshot | None = stack.enter_context(self._store.reading())
            except StoreError as error:
                self._warn("the machine's own KV store cannot be read", error)
                near = None
            snapshot = LayeredSnapshot(self, near, self._n_deletions)
            try:
                yield snapshot
            finally:
                self._copy_here(snapshot)

    # For its snapshots (layered_snapshot.Source)

    def held(self, key: ChunkKey) -> tuple[str, ChunkView] | None:
        for tier in self._tiers:
            if entry := tier.held(key):
                return tier.name, HeldChunk(entry)
        return None

    def arriving(self, key: ChunkKey) -> Coded | None:
        return self._arriving.get(key)

    def drop_deleted(self, key: ChunkKey, deletions: int) -> None:
        if self._deletions.get(key, 0) > deletions:
            for tier in self._tiers:
                tier.drop(key)

    def fetch(
        self, keys: Sequence[ChunkKey], meanwhile: Meanwhile | None, saved: TimeSaved | None
    ) -> dict[ChunkKey, Fetched]:
        return self._fetcher.take(keys, meanwhile, saved)

    def view(self, key: ChunkKey, coded: Coded) -> ChunkView:
        chunk = StoredChunk(key, seal(key, coded), coded.segments.__getitem__, self.tables)
        return TieredView(key, chunk, places_of(key, chunk, self._tiers))

    def count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    # Reading ahead, and what is there

    def prefetch(self, keys: Iterable[ChunkKey], saved: TimeSaved | None = None) -> None:
        far = [
            key for key in keys if key not in self._arriving and not any(key in tier for tier in self._tiers)
        ]
        with suppress(StoreError):
            far = [key for key in far if key not in self._near]
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
            with self._or_rest():
                found |= self._far.present([key for key in asked if key not in found])
        return found

    def _near_present(self, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
        with self._or_warn("the machine's own KV store cannot be read"):
            return self._near.present(keys)
        return set()

    def info(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkInfo]:
        """Of the own store first."""
        asked, found = list(keys), dict[ChunkKey, ChunkInfo]()
        with self._or_warn("the machine's own KV store cannot be read"):
            found = self._store.info(asked)
        if len(found) < len(asked) and not self._fetcher.resting:
            with self._or_rest():
                there = self._far.info(key for key in asked if key not in found)
                found |= {key: replace(known, tier=REMOTE) for key, known in there.items()}
        return found

    def ids(self, keys: Iterable[ChunkKey]) -> Iterator[tuple[ChunkKey, TokenIds]]:
        """Of the own store first."""
        left = dict.fromkeys(keys)
        with self._or_warn("the machine's own KV store cannot be read"):
            for key, ids in self._near.ids(list(left)):
                del left[key]
                yield key, ids
        if left and self._far.tells_ids:
            with self._or_failed():
                yield from self._far.ids(left)

    def donor_keys(self, namespace: str) -> Iterator[ChunkKey]:
        here: set[ChunkKey] = set()
        with self._or_warn("the machine's own KV store cannot be read"):
            here.update(self._near.keys(namespace))
        yield from here
        if self._far.tells_ids:
            with self._or_failed():
                yield from (key for key in self._far.keys(namespace) if key not in here)

    def __contains__(self, key: ChunkKey) -> bool:
        return bool(self.present([key]))

    def coded(self, key: ChunkKey) -> Coded | None:
        return self._near.coded(key) or self._far.coded(key)

    # Writing

    def write_by(self, codec: Codec) -> None:
        self._codec = codec
        for store in (self._near, self._far):
            store.write_by(codec)

    def put(self, key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        validate_kv(kv)
        coded = Coded(ChunkShape.of(kv), self._codec.coding, self._codec.encode(kv), kv.ids)
        return self.put_coded(key, coded, pin)

    def put_coded(self, key: ChunkKey, coded: Coded, pin: bool = False) -> bool:
        """In both stores, as far as they take it. Raises StoreError where neither does for the reason of an error."""
        trouble: list[StoreError] = []
        try:
            here = self._store.put_coded(key, coded, pin)
        except StoreError as error:
            here = False
            trouble.append(error)
        there = self._put_far(key, coded, pin)
        if trouble and not there:
            raise trouble[0]
        if trouble:
            self._warn("the machine's own KV store did not take a chunk", trouble[0])
        return here or there

    def put_uncoded(self, key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        validate_kv(kv)
        return self.put_coded(key, Coded(ChunkShape.of(kv), Raw.coding, Raw().encode(kv), kv.ids), pin)

    def wants(self, key: ChunkKey, raw_bytes: int) -> bool:
        wanted = False
        with self._or_warn("the machine's own KV store cannot be read"):
            wanted = self._near.wants(key, raw_bytes)
        if not wanted and self._far.writable and not self._fetcher.resting:
            with self._or_rest():
                wanted = self._far.wants(key, raw_bytes)
        return wanted

    def lease(self, key: ChunkKey, seconds: float) -> Lease | None:
        return self.leases([key], seconds).get(key)

    def leases(self, keys: Sequence[ChunkKey], seconds: float) -> dict[ChunkKey, Lease]:
        """Of the remote store. They are given back when the chunks are there, if they are on their way."""
        granted = {key: Lease() for key in keys}
        if self._far.writable and not self._fetcher.resting:
            try:
                granted = self._far.leases(keys, seconds)
            except StoreError as error:
                self._fetcher.failed(error)
        near = self._near_present(list(granted))
        return {
            key: _LeaseUntilWritten(lease, key, self._backlog, lease.stored or key in near)
            for key, lease in granted.items()
        }

    def pin(self, keys: Iterable[ChunkKey]) -> int:
        """In both stores -> how many of them one has."""
        asked, there = list(keys), 0
        here = self._near.pin(asked)
        if asked and self._far.writable and not self._fetcher.resting:
            with self._or_rest():
                there = self._far.pin(asked)
        return max(here, there)

    def unpin(self, keys: Iterable[ChunkKey]) -> int:
        """Here: who else pinned them in the remote store is not known."""
        return self._near.unpin(keys)

    def delete(self, key: ChunkKey) -> bool:
        """From both stores, and all that is on its way. Raises StoreUnavailable, saying which could not be reached."""
        self._forget(key)
        there, unreached = False, []
        for name, store in ((LOCAL, self._near), (REMOTE, self._far)):
            if not store.writable:
                continue
            try:
                there |= store.delete(key)
            except StoreError as error:
                unreached.append(f"the {name} store ({error})")
        self._forget(key)  # also what a request read in the meantime
        if unreached:
            raise StoreUnavailable(
                f"chunk {key.hex()} could not be deleted from {' and '.join(unreached)}, and is gone elsewhere on this "
                "machine: delete it again when that can be reached"
            )
        return there

    def _forget(self, key: ChunkKey) -> None:
        """Drop every copy that is not in a store; snapshots that are open now make no new one."""
        with self._lock:
            self._n_deletions += 1
            self._deletions[key] = self._n_deletions
            self._arriving.pop(key, None)
        self._backlog.forget(key)
        self._fetcher.forget(key)
        for tier in self._tiers:
            tier.drop(key)

    # Tables

    def put_tables(self, codec: str, fingerprint: str, raw: bytes, current: bool = True) -> bytes:
        if self._far.writable:
            with self._or_rest():
                self._far.put_tables(codec, fingerprint, raw, current)
        return self._near.put_tables(codec, fingerprint, raw, current)

    def tables(self, hash: bytes) -> bytes | None:
        """Those of the remote store are copied here."""
        with self._or_warn("the machine's own KV store cannot be read"), suppress(Undecodable):
            if raw := self._near.tables(hash):
                return raw
        with self._or_rest():
            if raw := self._far.tables(hash):
                self._carry(hash, self._far, self._near, LOCAL)
                return raw
        return None

    def all_tables(self) -> list[TablesInfo]:
        infos: dict[bytes, TablesInfo] = {}
        with self._or_warn("the machine's own KV store cannot be read"):
            infos = {info.hash: info for info in self._near.all_tables()}
        with self._or_rest():
            infos |= {info.hash: info for info in self._far.all_tables()}
        return [infos[hash] for hash in sorted(infos)]

    def delete_tables(self, hash: bytes) -> bool:
        self._carried = {known for known in self._carried if known[1] != hash}
        here = self._near.delete_tables(hash)
        return (self._far.writable and self._far.delete_tables(hash)) or here

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

    def _put_far(self, key: ChunkKey, coded: Coded, pin: bool) -> bool:
        """Whether it is there, or on its way."""
        if not self._far.writable:
            return False
        if self._write == "through":
            return self._write_far(key, coded, pin)
        n_bytes = sum(map(len, coded.segments))
        # What is computed to be kept waits for room; what a request left behind does not hold up the next one.
        queued = self._backlog.add(key, n_bytes, partial(self._write_far, key, coded, pin), wait=pin)
        if not queued:
            self.count("dropped")
            self._warn("chunks are not written to the remote KV store", "too many wait for it already")
        return queued

    def _write_far(self, key: ChunkKey, coded: Coded, pin: bool) -> bool:
        stored = False
        with self._or_rest():
            self._carry(coded.coding.tables, self._near, self._far, REMOTE)
            stored = self._far.put_coded(key, coded, pin)
        if stored:
            self._fetcher.forget(key)  # it may have been missing when it was read ahead
            self.count("written")
        return stored

    def _copy_here(self, snapshot: LayeredSnapshot) -> None:
        """What a snapshot had to fetch, unless it was deleted meanwhile."""
        for key, coded in snapshot.fetched.items():
            with self._lock:
                if self._deletions.get(key, 0) > snapshot.deletions or key in self._arriving:
                    continue
                self._arriving[key] = coded
            n_bytes = sum(map(len, coded.segments))
            if not self._backlog.add(key, n_bytes, partial(self._put_here, key, coded)):
                self._arriving.pop(key, None)

    def _put_here(self, key: ChunkKey, coded: Coded) -> None:
        try:
            with self._or_warn("the machine's own KV store did not take a chunk"):
                self._carry(coded.coding.tables, self._far, self._near, LOCAL)
                self._near.put_coded(key, coded)  # past the tiers: what they have is this very record
        finally:
            self._arriving.pop(key, None)

    def _carry(self, hash: bytes, source: KVStore, target: KVStore, name: str) -> None:
        """Bring along the tables that a chunk needs. Raises StoreError."""
        if hash == NO_TABLES or (name, hash) in self._carried:
            return
        there = raw = None
        with suppress(Undecodable):  # damaged: brought anew
            there = target.tables(hash)
        with suppress(Undecodable):
            raw = None if there else source.tables(hash)
        if raw:
            info = next((info for info in source.all_tables() if info.hash == hash), None)
            if info:
                target.put_tables(info.codec, info.fingerprint, raw, current=False)
        self._carried.add((name, hash))

    @contextmanager
    def _or_rest(self) -> Iterator[None]:
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
    def _or_warn(self, what: str) -> Iterator[None]:
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
        if coded := store.coded(key):
            return Sample(0.0, time.perf_counter() - start, 1.0, coded.shape.n_tokens)
    return None


class _LeaseUntilWritten(Lease):
    """A remote store's lease on a chunk that may still be on its way there."""

    def __init__(self, lease: Lease, key: ChunkKey, backlog: Backlog, stored: bool) -> None:
        self._lease, self._key, self._backlog, self.stored = lease, key, backlog, stored

    def release(self) -> None:
        if not (self._backlog.has(self._key) and self._backlog.add(self._key, 0, self._lease.release)):
            self._lease.release()
