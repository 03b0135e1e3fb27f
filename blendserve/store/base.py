"""The store's contract: chunk KV in, whole or not at all; zero-copy views out, checked as they are read.

A view is valid only inside `with store.reading() as snapshot`: its tensors may point into the store's own
memory. Threads may share a snapshot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch

from blendserve.config import PlaceConfig
from blendserve.core import ChunkKV, TokenIds
from blendserve.errors import StoreError, StoreFull
from blendserve.registry import CODECS
from blendserve.store.codecs.base import ChunkShape, Codec, Undecodable
from blendserve.store.key import ChunkKey
from blendserve.store.policies import Policies
from blendserve.store.record import Coded
from blendserve.store.tables import TablesInfo, newest

ID_BATCH = 256  # headers of chunks in a round trip: some 300 KB
LOCAL, REMOTE = "local", "remote"  # tiers: this machine's own store, and one that others use, too

AnyStore = TypeVar("AnyStore", bound="KVStore")


class ChunkView(Protocol):
    """One stored chunk."""

    @property
    def n_layers(self) -> int: ...

    @property
    def n_tokens(self) -> int: ...

    @property
    def n_bytes(self) -> int:
        """Bytes of all layers, as stored."""
        ...

    @property
    def raw_bytes(self) -> int:
        """Bytes of keys and values over all layers, as `layer` gives them."""
        ...

    @property
    def version(self) -> Hashable:
        """What no other record under this key has, unless it holds the same bytes."""
        ...

    def layer(self, l: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Layer l's keys before RoPE and values, [K, C, D] each, read-only by convention.

        Raises CorruptRecord when the bytes fail their checksum, IndexError when there is no layer l, ChunkLost when it
        is of a chunk that is still coming (Coming.begin), and does not come.
        """
        ...


class Coming(Protocol):
    """Chunks on their way from another machine, the first that were expected in front: who waits may decode what is here,
    compute the last, and begin when only the last layers are missing."""

    def wait(self, seconds: float) -> bool:
        """Until another one is here, at most so long -> whether any is still to come."""
        ...

    def decode(self) -> bool:
        """A layer of one that is here, before it is asked for; False where there is nothing to decode."""
        ...

    def withdraw(self, seconds: Mapping[ChunkKey, float]) -> ChunkKey | None:
        """The last of these, which take so many seconds to compute, if that is expected to be done before all others are
        here; it does not come any more, and `get` does not find it. None where its transfer has begun, or takes less.
        """
        ...

    def begin(self) -> bool:
        """Whether of every chunk that is still to come the header is here: then `get` gives such chunks, too, and whoever
        asks for a layer waits for it. False for good where one was left behind."""
        ...

    @property
    def waited(self) -> float:
        """Seconds in which somebody waited for them."""
        ...


@dataclass(frozen=True, slots=True)
class TimeSaved:
    """Seconds that stored KV saves one request: what fetching a chunk must not exceed."""

    per_token: float
    by_chunk: Mapping[ChunkKey, float] = field(default_factory=dict)  # of chunks that save another time

    def of(self, key: ChunkKey, n_tokens: int) -> float:
        """For this chunk of `n_tokens` tokens."""
        return self.by_chunk.get(key, self.per_token * n_tokens)


Meanwhile = Callable[
    [Coming], None
]  # what who waits for chunks does, in their own thread, until there is nothing to do


