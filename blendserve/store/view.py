"""Views of a chunk's KV, layer by layer: decoded from a record on demand, or over tensors."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from blendserve.core import ChunkKV
from blendserve.errors import CorruptRecord
from blendserve.store.codecs.base import Miss, Pair, Tables, Undecodable, codec_for
from blendserve.store.record import ChunkRecord, Header


class ChunkView(Protocol):
    """One chunk's KV, layer by layer."""

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
        """Equal only for views of the same bytes."""
        ...

    def layer(self, l: int) -> Pair:
        """Layer l's keys before RoPE and values, [K, C, D] each, read-only by convention.

        Raises CorruptRecord, IndexError, and ChunkLost for a chunk in transfer that does not arrive.
        """
        ...


class RecordView:
    """A ChunkView that decodes a record. Threads may share it."""

    def __init__(self, record: ChunkRecord, tables: Tables = lambda hash: None) -> None:
        """tables: of codecs, by hash. Raises Undecodable if the codec, its level or its tables are missing."""
        self.record = record
        self._codec = codec_for(record.coding, tables)
        self._decoder = self._codec.decoder(record.shape)
        self._next = 0  # layers are decoded up to here
        self._decoding = threading.Lock()
        self._ahead: dict[int, Pair] = {}  # decoded layers that `layer` has not returned yet

    @property
    def n_layers(self) -> int:
        return self.record.n_layers

    @property
    def n_tokens(self) -> int:
        return self.record.n_tokens

    @property
    def n_bytes(self) -> int:
        return self.record.n_bytes

    @property
    def raw_bytes(self) -> int:
        return self.record.raw_bytes

    @property
    def version(self) -> Header:
        """It has the checksums of all layers."""
        return self.record.header

    def layer(self, l: int) -> Pair:
        if not 0 <= l < self.n_layers:
            raise IndexError(f"a chunk of {self.n_layers} layers has no layer {l}")
        if self._codec.random_access:
            return self._decode(l)
        with self._decoding:
            return self._ahead.pop(l, None) or self._decode_in_order(l)

    def decode_ahead(self) -> bool:
        """Decode the next layer before `layer` needs it; False if none is left to decode. Raises CorruptRecord."""
        if self._codec.random_access:
            return False
        with self._decoding:
            l = self._next
            if l < self.n_layers:
                self._ahead[l] = self._decode_in_order(l)
            return l < self.n_layers

    def _decode_in_order(self, l: int) -> Pair:
        """Decode the missing layers below l, then l. Goes back by starting again from layer 0."""
        if l < self._next:
            self._restart()
        try:
            for below in range(self._next, l):
                self._decode(below)
                self._next = below + 1
            pair = self._decode(l)
        except BaseException:
            self._restart()  # a decoder that failed half-way cannot go on
            raise
        self._next = l + 1
        return pair

    def _decode(self, l: int) -> Pair:
        segment = self.record.segment(l)
        try:
            return self._decoder.layer(l, segment)
        except ValueError as error:
            self.record.report("corrupt")
            raise CorruptRecord(self.record.key, f"layer {l} cannot be decoded: {error}", l) from error

    def _restart(self) -> None:
        self._decoder, self._next = self._codec.decoder(self.record.shape), 0


@dataclass(frozen=True, slots=True)
class TensorView:
    """A ChunkView over tensors."""

    kv: ChunkKV
    version: object = field(default_factory=object, compare=False, repr=False)  # no two are equal

    @property
    def n_layers(self) -> int:
        return int(self.kv.keys.shape[0])

    @property
    def n_tokens(self) -> int:
        return self.kv.n_tokens

    @property
    def n_bytes(self) -> int:
        return self.kv.n_bytes

    raw_bytes = n_bytes

    def layer(self, l: int) -> Pair:
        if not 0 <= l < self.n_layers:
            raise IndexError(f"a chunk of {self.n_layers} layers has no layer {l}")
        return self.kv.keys[l], self.kv.values[l]


def open_view(record: ChunkRecord, tables: Tables) -> RecordView | Miss:
    """The record's view, or why it cannot be decoded here; its store counts that. tables: by hash."""
    try:
        return RecordView(record, tables)
    except Undecodable as error:
        record.report("undecodable", str(error))
        return Miss(error.kind, str(error))


def decode(record: ChunkRecord, tables: Tables = lambda hash: None) -> ChunkKV:
    """All layers. Raises CorruptRecord, Undecodable."""
    return replace(whole(RecordView(record, tables)), ids=record.token_ids)


def whole(view: ChunkView) -> ChunkKV:
    """A copy of all layers. Raises CorruptRecord."""
    keys, values = zip(*(view.layer(l) for l in range(view.n_layers)), strict=True)
    return ChunkKV(torch.stack(keys), torch.stack(values))
