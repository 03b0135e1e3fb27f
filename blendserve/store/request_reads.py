"""Reading for one request: views in place of records, and hints to the stores that read from other machines.

What a store needs beside the contract until requests read through a fetcher.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from blendserve.core import TokenIds
from blendserve.store.codecs.base import Undecodable
from blendserve.store.key import ChunkKey
from blendserve.store.view import ChunkView, RecordView

if TYPE_CHECKING:
    from blendserve.store.base import KVStore, Snapshot

ID_BATCH = 256  # headers of chunks in a round trip: some 300 KB
LOCAL, REMOTE = "local", "remote"  # tiers: this machine's own store, and one that others use, too


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


class Reads(Protocol):
    """One request's view of the chunks in a store and wherever it reads them from."""

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

        Raises CorruptRecord when its header is damaged, StoreVersion when it has another format.
        """
        ...


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


class RequestReads(ABC):  # noqa: B024
    """What requests ask of any store; as a store on this machine answers it."""

    tells_ids = True  # whether `describe` tells token ids

    @contextmanager
    def reading(self: Any) -> Iterator[Reads]:
        """Open a request's view; the views it hands out die with it. Raises StoreUnavailable."""
        store: KVStore = self
        with store.snapshot() as snapshot:
            yield LocalReads(snapshot, store)

    def hot(self) -> frozenset[ChunkKey]:
        """Chunks that lie in the process's memory or on its device, as of now; none where the kind keeps none there."""
        return frozenset()

    def present(self: Any, keys: Iterable[ChunkKey], remote: bool = True) -> set[ChunkKey]:
        """Those of the chunks that are there. remote: ask other machines, too, which takes a while."""
        found: set[ChunkKey] = self.contains(keys)
        return found

    def ids(self: Any, keys: Iterable[ChunkKey]) -> Iterator[tuple[ChunkKey, TokenIds]]:
        """Those of the chunks whose records tell their token ids, with them; damaged ones are left out.

        Of another machine's, ID_BATCH are told in a round trip. Raises StoreUnavailable when some cannot be asked for,
        after those that can.
        """
        asked = list(keys)
        for some in (asked[at : at + ID_BATCH] for at in range(0, len(asked), ID_BATCH)):
            yield from ((key, info.token_ids) for key, info in self.describe(some).items() if info.token_ids)

    def donor_keys(self: Any, namespace: str) -> Iterator[ChunkKey]:
        """`keys` of a namespace and, of a store with another machine's behind it, what that tells ids of, too.

        Raises StoreUnavailable when some cannot be had, after those that can.
        """
        found: Iterator[ChunkKey] = self.keys(namespace)
        return found

    def prefetch(self, keys: Iterable[ChunkKey], saved: TimeSaved | None = None) -> None:
        """Start to fetch the remote chunks of a queued prompt. A hint; it waits for nothing.

        saved: as for `Reads.expect`.
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


class LocalReads:
    """A request's view of a store whose chunks are all here."""

    def __init__(self, snapshot: Snapshot, store: KVStore) -> None:
        self._snapshot, self._tables = snapshot, store.blobs.get
        self.undecodable: dict[ChunkKey, Undecodable] = {}

    def expect(
        self, keys: Sequence[ChunkKey], meanwhile: Meanwhile | None = None, saved: TimeSaved | None = None
    ) -> None:
        """Nothing to do: it is all here."""

    def tier(self, key: ChunkKey) -> str:
        return LOCAL

    def get(self, key: ChunkKey) -> RecordView | None:
        record = self._snapshot.get(key)
        try:
            return None if record is None else RecordView(record, self._tables)
        except Undecodable as error:
            assert record is not None
            record.report("undecodable", str(error))
            self.undecodable[key] = Undecodable(str(error), error.kind)
            return None
