"""The contract of a store: puts are atomic, snapshots are consistent.

Callers encode and decode (view.py). A record from a snapshot may alias the store's memory, so it is valid only inside
`with store.snapshot() as snapshot`. Threads may share a snapshot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from blendserve.config import StoreBackendConfig
from blendserve.core import TokenIds
from blendserve.errors import CorruptRecord, StoreError, StoreFull, StoreVersion, unraised
from blendserve.store.blobs import BlobStore
from blendserve.store.codecs.base import Coding
from blendserve.store.codecs.base import Miss as Miss
from blendserve.store.codecs.base import Progress as Progress
from blendserve.store.key import ChunkKey
from blendserve.store.ledger import Totals
from blendserve.store.record import ChunkRecord, Header

AnyStore = TypeVar("AnyStore", bound="KVStore")
LOCAL, REMOTE = "local", "remote"  # places: this machine's own store, and one on another machine


class Snapshot(Protocol):
    """A view of the store in which a chunk never changes: as of the opening, or on a server as of a moment since."""

    def get(self, key: ChunkKey, count: bool = True) -> ChunkRecord | None:
        """None for an absent chunk. A segment is checked when it is read. count: as a use.

        Raises CorruptRecord for a damaged header, StoreVersion for another format, StoreUnavailable.
        """


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """A stored chunk's metadata."""

    n_tokens: int
    n_bytes: int  # as stored
    raw_bytes: int  # of its keys and values, decoded
    pinned: bool
    coding: Coding | None = None  # None if the store does not know it
    token_ids: TokenIds = ()  # [C], or none if the store does not know them
    tier: str = LOCAL  # where it would be read from

    @classmethod
    def of(cls, header: Header, pinned: bool, tier: str = LOCAL) -> ChunkInfo:
        shape = header.shape
        return cls(
            shape.n_tokens, header.n_bytes, shape.n_bytes, pinned, header.coding, header.token_ids, tier
        )


@dataclass(frozen=True, slots=True)
class TierStats:
    """One of the caches in front of a store (fetch/copies.py), since its opening."""

    name: str
    chunks: int
    bytes: int
    cap_bytes: int
    hits: int  # look-ups of complete copies


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """This process's reads from and writes to a store that is shared with other machines."""

    hits: int  # chunks
    misses: int  # chunks that were absent or could not be read
    failures: int  # failed calls
    written: int  # chunks
    dropped: int  # chunks that were not written, as the write queue was full
    waiting_bytes: int  # in the write queues


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What `store stats` prints: of the whole store, or of one namespace as its tenant may see it.

    A tenant sees only its own chunks and look-ups. Evictions and refusals depend on other tenants, and tables belong to
    all.
    """

    kind: str
    path: str
    chunks: int
    tokens: int
    bytes: int  # of all chunks, as stored: the cap limits these
    raw_bytes: int  # of their keys and values, decoded
    cap_bytes: int
    pins: int  # chunks that are never evicted
    pinned_bytes: int
    hits: int  # look-ups since the store was made
    misses: int
    undecodable: int  # of the misses, stored chunks whose codec or tables are missing
    corrupt: int  # damaged records that look-ups found
    evictions: int | None
    admissions_refused: int | None
    tables: int | None  # of codecs, which all tenants share; the cap does not limit them
    tables_bytes: int | None
    tiers: tuple[TierStats, ...] = ()
    remote: RemoteStats | None = None

    def to_dict(self) -> dict[str, Any]:
        """Flat: the fields of a tier, and of the remote store, begin with its name."""
        found = asdict(self)
        parts = {tier.pop("name"): tier for tier in found.pop("tiers")}
        parts["remote"] = found.pop("remote") or {}
        return found | {f"{part}_{name}": x for part, fields in parts.items() for name, x in fields.items()}


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `store verify` prints."""

    good: int  # chunks
    bad: tuple[tuple[str, str], ...]  # (key in hex, what is wrong)
    bad_tables: tuple[tuple[str, str], ...] = ()  # (hash in hex, what is wrong) of damaged blobs

    def to_dict(self) -> dict[str, Any]:
        return {
            "good": self.good,
            "bad": [{"key": k, "problem": p} for k, p in self.bad],
            "bad_tables": [{"hash": h, "problem": p} for h, p in self.bad_tables],
        }


