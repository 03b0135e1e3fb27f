"""Chunk KV on a Valkey or Redis server, shared by any number of engines on any number of machines.

names.py says what lies where. Whatever the server does, or does not, costs a request at most the deadline: what cannot be
had in time is a miss (snapshot.py, connection.py), what cannot be stored is an error that callers expect of any store.

The cap is a quota of each namespace. The server's own `maxmemory` is its operator's: under `volatile-lru` or
`volatile-lfu` it evicts chunks, whole, and never pinned ones, as those do not expire.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from blendserve.config import PlaceConfig, ValkeyConfig
from blendserve.core import ChunkKV, TokenIds
from blendserve.errors import CorruptRecord, StoreError, StoreFull, StoreUnavailable, StoreVersion
from blendserve.store import record
from blendserve.store.base import (
    ID_BATCH,
    REMOTE,
    ChunkInfo,
    KVStore,
    Lease,
    Sample,
    StoreStats,
    VerifyReport,
    full,
    stats_of,
)
from blendserve.store.clock import Clock
from blendserve.store.codecs.base import Buffer, ChunkShape, Codec, tables_hash
from blendserve.store.codecs.raw import Raw
from blendserve.store.key import TAG_BYTES, ChunkKey, namespace_tag
from blendserve.store.network.connection import Connection
from blendserve.store.network.failed import Failed
from blendserve.store.network.snapshot import NetworkSnapshot, Sizes
from blendserve.store.policies import Admission, Always, Candidate, Eviction, Policies, Refuse
from blendserve.store.record import Coded
from blendserve.store.tables import TablesInfo, check_room
from blendserve.store.traffic import Notes, Traffic
from blendserve.store.valkey import chunks
from blendserve.store.valkey.client import Client, ValkeyPeer
from blendserve.store.valkey.leases import Leases
from blendserve.store.valkey.ledger import SCAN_S, Entered, Entry, Ledger
from blendserve.store.valkey.names import CHUNK, chunk_key_of
from blendserve.store.valkey.source import Source
from blendserve.store.valkey.tables import ServerTables

NOTE_EVERY_S = 60.0
TRIES = 8  # at a quota that other processes fill at the same time


class ValkeyStore(KVStore):
    """A KVStore on the server that the settings name, of at most `cap_bytes` of chunks a namespace, as stored.

    It opens whether the server is there or not. `read_only` writes nothing, notes of use included. Raises
    StoreUnavailable where the client's package is missing.
    """

    persistent, needs_folder = True, False
    tells_ids = True

    def __init__(
        self,
        config: ValkeyConfig,
        cap_bytes: int,
        read_only: bool = False,
        eviction: Eviction | None = None,
        admission: Admission | None = None,
        codec: Codec | None = None,
        clock: Clock = time,
    ) -> None:
        """codec: of what is written; whatever is there is read by its own."""
        self.config, self.cap_bytes, self.read_only = config, cap_bytes, read_only
        self._eviction = eviction or Refuse()
        self._codec = codec or Raw()
        self._admission = admission or Always()
        self._clock = clock
        self._traffic = Traffic(self._admission, clock)
        self._connection = Connection(ValkeyPeer(config), clock=clock)
        self._ledger = Ledger(self._connection, clock)
        self._leases = Leases(self._connection)
        self._tables = ServerTables(self._connection)
        self._failed = Failed(now=clock.monotonic)
        self._sizes = Sizes(config.in_flight_mb * 1_000_000, self._connection.workers)
        self._noted, self._counted = clock.monotonic(), float("-inf")
        self._closed = False

    @classmethod
    def from_config(
        cls, config: PlaceConfig, path: Path | None, read_only: bool, policies: Policies
    ) -> ValkeyStore:
        """A server that cannot be reached is told, and no error: chunks count as missing until it answers."""
        store = cls(config.valkey, config.cap_bytes, read_only, *policies)
        with contextlib.suppress(StoreUnavailable):  # the breaker has said it
            store._connection.ask(lambda client: client.ping())
        return store

    @contextmanager
    def reading(self) -> Iterator[NetworkSnapshot]:
        self._refuse_closed()
        source = Source(self._tables)
        snapshot = NetworkSnapshot(self._connection, source, self._traffic, self._failed, self._sizes)
        try:
            yield snapshot
        finally:
            snapshot.end()
        if self._clock.monotonic() - self._noted > NOTE_EVERY_S:
            self._noted = self._clock.monotonic()
            threading.Thread(target=self._write_notes, daemon=True).start()  # no request waits for it

    def put(self, key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        record.validate_kv(kv)
        codec = self._codec
        return self.put_coded(key, Coded(ChunkShape.of(kv), codec.coding, codec.encode(kv), kv.ids), pin)

    def put_coded(self, key: ChunkKey, coded: Coded, pin: bool = False) -> bool:
        self._refuse_writing()
        header = record.seal(key, coded)
        entered = self._enter(key, Entry.of(header), pin)
        if entered is None:
            return False
        self._write(key, header, coded.segments, entered)
        self._failed.forget(key)
        return True

    def write_by(self, codec: Codec) -> None:
        self._codec = codec

    def coded(self, key: ChunkKey) -> Coded | None:
        self._refuse_closed()
        fields = self._connection.ask(lambda client: chunks.read(client, [key]))[0]
        return chunks.coded(key, fields) if fields else None

    def put_tables(self, codec: str, fingerprint: str, raw: bytes, current: bool = True) -> bytes:
        self._refuse_writing()
        hash = tables_hash(raw)
        check_room(self._tables.infos(), hash, len(raw))
        made = self._traffic.now() if current else 0
        self._tables.write(TablesInfo(hash, codec, fingerprint, len(raw), made), raw)
        return hash

    def tables(self, hash: bytes) -> bytes | None:
        self._refuse_closed()
        return self._tables.read(hash)

    def all_tables(self) -> list[TablesInfo]:
        self._refuse_closed()
        return self._tables.infos()

    def delete_tables(self, hash: bytes) -> bool:
        self._refuse_writing()
        return self._tables.drop(hash)

    def wants(self, key: ChunkKey, raw_bytes: int) -> bool:
        self._refuse_closed()
        expected = Entry(self._codec.expected_bytes(raw_bytes), raw_bytes, 0, 0)
        entered = self._ledger.enter(key, expected, 0, False, self.cap_bytes, dry=True)
        try:
            return entered.lacking <= 0 or self._victims(key, expected, entered, pin=False) is not None
        except StoreFull:
            return False

    @property
    def far(self) -> bool:
        return True

    def sample(self, keys: Sequence[ChunkKey], n_bytes: int) -> Sample | None:
        self._refuse_closed()
        return self._connection.ask(partial(chunks.sample, keys=keys, n_bytes=n_bytes))

    def lease(self, key: ChunkKey, seconds: float) -> Lease | None:
        self._refuse_closed()
        return self.leases([key], seconds).get(key)

    def leases(self, keys: Sequence[ChunkKey], seconds: float) -> dict[ChunkKey, Lease]:
        self._refuse_closed()
        return self._leases.take(keys, seconds)

    def pin(self, keys: Iterable[ChunkKey]) -> int:
        return self._set_pins(keys, True)

    def unpin(self, keys: Iterable[ChunkKey]) -> int:
        return self._set_pins(keys, False)

    def delete(self, key: ChunkKey) -> bool:
        self._refuse_writing()
        there = self._connection.ask(lambda client: chunks.drop(client, [key]))
        self._ledger.strike([key])
        return bool(there)

    def __contains__(self, key: ChunkKey) -> bool:
        self._refuse_closed()
        return self._connection.ask(lambda client: chunks.there(client, [key]))[0]

    def present(self, keys: Iterable[ChunkKey], remote: bool = True) -> set[ChunkKey]:
        """In one round trip."""
        self._refuse_closed()
        asked = list(keys) if remote else []
        found = self._connection.ask(lambda client: chunks.there(client, asked)) if asked else []
        return {key for key, is_there in zip(asked, found, strict=True) if is_there}

    def info(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkInfo]:
        there = self.present(keys)
        return {
            key: ChunkInfo(entry.n_tokens, entry.n_bytes, entry.raw_bytes, pinned, REMOTE)
            for key, (entry, pinned) in self._ledger.known(there).items()
        }

    def ids(self, keys: Iterable[ChunkKey]) -> Iterator[tuple[ChunkKey, TokenIds]]:
        self._refuse_closed()
        asked = list(keys)
        for some in (asked[at : at + ID_BATCH] for at in range(0, len(asked), ID_BATCH)):
            headers = self._connection.ask(partial(chunks.headers, keys=some))
            for key, raw in zip(some, headers, strict=True):
                with contextlib.suppress(CorruptRecord, StoreVersion):
                    if raw and (ids := record.decode_header(key, raw).ids):
                        yield key, ids

    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        return iter(sorted(key for tag in self._tags(namespace) for key in self._ledger.keys(tag)))

    def stats(self, namespace: str | None = None) -> StoreStats:
        """Of the entries. Those whose chunks the server has evicted are looked for once a minute, and by `verify`."""
        if self._clock.monotonic() - self._counted >= NOTE_EVERY_S:
            self._strike_lost()
        sizes: list[tuple[int, int, int, bool]] = []
        counts = self._traffic.counts(namespace_tag(namespace))
        for tag in self._tags(namespace):
            pins = self._ledger.pins(tag)
            for key, entry in self._ledger.entries(tag).items():
                sizes.append((entry.n_tokens, entry.n_bytes, entry.raw_bytes, key in pins))
            counts += self._ledger.counts(tag)
        infos = self._tables.infos()
        return stats_of("valkey", self.config.url, self.cap_bytes, sizes, counts, namespace, infos)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Every chunk on the server is looked at, entered or not; its entry is made what it should be.

        Two engines that write one chunk at once, coded in two ways, may leave one's bytes and the other's entry.
        """
        self._strike_lost()
        entries = {key: entry for tag in self._tags(None) for key, entry in self._ledger.entries(tag).items()}
        keys = sorted(entries.keys() | self._scan())
        good, bad = 0, []
        for done, key in enumerate(keys, start=1):
            problem = self._problem(key, entries.get(key))
            good += not problem
            bad += [(key.hex(), problem)] if problem else []
            if progress:
                progress(done, len(keys))
        return VerifyReport(good, tuple(bad), tuple(self._tables.problems()))

    def close(self) -> None:
        if not self._closed:
            with contextlib.suppress(StoreError):
                if not self.read_only and self._traffic:
                    self._note(self._traffic.take())
            self._closed = True
            self._connection.close()

    def _enter(self, key: ChunkKey, entry: Entry, pin: bool) -> Entered | None:
        """Make room for a chunk and enter it; None where it is not worth its victims. Raises StoreFull."""
        for _ in range(TRIES):
            now = self._traffic.now() // 1000
            entered = self._ledger.enter(key, entry, now, pin, self.cap_bytes)
            if entered.lacking <= 0:
                return entered
            victims = self._victims(key, entry, entered, pin)
            if victims is None:
                return None
            entered = self._ledger.enter(key, entry, now, pin, self.cap_bytes, victims)
            if entered.lacking <= 0:
                self._connection.ask(partial(chunks.drop, keys=[victim.key for victim in victims]))
                return entered
        raise StoreUnavailable(f"the quota on {self.config.server} is contended: other engines fill it, too")

    def _victims(self, key: ChunkKey, entry: Entry, entered: Entered, pin: bool) -> list[Candidate] | None:
        """What has to go for a chunk; None where it is not worth that. Raises StoreFull."""
        if self._traffic and not self.read_only:
            self._note(self._traffic.take())  # uses in this process count
        oldest = (candidate for candidate in self._ledger.oldest(key[:TAG_BYTES]) if candidate.key != key)
        victims = self._eviction.victims(oldest, entered.lacking)
        if victims is None:
            raise full(f"the KV store at {self.config.where}", entered.others, entry.n_bytes, self.cap_bytes)
        known = pin or entered.layers_before >= 0
        if known or self._admission.admits(key, entry.n_bytes, victims, entered.n_chunks):
            return victims
        self._traffic.count(key, "refused")
        return None

    def _write(
        self, key: ChunkKey, header: record.Header, segments: Sequence[Buffer], entered: Entered
    ) -> None:
        try:
            self._connection.ask(
                lambda client: chunks.write(
                    client, key, header, segments, bool(entered.pinned), entered.layers_before, self._leases
                )
            )
        except StoreError:
            if entered.layers_before < 0:
                with contextlib.suppress(StoreError):
                    self._ledger.strike([key])
            raise

    def _set_pins(self, keys: Iterable[ChunkKey], pinned: bool) -> int:
        self._refuse_writing()
        keys = list(keys)
        found = self._connection.ask(lambda client: chunks.there(client, keys)) if keys else []
        present = [key for key, is_there in zip(keys, found, strict=True) if is_there]
        self._ledger.pin(present, pinned)
        self._connection.ask(lambda client: chunks.keep(client, present, pinned))
        return len(present)

    def _problem(self, key: ChunkKey, entry: Entry | None) -> str:
        """What is wrong with a chunk, "" when nothing is. Needs no codec: what cannot be decoded here may be whole."""
        fields = self._connection.ask(lambda client: chunks.read(client, [key]))[0]
        try:
            header, _ = chunks.checked(key, fields)
        except StoreError as error:
            return str(error)
        if len(fields) > header.shape.n_layers + 1:
            return f"it has more layers than the {header.shape.n_layers} of its header"
        counted = entry == Entry.of(header)
        if not counted and not self.read_only:
            self._ledger.enter(key, Entry.of(header), self._traffic.now() // 1000, False, 1 << 62)
        return "" if counted or entry is None or not self.read_only else "it is counted as of another size"

    def _scan(self) -> set[ChunkKey]:
        def job(client: Client) -> set[ChunkKey]:
            names = client.scan_iter(match=CHUNK + b"*", count=1000)
            return {key for name in names if (key := chunk_key_of(name))}

        return self._connection.ask(job, SCAN_S)

    def _tags(self, namespace: str | None) -> list[bytes]:
        self._refuse_closed()
        return self._ledger.namespaces() if namespace is None else [namespace_tag(namespace)]

    def _strike_lost(self) -> None:
        """Stop counting what the server has evicted."""
        if not self.read_only:
            for tag in self._tags(None):
                self._ledger.strike_lost(tag)
        self._counted = self._clock.monotonic()

    def _write_notes(self) -> None:
        """Write what was noted of reads. Nothing is lost but recency and counts if that cannot be done."""
        notes = self._traffic.take()
        if self.read_only:
            self._traffic.put_back(Notes(counts=notes.counts))  # those who write have uses of their own
            return
        with contextlib.suppress(StoreError):
            self._note(notes)

    def _note(self, notes: Notes) -> None:
        try:
            free = self._ledger.note(notes)
            self._connection.ask(lambda client: chunks.keep(client, free, pinned=False))
        except StoreError:
            self._traffic.put_back(notes)
            raise

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"the KV store at {self.config.where} is closed: open it again")

    def _refuse_writing(self) -> None:
        self._refuse_closed()
        if self.read_only:
            raise StoreUnavailable(f"the KV store at {self.config.where} is open for reading only")
