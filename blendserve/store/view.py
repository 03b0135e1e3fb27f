"""Views of a chunk's KV, layer by layer: decoded from a record on demand, or over tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from blendserve.errors import CorruptRecord
from blendserve.kv import ChunkKV, join_layers
from blendserve.store.codecs.base import ChunkShape, Codec, Miss, Pair, Tables, Undecodable, codec_for
from blendserve.store.record import ChunkRecord


@dataclass(eq=False)
class ChunkView:
    """One chunk's KV, layer by layer. Threads may share it."""

    n_layers: int
    n_tokens: int
    n_bytes: int  # of all layers, as stored
    raw_bytes: int  # of keys and values over all layers, as `layer` returns them
    version: Hashable  # equal only for views of the same bytes
    read: Callable[[int], Pair]
    in_memory: bool = False  # decoded already: `layer` costs nothing
    is_placed: bool = False  # keys are after RoPE, at their positions
    is_lossless: bool = False  # `layer` returns the very numbers that were computed

    def layer(self, l: int) -> Pair:
        """Layer l's keys before RoPE, unless they are placed, and values, [K, C, D] each, read-only by convention.

        Raises CorruptRecord, IndexError, and ChunkLost for a chunk in transfer that does not arrive.
        """
        if not 0 <= l < self.n_layers:
            raise IndexError(f"a chunk of {self.n_layers} layers has no layer {l}")
        return self.read(l)

    def reading(self, read: Callable[[int], Pair]) -> ChunkView:
        """The same chunk, with layers from `read`."""
        sizes = self.n_layers, self.n_tokens, self.n_bytes, self.raw_bytes
        return ChunkView(*sizes, self.version, read, is_lossless=self.is_lossless)


class TensorView(ChunkView):
    """A view of tensors. No two have the same version."""

    def __init__(self, kv: ChunkKV, is_placed: bool = False) -> None:
        read: Callable[[int], Pair] = lambda l: (kv.keys[l], kv.values[l])  # noqa: E731
        super().__init__(
            kv.n_layers, kv.n_tokens, kv.n_bytes, kv.n_bytes, object(), read, True, is_placed, True
        )


class RecordView(ChunkView):
    """A view that decodes a record."""

    def __init__(self, record: ChunkRecord, tables: Tables = lambda hash: None) -> None:
        """tables: of codecs, by hash. Raises Undecodable if the codec, its level or its tables are missing."""
        codec = codec_for(record.coding, tables)
        decoder = _RecordDecoder(record, codec)
        sizes = record.n_layers, record.n_tokens, record.n_bytes, record.raw_bytes
        super().__init__(*sizes, record.header, decoder.layer, is_lossless=codec.is_lossless)
        self.decode_ahead = decoder.decode_ahead


class _RecordDecoder:
    """Decodes the layers of a record, in order if its codec needs that. Apart from the view: no reference cycle."""

    def __init__(self, record: ChunkRecord, codec: Codec) -> None:
        self._record = record
        self._codec = codec
        self._decoder = codec.decoder(record.shape)
        self._next = 0  # layers are decoded up to here
        self._decoding = threading.Lock()
        self._ahead: dict[int, Pair] = {}  # decoded layers that `layer` has not returned yet

    def layer(self, l: int) -> Pair:
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
            if l < self._record.n_layers:
                self._ahead[l] = self._decode_in_order(l)
            return l < self._record.n_layers

    def _decode_in_order(self, l: int) -> Pair:
        """Decode the missing layers below l, then l. Goes back by starting again from layer 0."""
        if l < self._next:
            self._restart()
        try:
            while True:
                pair = self._decode(self._next)
                self._next += 1
                if self._next > l:
                    return pair
        except BaseException:
            self._restart()  # a decoder that failed half-way cannot go on
            raise

    def _decode(self, l: int) -> Pair:
        segment = self._record.segment(l)
        try:
            return self._decoder.layer(l, segment)
        except ValueError as error:
            self._record.report("corrupt")
            raise CorruptRecord(self._record.key, f"layer {l} cannot be decoded: {error}", l) from error

    def _restart(self) -> None:
        self._decoder = self._codec.decoder(self._record.shape)
        self._next = 0


def open_view(record: ChunkRecord, tables: Tables, shape: ChunkShape | None = None) -> RecordView | Miss:
    """Return the record's view, or why it cannot be used here; its store counts that.

    tables: by hash. shape: of the model's KV, which kernels rely on; None accepts every shape.
    """
    if shape is not None and record.shape != shape:
        record.report("corrupt")
        return Miss("corrupt", "its keys and values have another shape or dtype than those of the model")
    try:
        return RecordView(record, tables)
    except Undecodable as error:
        record.report("undecodable", str(error))
        return Miss(error.kind, str(error))


def decode(record: ChunkRecord, tables: Tables = lambda hash: None) -> ChunkKV:
    """A copy of all layers. Raises CorruptRecord, Undecodable."""
    view = RecordView(record, tables)
    keys, values = zip(*(view.layer(l) for l in range(view.n_layers)), strict=True)
    sides = join_layers(keys), join_layers(values)
    return ChunkKV(*sides, ids=record.token_ids, recurrent=record.shape.recurrent)
