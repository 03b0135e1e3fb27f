"""One chunk from the service: layer by layer, each checked as it comes, resumed where the connection was cut.

    header -> is it this chunk's, and as long as the directory says?   then, for every layer
    segment -> its checksum                                            go on, begin again at another level, or compute it

What a lying peer costs is bounded: nothing longer than the directory says is read, the first wrong segment ends it, and a
connection that is cut is resumed on a new one, as long as that brings another layer.
"""

from __future__ import annotations

import http.client
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from blendserve.errors import CorruptRecord, unraised
from blendserve.store import record
from blendserve.store.codecs.base import SLOW, Buffer, Undecodable
from blendserve.store.kdn.client import Client, Reply, WrongReply, fill
from blendserve.store.kdn.collection import LENGTH, MOST_HEADER
from blendserve.store.key import ChunkKey
from blendserve.store.network.arrival import Arrival
from blendserve.store.record import Header

ENOUGH = "enough"  # a word that no level has
BEGUN = 2  # levels that one chunk is begun at
LEFT = "it came too slowly over the link: computing it was expected to be quicker"


@dataclass(frozen=True, slots=True)
class Delivered:
    """A chunk whose segments were all found right."""

    word: str  # the level
    header: Header
    segments: list[Buffer]


class Watch:
    """What the transfer tells, and asks, on its way."""

    def __init__(
        self,
        transfer: Callable[[], AbstractContextManager[None]],
        arrived: Callable[[int], None],
        next_word: Callable[[str, int], str],
        silence_s: float,
        arrival: Arrival | None = None,
    ) -> None:
        """transfer: of a body, inside. arrived: so many bytes. next_word: word under way, its bytes left -> the word to
        go on with. silence_s: of the connection, after which the service counts as dead. arrival: for who uses layers
        before all of them are here."""
        self.transfer, self.arrived, self.next_word, self.silence_s = transfer, arrived, next_word, silence_s
        self.arrival = arrival or Arrival()


def download(
    client: Client, key: ChunkKey, word: str, sizes: dict[str, int], watch: Watch
) -> Delivered | CorruptRecord | Undecodable:
    """A chunk by the level `word`, or by what `watch` says on the way. sizes: bytes of its body by each word.

    Raises StoreVersion, and what the client does.
    """
    for _ in range(BEGUN):
        transfer = _Transfer(client, key, word, sizes[word], watch)
        try:
            following = transfer.run()
        except CorruptRecord as error:
            return unraised(error)
        if transfer.whole and transfer.header:
            return Delivered(word, transfer.header, transfer.segments)
        if following not in sizes:
            break
        word = following
    return Undecodable(LEFT, SLOW)


def beginning(
    client: Client, key: ChunkKey, word: str, n_bytes: int, layers: int, silence_s: float
) -> tuple[Header, list[Buffer]]:
    """A chunk's header and its first layers, checked as in any transfer. n_bytes: of its whole body.

    Raises CorruptRecord, StoreVersion, and what the client does.
    """
    left = iter(range(layers - 1, 0, -1))
    watch = Watch(nullcontext, lambda n: None, lambda word, _: word if next(left, 0) else ENOUGH, silence_s)
    transfer = _Transfer(client, key, word, n_bytes, watch)
    transfer.run()
    assert transfer.header is not None
    return transfer.header, transfer.segments


class _Transfer:
    """One chunk at one level."""

    def __init__(self, client: Client, key: ChunkKey, word: str, n_bytes: int, watch: Watch) -> None:
        self._client, self._key, self._word, self._bytes, self._watch = client, key, word, n_bytes, watch
        self._at, self._etag = 0, ""
        self.header: Header | None = None
        self.segments: list[Buffer] = []

    @property
    def whole(self) -> bool:
        return self.header is not None and len(self.segments) == self.header.shape.n_layers

    def run(self) -> str:
        """Until it is whole, or another word is to be begun with, which is returned. Raises CorruptRecord."""
        again = False
        while True:
            before = self._at
            try:
                return self._some(again)
            except (WrongReply, ConnectionError, http.client.HTTPException):
                word = self._watch.next_word(self._word, self._bytes - self._at)
                if word != self._word:
                    return word
                if again and self._at <= before:
                    raise
                again = True

    def _some(self, again: bool) -> str:
        """Go on from where the last connection was cut."""
        query = f"?level={self._word}" if self._word else ""
        headers = {"Range": f"bytes={self._at}-", "If-Range": self._etag} if self._at else None
        path = self._client.path("chunks", self._key.hex()) + query
        asked = self._client.asked(path, headers, self._watch.silence_s, again)
        with self._watch.transfer(), asked as reply:
            self._check(reply)
            if self.header is None:
                self._read_header(reply)
            assert self.header is not None
            for l in range(len(self.segments), self.header.shape.n_layers):
                self._read_segment(reply, l)
                word = self._watch.next_word(self._word, self._bytes - self._at)
                if word != self._word and not self.whole:
                    return word
        return self._word

    def _check(self, reply: Reply) -> None:
        """Raises CorruptRecord for a body that is not as long as it has to be, WrongReply for another place of it."""
        if reply.total != self._bytes:
            raise CorruptRecord(self._key, f"its body has {reply.total:,} bytes, not {self._bytes:,}")
        if reply.start != self._at:
            if reply.start:
                raise WrongReply(f"the part from {reply.start}, not from {self._at}")
            self._at, self.header, self.segments = 0, None, []  # it has changed, and begins anew
        self._etag = reply.etag

    def _read_header(self, reply: Reply) -> None:
        length = LENGTH.unpack(self._read(reply, LENGTH.size))[0]
        if length > min(MOST_HEADER, self._bytes):
            raise CorruptRecord(self._key, f"its header is said to have {length:,} bytes")
        self.header = record.decode_header(self._key, self._read(reply, length))
        expected = LENGTH.size + length + self.header.n_bytes
        if expected != self._bytes:
            raise CorruptRecord(self._key, f"its header says {expected:,} bytes in all, not {self._bytes:,}")
        self._at = LENGTH.size + length
        self._watch.arrival.begin(self.header)

    def _read_segment(self, reply: Reply, l: int) -> None:
        assert self.header is not None
        segment = self._read(reply, self.header.lengths[l])
        self.segments.append(record.check_segment(self._key, self.header, l, segment))
        self._watch.arrival.add(segment)
        self._at += len(segment)

    def _read(self, reply: Reply, n_bytes: int) -> bytearray:
        part = bytearray(n_bytes)
        fill(reply, memoryview(part))
        self._watch.arrived(n_bytes)
        return part