class Snapshot(Protocol):
    """A view of the store, in which a chunk never changes. On this machine it is of the moment when it was opened.

    On a shared server each chunk is as it was at some moment since: which is the same, as chunks do not change but for
    repairs.
    """

    @property
    def undecodable(self) -> Mapping[ChunkKey, Undecodable]:
        """Of the chunks that `get` was asked for: those that count as missing though they may be there, and why."""
        ...

    def expect(
        self, keys: Sequence[ChunkKey], meanwhile: Meanwhile | None = None, saved: TimeSaved | None = None
    ) -> None:
        """`get` will be asked for these: read them in one go where that is cheaper.

        saved: lets a store that compares (`compares_cost`) leave chunks that are quicker to compute. It holds for the
        snapshot, until the next `saved`; without it every chunk is fetched.

        A hint: it raises nothing, and `get` gives the same with it and without, but for what `meanwhile` withdraws.
        That is called where they come from afar, at the latest within the first `get` of one that does.
        """
        ...

    def tier(self, key: ChunkKey) -> str:
        """Where a chunk that `get` gave is read from."""
        ...

    def get(self, key: ChunkKey) -> ChunkView | None:
        """The chunk, or None when it is not there, or cannot be decoded here: why not is logged, and counted in `stats`.

        Raises CorruptRecord when its header is damaged, StoreVersion when a newer blendserve stored it.
        """
        ...


MissKind = Literal["absent", "corrupt", "unreachable", "slow link", "codec", "level", "tables"]


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a chunk cannot be used. detail: for people; empty for one that is absent."""

    kind: MissKind
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """What is known of a stored chunk without reading it."""

    n_tokens: int
    n_bytes: int  # as stored
    raw_bytes: int  # that its keys and values take uncoded
    pinned: bool
    tier: str  # where it would be read from


@dataclass(frozen=True, slots=True)
class TierStats:
    """One of the tiers in front of a store (tiers.py), since it was opened."""

    name: str
    chunks: int
    bytes: int
    cap_bytes: int
    hits: int  # look-ups of chunks that it had whole


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """What this process had from a store that it shares with other machines, and what it gave it (layered.py)."""

    hits: int  # chunks
    misses: int  # chunks that it did not have, or could not give
    failures: int  # times that it could not be reached, read or written
    written: int  # chunks
    dropped: int  # chunks that were not written, as too much waited to be
    waiting_bytes: int  # that are still to be written, there or here


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What `store stats` prints: of the whole store, or of one namespace as its tenant may see it.

    A tenant is told of their own chunks and look-ups alone. Evictions and refusals are not among them: they come from
    what all tenants together do to the store. Nor are tables.
    """

    kind: str
    path: str
    chunks: int
    tokens: int
    bytes: int  # of all chunks, as stored: what the cap is compared with
    raw_bytes: int  # that their keys and values take uncoded
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
    """What `store verify` prints: every chunk, and all tables of codecs, read and checked."""

    good: int
    bad: tuple[tuple[str, str], ...]  # (key in hex, what is wrong)
    bad_tables: tuple[tuple[str, str], ...] = ()  # (hash in hex, what is wrong)

    def to_dict(self) -> dict[str, Any]:
        return {
            "good": self.good,
            "bad": [{"key": k, "problem": p} for k, p in self.bad],
            "bad_tables": [{"hash": h, "problem": p} for h, p in self.bad_tables],
        }


@dataclass(frozen=True, slots=True)
class Sample:
    """How far another machine's chunks are, as a small part of one of them told."""

    round_trip: float  # seconds of a question with a short answer
    seconds: float  # of the part, its own round trip included
    part: float  # of the chunk's bytes
    tokens: int  # of the chunk

    @property
    def seconds_per_token(self) -> float:
        """Beside the round trip."""
        return max(0.0, self.seconds - self.round_trip) / self.part / self.tokens


