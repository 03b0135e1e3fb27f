"""A stored chunk, wherever its records lie: each layer is checked and decoded when it is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable

from blendserve.errors import CorruptRecord
from blendserve.store.codecs.base import Buffer, Pair, Tables, codec_for
from blendserve.store.key import ChunkKey
from blendserve.store.record import Coded, Header, check_segment


class StoredChunk:
    """A ChunkView over records. Threads may share it."""

    def __init__(
        self,
        key: ChunkKey,
        header: Header,
        read: Callable[[int], Buffer | None],
        tables: Tables = lambda hash: None,
        count_damage: Callable[[], None] = lambda: None,
    ) -> None:
        """read: layer l's segment, None where there is none. tables: of codecs. Raises codecs.base.Undecodable."""
        self._key, self._header, self._read, self._count_damage = key, header, read, count_damage
        self._codec = codec_for(header.coding, tables)
        self._decoder = self._codec.decoder(header.shape)
        self._next = 0  # layers are decoded up to here
        self._decoding = threading.Lock()
        self._early: dict[int, Pair] = {}  # layers that were decoded ahead, until they are asked for

    @property
    def n_layers(self) -> int:
        return self._header.shape.n_layers

    @property
    def n_tokens(self) -> int:
        return self._header.shape.n_tokens

    @property
    def n_bytes(self) -> int:
        return self._header.n_bytes

    @property
    def raw_bytes(self) -> int:
        return self._header.shape.n_bytes

    @property
    def version(self) -> Header:
        """The checksums of all layers are in it."""
        return self._header

    def layer(self, l: int) -> Pair:
        if not 0 <= l < len(self._header.lengths):
            raise IndexError(f"a chunk of {self.n_layers} layers has no layer {l}")
        if self._codec.random_access:
            return self._decoded(l)
        with self._decoding:
            early = self._early.pop(l, None)
            return early or self._decoded_in_order(l)

    def decode_ahead(self) -> bool:
        """Decode the next layer before it is asked for -> whether there was one that takes decoding.

        Raises CorruptRecord.
        """
        if self._codec.random_access:
            return False
        with self._decoding:
            l = self._next
            if l < self.n_layers:
                self._early[l] = self._decoded_in_order(l)
            return l < self.n_layers

    def coded(self) -> Coded:
        """A copy of it as it is coded. Raises CorruptRecord."""
        try:
            segments = [
                bytes(check_segment(self._key, self._header, l, self._read(l))) for l in range(self.n_layers)
            ]
        except CorruptRecord:
            self._count_damage()
            raise
        return Coded(self._header.shape, self._header.coding, [*segments], self._header.ids)

    def _decoded_in_order(self, l: int) -> Pair:
        """Decode what is missing below layer l, then l; a layer that was passed is decoded from the first one again."""
        if l < self._next:
            self._restart()
        try:
            for below in range(self._next, l):
                self._decoded(below)
                self._next = below + 1
            pair = self._decoded(l)
        except BaseException:
            self._restart()  # a decoder that failed half-way is of no use
            raise
        self._next = l + 1
        return pair

    def _decoded(self, l: int) -> Pair:
        try:
            segment = check_segment(self._key, self._header, l, self._read(l))
            return self._decoder.layer(l, segment)
        except CorruptRecord:
            self._count_damage()
            raise
        except ValueError as error:
            self._count_damage()
            raise CorruptRecord(self._key, f"layer {l} cannot be decoded: {error}", l) from error

    def _restart(self) -> None:
        self._decoder, self._next = self._codec.decoder(self._header.shape), 0
