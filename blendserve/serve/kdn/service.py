"""The delivery service's parts: a store, the catalogue in it, what was delivered last, and who may have what.

It has no state of its own but what it may lose: any number of services on one store deliver the same.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TypeVar

from blendserve.delivery.catalogue import Catalogue, pieces_of
from blendserve.delivery.publish import retire, set_pins
from blendserve.engine.fair_executor import FairExecutor
from blendserve.errors import Busy, InputError, NotAllowed, NotFound
from blendserve.serve.config import DeliverConfig
from blendserve.serve.front import Front
from blendserve.serve.keys import Tenant
from blendserve.serve.metrics import HttpMetrics
from blendserve.store import ChunkKey, KVStore, read_record
from blendserve.store.clock import Clock as StoreClock
from blendserve.store.codecs.base import Buffer
from blendserve.store.kdn.collection import MOST_IN_STEP, Collection, body, in_step, level_key
from blendserve.timing import Clock

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sendable:
    """A body, and what names it."""

    parts: list[Buffer]
    etag: str

    @property
    def n_bytes(self) -> int:
        return sum(map(len, self.parts))


class DeliveryMetrics(HttpMetrics):
    """What is delivered."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks = self.count("delivered_chunks", "Chunks asked for, by where they came from", "source")
        self.bytes = self.count("delivered_bytes", "Bytes of bodies, as they are sent")