class Lease:
    """The right to compute a chunk, until it is released or its time is over. This one costs nobody anything."""

    stored = False  # whether `leases` found the chunk to be there, looking behind the lease

    def release(self) -> None:
        """Let others have it; idempotent. Raises nothing: what cannot be given back ends by itself."""

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class KVStore(ABC):
    """A set of chunk KV caches by key. Safe to share between threads."""

    writable = True  # False: what is put is not stored, what is deleted stays, and nobody is told
    tells_ids = False  # whether `ids` tells anything

    @abstractmethod
    def reading(self) -> AbstractContextManager[Snapshot]:
        """Open a snapshot; the views it hands out die with it. Raises StoreUnavailable."""

    @abstractmethod
    def put(self, key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        """Store a chunk in one transaction; replaces what was there.

        At the cap others are evicted in the same transaction. Without `pin` that happens only if the store's
        admission policy thinks this chunk the better one: False means that it does not, and nothing has changed.
        With `pin` the chunk is always admitted and never evicted; a pinned chunk stays pinned when it is put again.
        Raises StoreFull, StoreUnavailable.
        """

    @abstractmethod
    def write_by(self, codec: Codec) -> None:
        """Code what is put from now on in this way. What is there is read by its own codec."""

    @abstractmethod
    def coded(self, key: ChunkKey) -> Coded | None:
        """A copy of a chunk as it is coded, every segment checked, whether it can be decoded here or not.

        None when it is not there. Raises CorruptRecord, StoreVersion. Counts as no use of it.
        """

    @abstractmethod
    def put_coded(self, key: ChunkKey, coded: Coded, pin: bool = False) -> bool:
        """`put` of what `coded` gave, here or elsewhere. The tables that it needs are the caller's to bring along."""

    def put_uncoded(self, key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        """`put`, and uncoded whatever else is written: for KV that all of a prompt looks at, such as its prefix."""
        codec: Codec = CODECS.load(CODECS.default).with_tables(0)
        return self.put_coded(key, Coded(ChunkShape.of(kv), codec.coding, codec.encode(kv), kv.ids), pin)

    @abstractmethod
    def put_tables(self, codec: str, fingerprint: str, raw: bytes, current: bool = True) -> bytes:
        """Keep the tables of a codec for the reader `fingerprint` -> their hash.

        current: what is written is to use them; else they are for reading, unless there are no others.
        Raises StoreFull, StoreUnavailable.
        """

    @abstractmethod
    def tables(self, hash: bytes) -> bytes | None:
        """Tables by their hash, None where they are not here. Raises codecs.base.Undecodable when they are damaged."""

    @abstractmethod
    def all_tables(self) -> list[TablesInfo]:
        """What tables there are, by their hashes."""

    @abstractmethod
    def delete_tables(self, hash: bytes) -> bool:
        """Remove tables; chunks that need them are misses then. False when they were not there."""

    def current_tables(self, codec: str, fingerprint: str) -> bytes | None:
        """The hash of the tables that a codec writes with for this reader, None where there are none."""
        return newest(self.all_tables(), codec, fingerprint)

    @abstractmethod
    def wants(self, key: ChunkKey, raw_bytes: int) -> bool:
        """Whether an unpinned put of KV that takes `raw_bytes` uncoded would be stored now: ask before computing it.

        Raises StoreUnavailable.
        """

    def lease(self, key: ChunkKey, seconds: float) -> Lease | None:
        """The right to compute this chunk, for at most so many seconds; None while another process has it.

        Granted where the store has no way to ask the others, or cannot reach them: then a chunk may be computed twice.
        """
        return Lease()

    def leases(self, keys: Sequence[ChunkKey], seconds: float) -> dict[ChunkKey, Lease]:
        """`lease` of each, without those that other processes have; each says whether its chunk is there by now.

        In one round trip where there is any. Raises StoreError where that cannot be seen; then nothing is leased.
        """
        granted: dict[ChunkKey, Lease] = {}
        try:
            for key in keys:
                if lease := self.lease(key, seconds):
                    granted[key] = lease
                    lease.stored = key in self
        except StoreError:
            for lease in granted.values():
                lease.release()
            raise
        return granted

    @abstractmethod
    def pin(self, keys: Iterable[ChunkKey]) -> int:
        """Keep these chunks from being evicted, in one transaction -> how many of them are there."""

    @abstractmethod
    def unpin(self, keys: Iterable[ChunkKey]) -> int:
        """Undo `pin`."""

    @abstractmethod
    def __contains__(self, key: ChunkKey) -> bool:
        """Whether the chunk has a header. Counts as no use of it."""

    def present(self, keys: Iterable[ChunkKey], remote: bool = True) -> set[ChunkKey]:
        """Those of the chunks that are there. remote: ask other machines, too, which takes a while."""
        return {key for key in keys if key in self}

    @abstractmethod
    def info(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkInfo]:
        """What is known of those of the chunks that are there. Counts as no use of them. Raises StoreUnavailable."""

    def hot(self) -> frozenset[ChunkKey]:
        """Chunks that lie in the process's memory or on its device, as of now; none where the kind keeps none there."""
        return frozenset()

    def ids(self, keys: Iterable[ChunkKey]) -> Iterator[tuple[ChunkKey, TokenIds]]:
        """Those of the chunks whose records tell their token ids, with them; damaged ones are left out.

        Counts as no use of them. Of another machine's, ID_BATCH are told in a round trip. Raises StoreUnavailable when
        some cannot be asked for, after those that can.
        """
        return iter(())

    def donor_keys(self, namespace: str) -> Iterator[ChunkKey]:
        """`keys` of a namespace and, of a store with another machine's behind it, what that tells ids of, too.

        Raises StoreUnavailable when some cannot be had, after those that can.
        """
        return self.keys(namespace)

    def prefetch(self, keys: Iterable[ChunkKey], saved: TimeSaved | None = None) -> None:
        """Start to fetch the remote chunks of a queued prompt. A hint; it waits for nothing.

        saved: as for `Snapshot.expect`.
        """
        return

    @property
    def far(self) -> bool:
        """Whether chunks may lie on another machine."""
        return False

    def sample(self, keys: Sequence[ChunkKey], n_bytes: int) -> Sample | None:
        """Fetch about so many bytes of the first of these that another machine has; None where none can be had.

        Counts as no use of it.
        """
        return None

    @property
    def compares_cost(self) -> bool:
        """Whether it leaves chunks that take longer to fetch than they save a request, where `expect` says what."""
        return False

    @abstractmethod
    def delete(self, key: ChunkKey) -> bool:
        """Remove a chunk, pinned or not; False when it was not there."""

    @abstractmethod
    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        """The keys of one namespace, or of all, in order."""

    @abstractmethod
    def stats(self, namespace: str | None = None) -> StoreStats:
        """Of one namespace, or of all."""

    @abstractmethod
    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read and check every chunk. `progress(done, total)` is called after each."""

    @abstractmethod
    def close(self) -> None:
        """Release files and maps; idempotent."""

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


def stats_of(
    kind: str,
    path: str,
    cap_bytes: int,
    chunks: Sequence[tuple[int, int, int, bool]],
    counts: Mapping[str, int],
    namespace: str | None,
    all_tables: Sequence[TablesInfo],
) -> StoreStats:
    """Statistics from (tokens, stored bytes, raw bytes, pinned) of each chunk, the counters of traffic.py, and tables."""
    whole = namespace is None
    return StoreStats(
        kind=kind,
        path=path,
        chunks=len(chunks),
        tokens=sum(tokens for tokens, *_ in chunks),
        bytes=sum(n_bytes for _, n_bytes, _, _ in chunks),
        raw_bytes=sum(raw_bytes for _, _, raw_bytes, _ in chunks),
        cap_bytes=cap_bytes,
        pins=sum(pinned for *_, pinned in chunks),
        hits=counts.get("hits", 0),
        misses=counts.get("misses", 0),
        undecodable=counts.get("undecodable", 0),
        corrupt=counts.get("corrupt", 0),
        evictions=counts.get("evictions", 0) if whole else None,
        admissions_refused=counts.get("refused", 0) if whole else None,
        tables=len(all_tables) if whole else None,
        tables_bytes=sum(info.n_bytes for info in all_tables) if whole else None,
    )


def full(store: str, stored: int, more: int, cap_bytes: int) -> StoreFull:
    """The error of a chunk that does not fit under the cap."""
    return StoreFull(
        f"{store} is at its cap: {stored:,} bytes and {more:,} more exceed {cap_bytes:,}, and what is there may not be "
        "evicted. Raise store.cap_gb, or unpin or delete chunks",
        setting="store.cap_gb",
    )
