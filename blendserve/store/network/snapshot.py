"""Reading chunks from a server, within a request's deadline: what does not come in time counts as missing.

    expect   keys -> batches, each a round trip on a connection of its own, all at once
    get      waits for the batch that the chunk is in, or gives a view whose layers wait (arrival.py)

Who waits may withdraw the last ones meanwhile, to compute them instead, and begin before all of it is here (base.Coming).

All the waiting of one snapshot together takes no longer than the deadline. A chunk's whole record is fetched and checked
at once, so a view is bytes of this process and needs the server no more. Once somebody has begun, views of what is still
coming are given, too: the first of them that a layer fails to come of ends that, and `get` waits for whole ones again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from blendserve.errors import ChunkLost, CorruptRecord, StoreError, unraised
from blendserve.store.clock import Clock
from blendserve.store.codecs.base import SLOW, Buffer, Undecodable
from blendserve.store.key import ChunkKey
from blendserve.store.network.arrival import Arrival
from blendserve.store.network.connection import Call, Client, Connection
from blendserve.store.network.deadline import Deadline
from blendserve.store.network.failed import Failed
from blendserve.store.record import ChunkRecord, Header
from blendserve.store.request_reads import REMOTE, Meanwhile, TimeSaved
from blendserve.store.usage import UsageLog
from blendserve.store.view import RecordView

GUESS_BYTES = 16 << 20  # of a record, until one was read
WAITING = 0.9  # of the deadline; the rest is for giving up, and for what arrived to be checked


class Source(Protocol):
    """What a server is asked for, in its own words."""

    def expect(self, keys: Sequence[ChunkKey], saved: TimeSaved | None) -> None:
        """These are about to be read. saved: as for request_reads.Reads."""
        ...

    def read(self, client: Client, keys: Sequence[ChunkKey]) -> list[Any]:
        """A reply for each chunk, an empty one where nothing is; one round trip. Raises what its library does."""
        ...

    def in_step(self) -> bool:
        """Whether what is about to be read is better asked for in one call, layer by layer, than a few at a time."""
        ...

    def begun(self) -> None:
        """From now on layers are used as they come."""
        ...

    def arrival(self, key: ChunkKey) -> Arrival | None:
        """A new one, which the next `read` of this chunk tells of its layers; None where chunks come whole."""
        ...

    def outlasts(self, key: ChunkKey, seconds: float) -> bool:
        """Whether what is still to be read, this one included, is expected to take longer.

        Never where a call reads several chunks.
        """
        ...

    def cancel(self, key: ChunkKey) -> None:
        """This one is not read after all."""
        ...

    def checked(self, key: ChunkKey, reply: Any) -> tuple[Header, list[Buffer]]:
        """The record in a reply, all of it checked. Raises CorruptRecord, StoreVersion."""
        ...

    def tables(self, hash: bytes, seconds: float) -> bytes | None:
        """Tables within so many seconds, None where there are none. Raises Undecodable."""
        ...


class Batching(Protocol):
    """How many chunks a round trip may be asked for."""

    @property
    def batch(self) -> int:
        """At a time."""
        ...

    def saw(self, n_bytes: int) -> None:
        """A record had so many bytes."""
        ...


class Sizes:
    """How large records are here: what bounds the bytes under way, as a size is known only after reading."""

    def __init__(self, in_flight_bytes: int, workers: int) -> None:
        self._most, self._largest = in_flight_bytes // workers, 0

    @property
    def batch(self) -> int:
        """Chunks to ask for at a time."""
        return max(1, self._most // (self._largest or GUESS_BYTES))

    def saw(self, n_bytes: int) -> None:
        self._largest = max(self._largest, n_bytes)


class NetworkSnapshot:
    """A view of the server for one request. Threads may share it.

    Each chunk is seen as it was at one moment after the snapshot was opened: chunks never change but for repairs, so
    there is nothing to be gained from seeing all of them at the same moment.
    """

    def __init__(
        self,
        connection: Connection,
        source: Source,
        usage: UsageLog,
        failed: Failed,
        sizes: Batching,
        clock: Clock = time,
    ) -> None:
        """clock: of the deadline."""
        self._connection, self._source, self._usage = connection, source, usage
        self._failed, self._sizes = failed, sizes
        self._deadline = Deadline(WAITING * connection.peer.deadline_s, clock.monotonic)
        self._calls: dict[ChunkKey, tuple[Call[list[Any]], int]] = {}  # and the chunk's place in its batch
        self._arrivals: dict[ChunkKey, Arrival] = {}
        self._coming: set[ChunkKey] = set()  # that are given while they come
        self._behind = False  # one of those did not come as it had begun to
        self._troubles: dict[ChunkKey, str] = {}
        self._withdrawn: set[ChunkKey] = set()
        self._decoded: set[ChunkKey] = (
            set()
        )  # of those that are here, the ones that there is nothing to decode of
        self._found: dict[ChunkKey, RecordView | StoreError | None] = {}  # what `get` has given
        self._lock = threading.RLock()
        self.undecodable: dict[ChunkKey, Undecodable] = {}

    def expect(
        self, keys: Sequence[ChunkKey], meanwhile: Meanwhile | None = None, saved: TimeSaved | None = None
    ) -> None:
        with self._lock:
            known = {*self._calls, *self._troubles, *self._withdrawn}
            todo = [key for key in dict.fromkeys(keys) if key not in known]
            for key in todo:
                if why := self._failed.why(key):
                    self._troubles[key] = why
            todo = [key for key in todo if key not in self._troubles]
            self._source.expect(todo, saved)
            in_step = meanwhile is not None and len(todo) > 1 and self._source.in_step()
            size = len(todo) if in_step else self._sizes.batch
            for batch in (todo[at : at + size] for at in range(0, len(todo), size)):
                self._begin(batch)
        if meanwhile:
            meanwhile(self)

    def wait(self, seconds: float) -> bool:
        with self._lock:
            late = self._late()
        left: list[futures.Future[Any]] = [self._calls[key][0].future for key in late]
        begins = [a.begun for key in late if (a := self._arrivals.get(key)) and not a.begun.done()]
        with self._deadline.waiting():
            futures.wait([*left, *begins], min(seconds, self._deadline.left), futures.FIRST_COMPLETED)
        return self._deadline.left > 0 and not all(future.done() for future in left)

    def decode(self) -> bool:
        for key, (call, _) in list(self._calls.items()):
            if call.future.done() and key not in self._decoded:
                with suppress(StoreError):  # said when it is asked for
                    chunk = self.get(key)
                    if chunk and chunk.decode_ahead():
                        return True
                self._decoded.add(key)
        return False

    def withdraw(self, seconds: Mapping[ChunkKey, float]) -> ChunkKey | None:
        with self._lock:
            key = next((key for key in reversed(self._calls) if key in seconds), None)
            if key is None or not self._source.outlasts(key, seconds[key]):
                return None
            if not self._connection.withdraw(self._calls[key][0]):
                return None  # nor can those be that were expected before it
            del self._calls[key]
            self._withdrawn.add(key)
            self._source.cancel(key)
            return key

    def begin(self) -> bool:
        with self._lock:
            late = self._late()
            arrivals = [self._arrivals.get(key) for key in late]
            if self._behind or not all(arrival and arrival.begun.done() for arrival in arrivals):
                return False
            self._coming.update(late)
            self._source.begun()
            return True

    @property
    def waited(self) -> float:
        return self._deadline.waited

    def tier(self, key: ChunkKey) -> str:
        return REMOTE

    def get(self, key: ChunkKey) -> RecordView | None:
        with self._lock:
            if key not in self._found:
                try:
                    self._found[key] = self._looked_up(key)
                except StoreError as error:
                    self._found[key] = unraised(error)
            found = self._found[key]
        if isinstance(found, StoreError):
            raise unraised(found)
        return found

    def _looked_up(self, key: ChunkKey) -> RecordView | None:
        """Raises CorruptRecord, StoreVersion."""
        self.expect([key])
        if key in self._withdrawn:
            return None
        if key in self._coming and (header := (arrival := self._arrivals[key]).header):
            with suppress(Undecodable):  # said when it is here
                return self._view(key, header, partial(self._layer, key, arrival, header))
        self._coming.discard(key)
        reply = self._reply(key)
        if reply is None:
            self.undecodable[key] = Undecodable(self._troubles[key], "unreachable")
            self._usage.miss(key)
            return None
        if not reply:
            self._usage.miss(key)
            return None
        try:
            chunk = self._chunk(key, reply)
        except Undecodable as error:
            if error.kind == SLOW:
                self._usage.miss(key)
            else:
                self._usage.hit(key)
                self._usage.undecodable(key, str(error))
            self.undecodable[key] = unraised(error)
            return None
        self._usage.hit(key)
        return chunk

    def end(self) -> None:
        """What was expected and not asked for is given up."""
        with self._lock:
            self._end_arrivals()
            for key in self._coming & self._found.keys():
                if self._arrivals[key].whole:
                    self._usage.hit(key)
            for call, _ in self._calls.values():
                self._connection.give_up(call)
            for held in (self._found, self._calls, self._arrivals, self._coming):  # views refer back to this
                held.clear()

    def _late(self) -> list[ChunkKey]:
        """Of what was expected, what is not here whole."""
        return [key for key, (call, _) in self._calls.items() if not call.future.done()]

    def _begin(self, batch: list[ChunkKey]) -> None:
        arrivals = {key: arrival for key in batch if (arrival := self._source.arrival(key))}
        try:
            call = self._connection.begin(partial(self._source.read, keys=batch), True)
        except StoreError as error:
            self._troubles.update(dict.fromkeys(batch, str(error)))
        else:
            self._calls.update({key: (call, place) for place, key in enumerate(batch)})
            for key, arrival in arrivals.items():
                self._arrivals[key] = arrival
                call.future.add_done_callback(lambda _, arrival=arrival: arrival.end())  # type: ignore[misc]

    def _reply(self, key: ChunkKey) -> Any:
        """What the server has of a chunk, empty for nothing; None where that is not known: `_troubles` says why."""
        if key in self._troubles:
            return None
        call, place = self._calls[key]
        try:
            with self._deadline.waiting():
                return self._connection.wait(call, self._deadline.left)[place]
        except StoreError as error:
            batch = [other for other, (of, _) in self._calls.items() if of is call]
            self._troubles.update(dict.fromkeys(batch, str(error)))
            return None

    def _chunk(self, key: ChunkKey, reply: Any) -> RecordView:
        """Raises CorruptRecord, StoreVersion, Undecodable."""
        try:
            header, segments = self._source.checked(key, reply)
        except CorruptRecord as error:
            self._usage.count(key, "corrupt")
            self._failed.add(key, f"it was damaged when it was last read ({error.what})")
            raise
        self._sizes.saw(header.n_bytes)
        return self._view(key, header, segments.__getitem__)

    def _view(self, key: ChunkKey, header: Header, read: Callable[[int], Buffer]) -> RecordView:
        """Raises Undecodable."""
        record = ChunkRecord(key, header, read, partial(self._usage.report, key), trusted=True)
        return RecordView(record, self._read_tables)

    def _layer(self, key: ChunkKey, arrival: Arrival, header: Header, l: int) -> Buffer:
        """Of a chunk that is coming, as soon as it is here. Holds no lock meanwhile. Raises ChunkLost."""
        with self._deadline.waiting():
            segment = arrival.segment(header, l, self._deadline.left)
        if segment is None:
            self._leave()
            raise ChunkLost(key)
        return segment

    def _leave(self) -> None:
        """Nobody reads on: `get` gives what is here whole, and why others are not."""
        with self._lock:
            self._behind = True
            self._end_arrivals()
            for key in self._coming:
                self._found.pop(key, None)
            self._coming.clear()

    def _end_arrivals(self) -> None:
        for key in self._coming:
            self._arrivals[key].end()

    def _read_tables(self, hash: bytes) -> bytes | None:
        with self._deadline.waiting():
            return self._source.tables(hash, self._deadline.left)
