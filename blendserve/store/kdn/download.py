"""Chunks from the service: layer by layer, each checked as it comes, resumed where the connection was cut.

    header -> is it this chunk's, and as long as the directory says?   then, for every layer
    segment -> its checksum                                            go on, begin again at another level, or compute it

Several chunks come in step over one connection: their headers, then the first layer of all, then the second, ...

What a lying peer costs is bounded: nothing longer than the directory says is read, the first wrong segment ends it, and a
connection that is cut is resumed on a new one, as long as that brings another layer.
"""

from __future__ import annotations

import http.client
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from blendserve.errors import CorruptRecord, StoreVersion, unraised
from blendserve.store import record
from blendserve.store.codecs.base import SLOW, Buffer, Undecodable
from blendserve.store.kdn.client import Client, NotThere, Reply, WrongReply, fill
from blendserve.store.kdn.collection import LENGTH, MOST_HEADER, in_step_query
from blendserve.store.key import ChunkKey
from blendserve.store.network.arrival import Arrival
from blendserve.store.record import Header

ENOUGH = "enough"  # a word that no level has
CUT = (WrongReply, ConnectionError, http.client.HTTPException)
BEGUN = 2  # levels that one chunk is begun at
LEFT = "it came too slowly over the link: computing it was expected to be quicker"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A chunk that is to come."""

    key: ChunkKey
    word: str  # its level
    n_bytes: int  # of its body at that level
    next_word: Callable[[str, int], str]  # word under way, its bytes left -> the word to go on with
    arrival: Arrival = field(default_factory=Arrival)  # for who uses layers before all of them are here


@dataclass(frozen=True, slots=True)
class Delivered:
    """A chunk whose segments were all found right."""

    word: str  # the level
    header: Header
    segments: list[Buffer]


@dataclass(frozen=True, slots=True)
class Watch:
    """What is told of a transfer."""

    transfer: Callable[[], AbstractContextManager[None]]  # of a body, inside
    arrived: Callable[[int], None]  # so many bytes
    silence_s: float  # of the connection, after which the service counts as dead


def download(
    client: Client, wanted: Wanted, sizes: Mapping[str, int], watch: Watch
) -> Delivered | CorruptRecord | Undecodable:
    """A chunk by its level, or by what it says on the way. sizes: bytes of its body by each word.

    Raises StoreVersion, and what the client does.
    """
    for _ in range(BEGUN):
        transfer = _Transfer(client, [wanted], watch)
        try:
            (following,) = transfer.run()
        except CorruptRecord as error:
            return unraised(error)
        if transfer.whole:
            return transfer.delivered()[0]
        if following not in sizes:
            break
        wanted = replace(wanted, word=following, n_bytes=sizes[following])
    return Undecodable(LEFT, SLOW)


def download_in_step(client: Client, wanted: Sequence[Wanted], watch: Watch) -> list[Delivered] | None:
    """Several chunks by their levels, all or none: None where one is to come by another, or does not come right.

    Raises what the client does but for a connection that was cut once more.
    """
    transfer = _Transfer(client, wanted, watch)
    try:
        transfer.run()
    except (CorruptRecord, StoreVersion, NotThere, *CUT):
        return None  # which one, who asks for each is told
    return transfer.delivered() if transfer.whole else None


def beginning(
    client: Client, key: ChunkKey, word: str, n_bytes: int, layers: int, silence_s: float
) -> tuple[Header, list[Buffer]]:
    """A chunk's header and its first layers, checked as in any transfer. n_bytes: of its whole body.

    Raises CorruptRecord, StoreVersion, and what the client does.
    """
    left = iter(range(layers - 1, 0, -1))
    wanted = Wanted(key, word, n_bytes, lambda word, _: word if next(left, 0) else ENOUGH)
    transfer = _Transfer(client, [wanted], Watch(nullcontext, lambda n: None, silence_s))
    transfer.run()
    return transfer.headers[0], transfer.segments[0]


class _Transfer:
    """One chunk, or several in step, each at one level."""

    def __init__(self, client: Client, wanted: Sequence[Wanted], watch: Watch) -> None:
        self._client, self._wanted, self._watch = client, wanted, watch
        self._bytes = sum(chunk.n_bytes for chunk in wanted)
        self._words, self._etag = [chunk.word for chunk in wanted], ""
        self._begin()

    def _begin(self) -> None:
        self._at = 0  # bytes that were read and found right
        self._left = [chunk.n_bytes for chunk in self._wanted]
        self.headers: list[Header] = []
        self.segments: list[list[Buffer]] = [[] for _ in self._wanted]

    @property
    def whole(self) -> bool:
        return len(self.headers) == len(self._wanted) and not self._to_come()

    def delivered(self) -> list[Delivered]:
        """When it is whole."""
        return [Delivered(*parts) for parts in zip(self._words, self.headers, self.segments, strict=True)]

    def run(self) -> list[str]:
        """Until it is whole, or one is to be begun with another word -> the words to go on with. Raises CorruptRecord."""
        again = False
        while True:
            before = self._at
            try:
                return self._some(again)
            except CUT:
                words = self._next_words()
                if words != self._words:
                    return words
                if again and self._at <= before:
                    raise
                again = True

    def _some(self, again: bool) -> list[str]:
        """Go on from where the last connection was cut."""
        headers = {"Range": f"bytes={self._at}-", "If-Range": self._etag} if self._at else None
        asked = self._client.asked(self._path(), headers, self._watch.silence_s, again)
        with self._watch.transfer(), asked as reply:
            self._check(reply)
            for n in range(len(self.headers), len(self._wanted)):
                self._read_header(reply, n)
            for l, n in self._to_come():
                self._read_segment(reply, l, n)
                if n == len(self._wanted) - 1 and (words := self._next_words()) != self._words:
                    return self._words if self.whole else words
        return self._words

    def _path(self) -> str:
        if len(self._wanted) > 1:
            query = in_step_query((chunk.key, chunk.word) for chunk in self._wanted)
            return f"{self._client.path('layers')}?{query}"
        query = f"?level={self._words[0]}" if self._words[0] else ""
        return self._client.path("chunks", self._wanted[0].key.hex()) + query

    def _to_come(self) -> list[tuple[int, int]]:
        """Layers, and whose, in order."""
        n_layers, begun = self.headers[0].shape.n_layers, len(self.segments[-1])
        first = begun * len(self._wanted) + sum(len(of) > begun for of in self.segments)
        return [divmod(k, len(self._wanted)) for k in range(first, n_layers * len(self._wanted))]

    def _next_words(self) -> list[str]:
        return [
            chunk.next_word(chunk.word, left) for chunk, left in zip(self._wanted, self._left, strict=True)
        ]

    def _check(self, reply: Reply) -> None:
        """Raises CorruptRecord for a body that is not as long as it has to be, WrongReply for another place of it."""
        if reply.total != self._bytes:
            raise CorruptRecord(
                self._wanted[0].key, f"its body has {reply.total:,} bytes, not {self._bytes:,}"
            )
        if reply.start != self._at:
            if reply.start:
                raise WrongReply(f"the part from {reply.start}, not from {self._at}")
            self._begin()  # it has changed
        self._etag = reply.etag

    def _read_header(self, reply: Reply, n: int) -> None:
        wanted = self._wanted[n]
        length = LENGTH.unpack(self._read(reply, LENGTH.size))[0]
        if length > min(MOST_HEADER, wanted.n_bytes):
            raise CorruptRecord(wanted.key, f"its header is said to have {length:,} bytes")
        header = record.decode_header(wanted.key, self._read(reply, length))
        expected = LENGTH.size + length + header.n_bytes
        if expected != wanted.n_bytes:
            raise CorruptRecord(
                wanted.key, f"its header says {expected:,} bytes in all, not {wanted.n_bytes:,}"
            )
        if self.headers and header.shape.n_layers != self.headers[0].shape.n_layers:
            raise CorruptRecord(wanted.key, "it has not as many layers as those that come with it")
        self.headers.append(header)
        self._took(n, LENGTH.size + length)
        wanted.arrival.begin(header)

    def _read_segment(self, reply: Reply, l: int, n: int) -> None:
        wanted, header = self._wanted[n], self.headers[n]
        segment = self._read(reply, header.lengths[l])
        self.segments[n].append(record.check_segment(wanted.key, header, l, segment))
        wanted.arrival.add(segment)
        self._took(n, len(segment))

    def _took(self, n: int, n_bytes: int) -> None:
        """So many bytes of chunk n are right."""
        self._at += n_bytes
        self._left[n] -= n_bytes

    def _read(self, reply: Reply, n_bytes: int) -> bytearray:
        part = bytearray(n_bytes)
        fill(reply, memoryview(part))
        self._watch.arrived(n_bytes)
        return part