class ReadTime(NamedTuple):
    """How long reading a part of a chunk took."""

    round_trip_s: float  # of a question with a short answer; 0 where there is none
    seconds: float  # of the part, its own round trip included
    n_bytes: int  # of the part
    header: Header | None = None  # of the chunk, if it was read


class KVStore(ABC):
    """Chunk records by key, under a byte cap. Threads and processes may share one. Raises StoreErrors only."""

    kind: str
    location: str  # a folder or a URL, "" for memory
    read_only: bool
    cap_bytes: int
    blobs: BlobStore
    persistent: bool = True  # chunks outlive the process
    # Of a store that other machines use, too: fetch/source.py reads it.
    is_remote: bool = False  # the chunks are on another machine
    name: str = "the remote KV store"  # in messages
    deadline_s: float = inf  # that a request waits in all
    in_flight_bytes: int = 1 << 62  # of chunks in transfer at a time

    @abstractmethod
    def snapshot(self) -> AbstractContextManager[Snapshot]:
        """A consistent read view. Raises StoreUnavailable."""

    @abstractmethod
    def put(self, key: ChunkKey, record: ChunkRecord, pin: bool = False) -> bool:
        """Store a chunk atomically, replacing the one under the key, and end the lease on it.

        At the cap unpinned chunks are evicted. False: the admission policy prefers those, and nothing has changed. A
        pinned chunk is always admitted and never evicted; put again, it stays pinned. The caller stores the codec's
        tables. Raises StoreFull, CorruptRecord.
        """

    @abstractmethod
    def delete(self, keys: Iterable[ChunkKey], wait: bool = True) -> int:
        """Remove chunks, pinned or not -> number of removed ones.

        wait: for another process that writes; False: a request waits. Raises StoreUnavailable.
        """

    @abstractmethod
    def pin(self, keys: Iterable[ChunkKey], pinned: bool = True) -> int:
        """Protect chunks from eviction, or no longer -> number of stored ones."""

    @abstractmethod
    def contains(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """The stored ones, in one transaction or round trip. Counts as no use, like `describe` and `keys`."""

    @abstractmethod
    def describe(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkInfo]:
        """Sizes, coding, token ids and pins of the stored ones; damaged ones are left out."""

    @abstractmethod
    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        """The keys of one namespace, or of all, in order."""

    @abstractmethod
    def admits(self, key: ChunkKey, n_bytes: int) -> bool:
        """Whether an unpinned put of `n_bytes` would be stored now: ask before computing the chunk.

        Raises StoreUnavailable where nothing can be stored at all.
        """

    @abstractmethod
    def lease(self, keys: Sequence[ChunkKey], seconds: float) -> set[ChunkKey]:
        """Claim chunks for computing -> the granted ones. A lease ends with the put, its release, or after `seconds`.

        A stored chunk may be granted: look it up after leasing. All are granted if the store cannot be reached: computing
        a chunk twice is better than not at all.
        """

    @abstractmethod
    def release(self, keys: Iterable[ChunkKey]) -> None:
        """End this process's leases. Raises nothing: a lease that cannot be ended expires."""

    @abstractmethod
    def stats(self, namespace: str | None = None) -> StoreStats:
        """Return the statistics of one namespace, or of all."""

    @abstractmethod
    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Read and check every chunk and every blob."""

    @abstractmethod
    def close(self) -> None:
        """Release files, maps and connections; idempotent."""

    def read(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, ChunkRecord | StoreError]:
        """Records of the stored ones in memory of their own, checked, or why one cannot be read. Counts as uses.

        Raises StoreUnavailable.
        """
        found: dict[ChunkKey, ChunkRecord | StoreError] = {}
        with self.snapshot() as snapshot:
            for key in keys:
                try:
                    if record := snapshot.get(key):
                        found[key] = record.copy()
                except (CorruptRecord, StoreVersion) as error:
                    found[key] = unraised(error)
        return found

    def time_read(self, keys: Sequence[ChunkKey], n_bytes: int, now: Callable[[], float]) -> ReadTime | None:
        """Time reading about so many bytes of the first chunk that is stored; by default a whole one. now: seconds."""
        for key in keys:
            began = now()
            if isinstance(record := self.read([key]).get(key), ChunkRecord):
                return ReadTime(0.0, now() - began, record.n_bytes, record.header)
        return None

    def interrupt(self, late: bool) -> str:
        """Make every call fail at once, from any thread, where the store can -> why, if late."""
        return f"{self.name} does not answer"

    def __enter__(self: AnyStore) -> AnyStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_stats(self, totals: Totals, counts: Counter[str], namespace: str | None) -> StoreStats:
        """Statistics from the sums over chunks and the counters of ledger.py."""
        infos = self.blobs.list() if namespace is None else ()
        is_whole = namespace is None
        return StoreStats(
            kind=self.kind,
            path=self.location,
            chunks=totals.chunks,
            tokens=totals.tokens,
            bytes=totals.n_bytes,
            raw_bytes=totals.raw_bytes,
            cap_bytes=self.cap_bytes,
            pins=totals.pins,
            pinned_bytes=totals.pinned_bytes,
            hits=counts["hits"],
            misses=counts["misses"],
            undecodable=counts["undecodable"],
            corrupt=counts["corrupt"],
            evictions=counts["evictions"] if is_whole else None,
            admissions_refused=counts["refused"] if is_whole else None,
            tables=len(infos) if is_whole else None,
            tables_bytes=sum(info.n_bytes for info in infos) if is_whole else None,
        )

    def _check_all(
        self, keys: Iterable[ChunkKey], problem: Callable[[ChunkKey], str], progress: Progress | None
    ) -> VerifyReport:
        """problem: what is wrong with a chunk, "" for a whole one; may raise StoreError."""
        todo = sorted(keys)
        bad = list[tuple[str, str]]()
        for done, key in enumerate(todo, start=1):
            try:
                what = problem(key)
            except StoreError as error:
                what = str(error)
            if what:
                bad.append((key.hex(), what))
            if progress:
                progress(done, len(todo))
        return VerifyReport(len(todo) - len(bad), tuple(bad), self.blobs.problems())


class StoreKind(Protocol):
    """A store's class, as `registry.STORES` needs it."""

    persistent: bool  # chunks outlive the process
    needs_folder: bool  # it writes files

    def from_config(self, config: StoreBackendConfig, path: Path | None, read_only: bool) -> Any:
        """A classmethod: open the store -> a KVStore, or a RemoteSource (fetch/source.py) for a kind that is only read.

        path: folder of its files; never None for a kind that needs one. Raises StoreUnavailable, StoreVersion.
        """


def read_record(store: KVStore, key: ChunkKey) -> ChunkRecord | None:
    """A chunk's record in memory of its own, every segment checked. Counts as no use of it.

    Raises CorruptRecord, StoreVersion, StoreUnavailable.
    """
    with store.snapshot() as snapshot:
        record = snapshot.get(key, count=False)
        return record and record.copy()


def store_full(store: str, stored: int, more: int, cap_bytes: int) -> StoreFull:
    """The error of a chunk that does not fit under the cap."""
    return StoreFull(
        f"{store} is at its cap: {stored:,} bytes and {more:,} more exceed {cap_bytes:,}, and the stored chunks may not "
        "be evicted. Raise store.cap_gb, or unpin or delete chunks",
        setting="store.cap_gb",
    )
