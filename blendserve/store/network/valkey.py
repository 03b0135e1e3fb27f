"""What a snapshot asks a Valkey server for: batches of chunks, each whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from blendserve.store.codecs.base import Buffer
from blendserve.store.key import ChunkKey
from blendserve.store.record import ChunkRecord, Header, decode_header
from blendserve.store.request_reads import Sample, TimeSaved
from blendserve.store.valkey_client import Client
from blendserve.store.valkey_layout import HEADER, Fields, chunk_name, segment_name


class ValkeySource:
    """A network/snapshot.py Source."""

    def __init__(
        self,
        tables: Callable[[bytes, float | None], bytes | None],
        read: Callable[[Client, Sequence[ChunkKey]], list[Fields]],
        checked: Callable[[ChunkKey, Fields], ChunkRecord],
    ) -> None:
        self.tables, self._read, self._checked = tables, read, checked

    def expect(self, keys: Sequence[ChunkKey], saved: TimeSaved | None) -> None:
        """Nothing is prepared for them."""

    def in_step(self) -> bool:
        return False

    def begun(self) -> None:
        """Nothing is ever used before it is here."""

    def outlasts(self, key: ChunkKey, seconds: float) -> bool:
        return False

    def cancel(self, key: ChunkKey) -> None:
        """Nothing was prepared for it."""

    def arrival(self, key: ChunkKey) -> None:
        """A batch comes whole."""

    def read(self, client: Client, keys: Sequence[ChunkKey]) -> list[Fields]:
        return self._read(client, keys)

    def checked(self, key: ChunkKey, reply: Fields) -> tuple[Header, list[Buffer]]:
        record = self._checked(key, reply)
        return record.header, record.segments()


def sample(client: Client, keys: Sequence[ChunkKey], n_bytes: int) -> Sample | None:
    """Headers of these, timed, then the first layers of one. Raises what valkey-py does, CorruptRecord, StoreVersion."""
    client.ping()  # or connecting would be timed
    start = time.perf_counter()
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.hget(chunk_name(key), HEADER)
    headers = pipeline.execute()
    round_trip = time.perf_counter() - start
    found = next(((key, raw) for key, raw in zip(keys, headers, strict=True) if raw), None)
    if found is None:
        return None
    header = decode_header(*found)
    layers = header.shape.n_layers
    some = max(1, min(layers, n_bytes * layers // max(1, header.n_bytes)))
    start = time.perf_counter()
    got = client.hmget(chunk_name(found[0]), [segment_name(l) for l in range(some)])
    seconds = time.perf_counter() - start
    if None in got:  # evicted meanwhile
        return None
    part = sum(header.lengths[:some]) / max(1, header.n_bytes)
    return Sample(round_trip, seconds, part, header.shape.n_tokens)
