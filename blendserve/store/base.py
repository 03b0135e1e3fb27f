"""The store's contract: chunk records in, whole or not at all; records out of a consistent view.

Callers encode and decode (view.py). A record that a snapshot gave may alias the store's memory, so it is valid only
inside `with store.snapshot() as snapshot`. Threads may share a snapshot.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from blendserve.config import PlaceConfig
from blendserve.core import TokenIds
from blendserve.errors import StoreFull
from blendserve.store.blobs import BlobInfo, BlobStore
from blendserve.store.codecs.base import Coding
from blendserve.store.codecs.base import Miss as Miss
from blendserve.store.key import ChunkKey
from blendserve.store.ledger import Totals
from blendserve.store.policies import Policies
from blendserve.store.record import ChunkRecord, Header
from blendserve.store.request_reads import LOCAL, RequestReads

AnyStore = TypeVar("AnyStore", bound="KVStore")
Progress: TypeAlias = "Callable[[int, int], None]"  # (done, in all)


class Snapshot(Protocol):
    """A view of the store in which a chunk never changes. A local store's is of the moment when it was opened; a server's
    chunks are each as at some moment since.
    """

    def get(self, key: ChunkKey, count: bool = True) -> ChunkRecord | None:
        """None when it is not there. A segment is checked when it is read. count: as a use.

        Raises CorruptRecord for a damaged header, StoreVersion for another format, StoreUnavailable.
        """
        ...


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """What is known of a stored chunk without reading its KV."""

    n_tokens: int
    n_bytes: int  # as stored
    raw_bytes: int  # of its keys and values, decoded
    pinned: bool
    coding: Coding | None = None  # None where the store does not tell
    token_ids: TokenIds = ()  # [C], or none where the store does not tell
    tier: str = LOCAL  # where it would be read from

    @classmethod
    def of(cls, header: Header, pinned: bool) -> ChunkInfo:
        shape = header.shape
        return cls(shape.n_tokens, header.n_bytes, shape.n_bytes, pinned, header.coding, header.token_ids)


@dataclass(frozen=True, slots=True)
class TierStats:
    """One of the caches in front of a store (fetch/copies.py), since it was opened."""

    name: str
    chunks: int
    bytes: int
    cap_bytes: int
    hits: int  # look-ups of chunks that it had whole


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """What this process read from and wrote to a store that it shares with other machines (layered.py)."""

    hits: int  # chunks
    misses: int  # chunks that it did not have, or could not give
    failures: int  # times that it could not be reached, read or written
    written: int  # chunks
    dropped: int  # chunks that were not written, as too much waited to be
    waiting_bytes: int  # that are still to be written, there or here


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What `store stats` prints: of the whole store, or of one namespace as its tenant may see it.

    A tenant sees its own chunks and look-ups alone. Evictions and refusals come from what all tenants do, and tables
    belong to all.
    """

    kind: str
    path: str
    chunks: int
    tokens: int
    bytes: int  # of all chunks, as stored: what the cap is compared with
    raw_bytes: int  # of their keys and values, decoded
    cap_bytes: int
    pins: int  # chunks that are never evicted
    hits: int  # look-ups since the store was made
    misses: int
    undecodable: int  # of the misses, chunks that are there in a codec, or for tables, that are not here
    corrupt: int  # records found damaged by look-ups
    evictions: int | None
    admissions_refused: int | None
    tables: int | None  # of codecs, which all tenants share; beside the cap
    tables_bytes: int | None
    tiers: tuple[TierStats, ...] = ()
    remote: RemoteStats | None = None

    def to_dict(self) -> dict[str, Any]:
        """Flat: the figures of a tier, and of a remote store, begin with its name."""
        figures = asdict(self)
        remote = figures.pop("remote") or {}
        for tier in figures.pop("tiers"):
            name = tier.pop("name")
            figures |= {f"{name}_{what}": figure for what, figure in tier.items()}
        return figures | {f"remote_{what}": figure for what, figure in remote.items()}


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `store verify` prints: every chunk and every blob, read and checked."""

    good: int
    bad: tuple[tuple[str, str], ...]  # (key in hex, what is wrong)
    bad_tables: tuple[tuple[str, str], ...] = ()  # (hash in hex, what is wrong)

    def to_dict(self) -> dict[str, Any]:
        return {
            "good": self.good,
            "bad": [{"key": k, "problem": p} for k, p in self.bad],
            "bad_tables": [{"hash": h, "problem": p} for h, p in self.bad_tables],
        }


class KVStore(RequestReads):
    """Chunk records by key, under a byte cap. Threads and processes may share one. Raises StoreErrors only."""

    kind: str
    location: str  # a folder or a URL, "" for memory
    read_only: bool
    cap_bytes: int
    blobs: BlobStore

    @abstractmethod
    def snapshot(self) -> AbstractContextManager[Snapshot]:
        """A consistent read view. Raises StoreUnavailable."""

    @abstractmethod
    def put(self, key: ChunkKey, record: ChunkRecord, pin: bool = False) -> bool:
        """Store a chunk atomically, in place of what was there, and end this process's lease on it.

        At the cap unpinned chunks are evicted. False: the admission policy prefers those, and nothing has changed. A
        pinned chunk is always admitted and never evicted; put again, it stays pinned. The record's tables are the
        caller's to store. Raises StoreFull, CorruptRecord.
        """

    @abstractmethod
    def delete(self, keys: Iterable[ChunkKey]) -> int:
        """Remove chunks, pinned or not -> how many were there."""

    @abstractmethod
    def pin(self, keys: Iterable[ChunkKey], pinned: bool = True) -> int:
        """Keep these chunks from being evicted, or no longer -> how many are there."""

    @abstractmethod
    def contains(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Those that are there: one transaction or round trip. Counts as no use, like `describe` and `keys`."""

    @abstractmethod
    def describe(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkInfo]:
        """Sizes, coding, token ids, pins of those that are there; damaged ones are left out."""

    @abstractmethod
    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        """The keys of one namespace, or of all, in order."""

    @abstractmethod
    def admits(self, key: ChunkKey, n_bytes: int) -> bool:
        """Whether an unpinned put of so many bytes would be stored now: ask before computing it."""

    @abstractmethod
    def lease(self, keys: Sequence[ChunkKey], seconds: float) -> set[ChunkKey]:
        """Claim chunks for computing -> those granted to this process, until it puts or releases them or time is over.

        A chunk may be granted that is stored: look after leasing. All are granted where the store cannot be asked: a
        chunk computed twice is better than one computed by nobody.
        """

    @abstractmethod
    def release(self, keys: Iterable[ChunkKey]) -> None:
        """Give this process's leases back. Raises nothing: a lease that cannot be given back expires."""

    @abstractmethod
    def stats(self, namespace: str | None = None) -> StoreStats:
        """Of one namespace, or of all."""

    @abstractmethod
    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Read and check every chunk and every blob."""

    @abstractmethod
    def close(self) -> None:
        """Release files, maps and connections; idempotent."""

    def __enter__(self: AnyStore) -> AnyStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StoreKind(Protocol):
    """What a store's class brings for its line in `registry.STORES`."""

    persistent: bool  # what is stored outlives the process
    needs_folder: bool  # it keeps files

    def from_config(
        self, config: PlaceConfig, path: Path | None, read_only: bool, policies: Policies
    ) -> KVStore:
        """A classmethod: open the store. path: where its files are; never None for a kind that needs a folder.

        Raises StoreUnavailable, StoreVersion.
        """
        ...