class DeliveryService(Front):
    """What a store's collections are delivered by. The store is its opener's to close."""

    def __init__(self, store: KVStore, config: DeliverConfig, clock: StoreClock = time) -> None:
        """clock: of how long the catalogue is believed."""
        self.delivered = DeliveryMetrics()
        super().__init__(config, self.delivered)
        self.store, self.config, self.catalogue = store, config, Catalogue(store, now=clock.monotonic)
        self._storage = FairExecutor("delivery", config.queue)  # the one that reads the store
        self._recent: OrderedDict[tuple[ChunkKey, ChunkKey], Sendable] = OrderedDict()
        self._recent_bytes = 0
        self._sent: dict[str, tuple[float, Clock]] = {}  # MB that count as not sent yet, and since when

    def close(self) -> None:
        self._storage.stop()

    async def collections(self, tenant: Tenant) -> list[Collection]:
        """The collections that a tenant may use. Raises StoreError, Busy."""
        found = await self._run(tenant, self.catalogue.collections)
        return [collection for name, collection in found.items() if tenant.may_use(name)]

    async def collection(self, tenant: Tenant, name: str) -> Collection:
        """Raises NotFound: with one message, after the same work, whether there is none or it is not for this key."""
        return await self._run(tenant, self._collection, tenant, name)

    async def directory(self, tenant: Tenant, name: str) -> Sendable:
        def job() -> Sendable:
            blob = self._collection(tenant, name).directory
            return Sendable([self.catalogue.piece(hash) for hash in blob.pieces], f'"{blob.version}"')

        return await self._run(tenant, job)

    async def piece(self, tenant: Tenant, name: str, hash: str) -> Sendable:
        """A part of the index, or tables, that belong to this collection."""

        def job() -> Sendable:
            found = self._collection(tenant, name)
            if hash not in pieces_of(found) | {tables.hash for tables in found.tables}:
                raise _not_found()
            return Sendable([self.catalogue.piece(hash)], f'"{hash}"')

        return await self._run(tenant, job)

    async def chunk(self, tenant: Tenant, name: str, key: str, level: str) -> Sendable:
        """A chunk's body at a level, "" for the first. Raises NotFound, CorruptRecord and other StoreErrors."""
        return await self._run(tenant, self._chunk, tenant, name, key, level)

    async def layers(self, tenant: Tenant, name: str, chunks: Sequence[str]) -> Sendable:
        """Several chunks in step, KEY:LEVEL each. Raises InputError for too many, NotFound, StoreErrors."""
        if not 0 < len(chunks) <= MOST_IN_STEP:
            raise InputError(f"a request returns 1 to {MOST_IN_STEP} chunks, not {len(chunks)}")
        return await self._run(tenant, self._layers, tenant, name, chunks)

    async def set_pins(self, tenant: Tenant, name: str, pinned: bool) -> int:
        """For admins. Raises NotAllowed, NotFound, StoreError."""
        return await self._administer(
            tenant, name, partial(set_pins, self.store, self.catalogue, name, pinned)
        )

    async def retire(self, tenant: Tenant, name: str, delete: bool) -> int:
        """For admins. Raises NotAllowed, NotFound, StoreError."""
        return await self._administer(tenant, name, partial(retire, self.store, self.catalogue, name, delete))

    def pay(self, tenant: Tenant, n_bytes: int) -> None:
        """Count bytes that are to be sent. Raises Busy where a tenant has had as many as they may."""
        self.delivered.bytes.inc(n_bytes)
        if not (most := self.config.mb_per_minute):
            return
        owed, since = self._sent.pop(tenant.name, (0.0, Clock()))
        owed = max(0.0, owed - since.elapsed() * most / 60)
        self._sent[tenant.name] = owed, Clock()
        if owed >= most:
            raise Busy(f"transfer limit of {most:g} MB per minute", max(1, round((owed - most) * 60 / most)))
        self._sent[tenant.name] = owed + n_bytes / 1e6, Clock()

    async def _run(self, tenant: Tenant, call: Callable[..., T], *args: object) -> T:
        return await asyncio.wrap_future(self._storage.submit(tenant.name, partial(call, *args)))

    async def _administer(self, tenant: Tenant, name: str, call: Callable[[], int]) -> int:
        await self.collection(tenant, name)
        tenant.require_writing()
        if not tenant.admin:
            raise NotAllowed("pinning and retiring collections requires an admin's key")
        return await self._run(tenant, call)

    def _collection(self, tenant: Tenant, name: str) -> Collection:
        found, allowed = self.catalogue.collections().get(name), tenant.may_use(name)
        if found is None or not allowed:
            raise _not_found()
        return found

    def _chunk(self, tenant: Tenant, name: str, key_hex: str, level: str) -> Sendable:
        collection = self._collection(tenant, name)
        try:
            key = bytes.fromhex(key_hex)
        except ValueError:
            raise _not_found() from None
        word = level or collection.levels[0]
        if word not in collection.levels or key not in self.catalogue.directory(collection):
            raise _not_found()
        lies = level_key(key, word, collection.levels)
        if (recent := self._recent.get((lies, key))) is not None:
            self._recent.move_to_end((lies, key))
            self.delivered.chunks.labels("memory").inc()
            return recent
        record = read_record(self.store, lies)
        self.delivered.chunks.labels("store" if record else "missing").inc()
        if record is None:
            raise _not_found()
        parts = body(key, record)
        # The header ends with its own checksum, which covers key, coding, and every segment's length and checksum.
        return self._remember((lies, key), Sendable(parts, f'"{bytes(parts[1][-8:]).hex()}"'))

    def _layers(self, tenant: Tenant, name: str, chunks: Sequence[str]) -> Sendable:
        found = [self._chunk(tenant, name, *asked.partition(":")[::2]) for asked in chunks]
        etag = blake2b("".join(each.etag for each in found).encode(), digest_size=8).hexdigest()
        return Sendable(in_step([each.parts for each in found]), f'"{etag}"')

    def _remember(self, name: tuple[ChunkKey, ChunkKey], made: Sendable) -> Sendable:
        cap = self.config.memory_mb * 1e6
        if made.n_bytes <= cap:
            self._recent[name] = made
            self._recent_bytes += made.n_bytes
        while self._recent_bytes > cap:
            self._recent_bytes -= self._recent.popitem(last=False)[1].n_bytes
        return made


def _not_found() -> NotFound:
    return NotFound("not found, or not accessible with this API key")
