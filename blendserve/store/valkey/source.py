"""What a snapshot asks the server for: batches of chunks, each whole."""

from __future__ import annotations

from collections.abc import Sequence

from blendserve.store import record
from blendserve.store.codecs.base import Buffer
from blendserve.store.key import ChunkKey
from blendserve.store.request_reads import TimeSaved
from blendserve.store.valkey import chunks
from blendserve.store.valkey.client import Client
from blendserve.store.valkey.tables import ServerBlobs


class Source:
    """A network/snapshot.py Source."""

    def __init__(self, tables: ServerBlobs) -> None:
        self.tables = tables.read

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

    def read(self, client: Client, keys: Sequence[ChunkKey]) -> list[chunks.Fields]:
        return chunks.read(client, keys)

    def checked(self, key: ChunkKey, reply: chunks.Fields) -> tuple[record.Header, list[Buffer]]:
        return chunks.checked(key, reply)