def read_record(store: KVStore, key: ChunkKey) -> ChunkRecord | None:
    """A chunk's record in memory of its own, every segment checked. Counts as no use of it.

    Raises CorruptRecord, StoreVersion, StoreUnavailable.
    """
    with store.snapshot() as snapshot:
        record = snapshot.get(key, count=False)
        return record and record.copy()


def make_stats(
    store: KVStore,
    totals: Totals,
    counts: Mapping[str, int],
    namespace: str | None,
    blobs: Sequence[BlobInfo],
) -> StoreStats:
    """Statistics from the sums over chunks, the counters of usage.py, and what blobs there are."""
    whole = namespace is None
    return StoreStats(
        kind=store.kind,
        path=store.location,
        chunks=totals.chunks,
        tokens=totals.tokens,
        bytes=totals.n_bytes,
        raw_bytes=totals.raw_bytes,
        cap_bytes=store.cap_bytes,
        pins=totals.pins,
        hits=counts.get("hits", 0),
        misses=counts.get("misses", 0),
        undecodable=counts.get("undecodable", 0),
        corrupt=counts.get("corrupt", 0),
        evictions=counts.get("evictions", 0) if whole else None,
        admissions_refused=counts.get("refused", 0) if whole else None,
        tables=len(blobs) if whole else None,
        tables_bytes=sum(info.n_bytes for info in blobs) if whole else None,
    )


def store_full(store: str, stored: int, more: int, cap_bytes: int) -> StoreFull:
    """The error of a chunk that does not fit under the cap."""
    return StoreFull(
        f"{store} is at its cap: {stored:,} bytes and {more:,} more exceed {cap_bytes:,}, and what is there may not be "
        "evicted. Raise store.cap_gb, or unpin or delete chunks",
        setting="store.cap_gb",
    )
