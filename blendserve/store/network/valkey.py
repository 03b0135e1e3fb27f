"""What a snapshot asks a Valkey server for: batches of chunks, each whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from blendserve.store.codecs.base import Buffer
from blendserve.store.key import ChunkKey
from blendserve.store.record import ChunkRecord, Header
from blendserve.store.request_reads import TimeSaved
from blendserve.store.valkey_client import Client

Fields = Mapping[bytes, bytes]


class ValkeySource:
    """A network/snapshot.py Source."""

    def __init__(
        self,
        tables: Callable[[bytes, float], bytes | None],
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
