"""The only way that blend/ and engine/ read chunk KV, and the only place that knows of remote chunks.

    look-up -> local store -> copies of it on the device, in pinned memory, in memory -> the record itself
            -> absent here: a whole copy -> the remote source (transfer.py)

fetch     chunks -> views, or a Miss with a reason for each; what a request costs travels in its ChunkRequests
prefetch  a queued prompt: start its transfers, keep what others read of it

The local snapshot is asked first; a copy is used for that record alone. So deletions and other processes' writes need no
invalidation. Content-addressed records never change, so a whole copy of a chunk that is not here saves its transfer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias
from weakref import WeakSet

from blendserve.errors import (
    BlendserveError,
    ChunkLost,
    CorruptRecord,
    StoreCircuitOpen,
    StoreError,
    StoreVersion,
)
from blendserve.fetch.copies import Copies
from blendserve.fetch.incoming import ChunkRequest, IncomingChunk
from blendserve.fetch.plan import LevelPlanner, plan
from blendserve.fetch.source import ANY, RemoteSource, StoreSource
from blendserve.fetch.tiered import TieredStore
from blendserve.fetch.transfer import Compute, Remote, ShapeOf, Transfer
from blendserve.kv import ChunkKV
from blendserve.store import ChunkKey, ChunkView, KVStore, MemoryStore, Miss, Snapshot, StoreStats, TensorView
from blendserve.store.base import LOCAL, REMOTE
from blendserve.store.codecs.base import SLOW, UNREACHABLE
from blendserve.store.view import open_view

COMPUTED = "computed"  # as a source
Hold: TypeAlias = ExitStack  # of a queued prompt: closing it drops what was kept for the prompt

log = logging.getLogger(__name__)


class KVFetcher:
    """Brings chunk KV to the reader from the nearest place that has it. Thread-safe.

    A failure is a Miss with a reason, never an exception.
    """

    def __init__(
        self,
        store: KVStore,
        copies: Copies | None = None,
        source: RemoteSource | None = None,
        prefetch_bytes: int = 0,
        planner: LevelPlanner = plan,
        early_start: bool = True,
    ) -> None:
        """source: of chunks that the store lacks; default: the store's own, if it is on another machine.

        prefetch_bytes: limit of chunks that are read ahead for queued prompts. planner, early_start: see Remote.
        """
        self.store = store
        self.local = store
        self.source = source
        self.failed_writes = 0  # chunks that requests missed, and that could not be stored
        self.tiered = store if isinstance(store, TieredStore) else None
        if self.tiered:
            self.local = self.tiered.local
            self.source = source or self.tiered.source
        elif store.is_remote:
            self.local = MemoryStore(0)
            self.source = source or StoreSource(store)
        self.copies = copies or Copies()
        self._prefetch_bytes = prefetch_bytes
        # None: no chunks come from other machines, so costs in a ChunkRequest do not matter.
        self.remote = Remote(self.source, planner, early_start) if self.source else None
        # The engine sets how its model's chunks are shaped: a chunk of another shape is a miss, as kernels rely on it.
        self.shape_of: ShapeOf | None = None  # None accepts every shape
        self.on_delete: list[Callable[[frozenset[ChunkKey]], None]] = []
        self._open = WeakSet[Fetch]()
        self._logged = ""  # the last failure of the local store
        self._lock = threading.Lock()

    @contextmanager
    def fetch(self, requests: Sequence[ChunkRequest], compute: Compute | None = None) -> Iterator[Fetch]:
        """Look all of them up and start all transfers; returns when the prefill may begin.

        compute: called in this thread, for requests with a `compute_s`, while the link is the slower of the two.
        """
        with ExitStack() as stack:
            fetch = Fetch(self, compute)
            try:
                fetch.snapshot = stack.enter_context(self.local.snapshot())
            except StoreError as error:
                fetch.trouble = self.explain(error)
            with self._lock:
                self._open.add(fetch)
            stack.callback(fetch.end)
            fetch.extend(requests)
            yield fetch

    def explain(self, error: StoreError) -> str:
        """Return why the local store cannot be read, for reports. Equal messages in a row are logged once."""
        if not isinstance(error, StoreCircuitOpen) and str(error) != self._logged:
            self._logged = str(error)
            log.warning("the KV store cannot be read: %s", error)
        return error.public_message

    def prefetch(self, requests: Sequence[ChunkRequest]) -> Hold:
        """Prefetch the remote chunks of a queued prompt, and keep what is read until the hold is closed.

        The event loop calls it, so it waits for no store.
        """
        keys = frozenset(request.key for request in requests)

        def absent() -> list[ChunkRequest]:
            here: set[ChunkKey] = set(self.copies.keys())
            with suppress(StoreError):
                here |= self.local.contains(keys)
            return [request for request in requests if request.key not in here]

        with ExitStack() as hold:
            self.copies.shared.hold(keys)
            hold.callback(self.copies.shared.release, keys)
            if self.remote and self.remote.incoming.n_bytes < self._prefetch_bytes:
                hold.callback(self.remote.prefetch(absent).close)
            return hold.pop_all()

    def warm_up(self, keys: Sequence[ChunkKey] = ()) -> None:
        """Probe the link before the first prompt, with one of these chunks; with any chunk if there are none."""
        if self.source:
            with suppress(BlendserveError):  # the source logs its own failures
                self.source.link.probe_now(partial(self.source.probe, keys))

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """Drop what is known of chunks that were stored or deleted; open fetches make no new copies of them."""
        gone = frozenset(keys)
        with self._lock:
            for fetch in self._open:
                fetch.forgotten |= gone
        self.copies.drop(gone)
        if self.remote:
            self.remote.incoming.forget(gone)

    def deleted(self, keys: Iterable[ChunkKey]) -> None:
        """Forget deleted chunks, and tell the listeners, which keep token ids."""
        gone = frozenset(keys)
        self.forget(gone)
        for listener in self.on_delete:
            listener(gone)

    def locate(self, keys: Iterable[ChunkKey], remote: bool = False) -> dict[ChunkKey, str]:
        """Return where each known chunk would be read from. remote: ask the source, too, which may take a round trip.

        Raises StoreError if there is only one place to look, and that fails.
        """
        asked = list(keys)
        found: dict[ChunkKey, str] = {}
        may_fail = suppress(*([StoreError] if self.source and self.local.cap_bytes else []))
        with may_fail:
            found = dict.fromkeys(self.local.contains(asked), LOCAL)
        found |= self.copies.locate(asked if self.source else [*found])
        left = [key for key in asked if key not in found]
        if self.source and remote and left:
            with may_fail:
                found |= dict.fromkeys(self.source.contains(left), REMOTE)
        return found

    def resident(self) -> frozenset[ChunkKey]:
        """Return the chunks in this process's memory or on its device, for routing between replicas."""
        own = () if self.local.persistent else self.local.keys()
        return self.copies.keys().union(own)

    def stats(self, namespace: str | None = None) -> StoreStats:
        """Return the store's statistics; without a namespace, also those of the caches, which all tenants share."""
        stats = self.store.stats(namespace)
        return stats if namespace is not None else replace(stats, tiers=self.copies.stats())

    def copy_here(self, keys: Sequence[ChunkKey]) -> int:
        """Fetch chunks into the local store, in the background -> how many are there, or will be. Raises StoreError."""
        here = self.local.contains(keys)
        if not self.remote:
            return len(here)
        transfer = Transfer(self.remote, self.local.blobs.get)
        try:
            transfer.add([ChunkRequest(key, 0) for key in keys if key not in here])
            transfer.finish()
            fetched = [chunk for chunk in transfer.chunks.values() if chunk.is_whole]
            for chunk in fetched:
                self.keep(chunk)
        finally:
            transfer.close()
        return len(here) + len(fetched)

    def flush(self) -> None:
        """Wait until fetched chunks are in the local store, stored ones in the remote one, and no probe runs."""
        if self.tiered:
            self.tiered.flush()
        if self.source:
            self.source.link.wait()

    def close(self) -> None:
        """Free the copies and end transfers; the store is its opener's to close."""
        self.copies = Copies()
        if self.remote:
            self.remote.close()

    def keep(self, chunk: IncomingChunk) -> None:
        """Store a fetched chunk here, in the background; until then later prompts find it in memory."""
        store = self.tiered
        remote = self.remote
        if not remote or not store or not store.cap_bytes:
            return
        with remote.incoming.changed:  # several fetches of the chunk may end at once
            if chunk.is_kept:
                return
            chunk.is_kept = True
            chunk.users += 1
        record = chunk.record()

        def write() -> None:
            try:
                if remote.incoming.has(chunk):  # else it was stored or deleted meanwhile
                    store.put_local(chunk.key, record)
            finally:
                remote.incoming.release(chunk)

        if not store.queue.add(chunk.key, record.n_bytes, write):
            remote.incoming.release(chunk)


@dataclass(eq=False)
class Fetch:
    """The chunks that one prompt got. Valid until the `with` block ends. Threads may share it."""

    fetcher: KVFetcher
    compute: Compute | None
    snapshot: Snapshot | None = None  # None: the local store cannot be read
    trouble: str = ""  # why
    views: dict[ChunkKey, ChunkView] = field(default_factory=dict)
    misses: dict[ChunkKey, Miss] = field(default_factory=dict)
    computed: Mapping[ChunkKey, ChunkKV] = field(default_factory=dict)  # while others were in transit
    source: dict[ChunkKey, str] = field(default_factory=dict)  # device host memory local remote computed
    forgotten: frozenset[ChunkKey] = frozenset()  # stored or deleted since this was opened

    def __post_init__(self) -> None:
        self._requests: dict[ChunkKey, ChunkRequest] = {}
        self._transfer: Transfer | None = None
        self._reading = 0.0, 0  # seconds, tokens

    @property
    def waited_s(self) -> float:
        """Return the time in which a thread waited for the link."""
        return self._transfer.deadline.waited if self._transfer else 0.0

    def extend(self, requests: Sequence[ChunkRequest]) -> None:
        """Look more chunks up, such as near-duplicate donors. Known ones are not looked up again."""
        new = {r.key: r for r in requests if r.key not in self._requests}
        self._requests |= new
        for key in new:
            self._accept(key, self._read_local(key), LOCAL)
        remote = self.fetcher.remote
        absent = [key for key in new if key in self.misses and not self._use_copy(key)] if remote else []
        if not remote or not absent:
            return
        if self._transfer is None:
            self._transfer = Transfer(
                remote, self.fetcher.local.blobs.get, self.compute, shape_of=self.fetcher.shape_of
            )
        self._transfer.add([new[key] for key in absent])
        self._transfer.run()
        self.computed = self._transfer.computed
        for key in absent:
            self._receive(key)
        if store := self.fetcher.tiered:
            n_found = sum(key in self.views for key in absent)
            store.count("hits", n_found)
            store.count("misses", len(absent) - n_found)

    def drop(self, lost: StoreError) -> None:
        """Wait, after an error in a layer, until nothing is in transit. `views` and `misses` are final then."""
        if isinstance(lost, CorruptRecord):
            self.fetcher.copies.drop([lost.key])
            self._miss(lost.key, Miss("corrupt", lost.what))
        elif isinstance(lost, ChunkLost) and self._transfer:
            self._transfer.finish()
            for key in [key for key in self._transfer.chunks if self.source.get(key) == REMOTE]:
                self._receive(key)
        else:
            self.snapshot = None
            self.trouble = self.fetcher.explain(lost)
            for key in [*self.views]:
                self._miss(key, Miss(UNREACHABLE, self.trouble))

    def record_reading(self, seconds: float, tokens: int) -> None:
        """Record that the prefill read and decoded the KV of these tokens in this time, without waiting."""
        self._reading = seconds, tokens

    def end(self) -> None:
        """Store fetched chunks here, record the time of reading, and probe the link if some chunks did not come."""
        transfer = self._transfer
        source = self.fetcher.source
        if not transfer or not source:
            return
        fetched = [chunk for key, chunk in transfer.chunks.items() if self.source.get(key) == REMOTE]
        for chunk in fetched:
            if chunk.is_whole and chunk.key not in self.forgotten:
                self.fetcher.keep(chunk)
        if fetched and not source.max_parallel:
            source.link.record_decoding(ANY, *self._reading)
        if store := self.fetcher.tiered:
            store.count("failures", transfer.has_failed)
        transfer.close()
        if keys := [key for key, miss in self.misses.items() if miss.kind in (SLOW, UNREACHABLE)]:
            source.link.probe_later(partial(source.probe, keys))

    def _read_local(self, key: ChunkKey) -> ChunkView | Miss:
        if self.snapshot is None:
            return Miss(UNREACHABLE, self.trouble)
        try:
            record = self.snapshot.get(key)
        except (CorruptRecord, StoreVersion) as error:
            return Miss("corrupt", error.what if isinstance(error, CorruptRecord) else str(error))
        except StoreError as error:
            return Miss(UNREACHABLE, self.fetcher.explain(error))
        if record is None:
            return Miss("absent")
        shape_of = self.fetcher.shape_of
        shape = shape_of(self._requests[key].n_tokens) if shape_of else None
        return open_view(record, self.fetcher.local.blobs.get, shape)

    def _use_copy(self, key: ChunkKey) -> bool:
        """Use a whole copy of a chunk that is not here, which saves its transfer."""
        found = None if key in self.forgotten else self.fetcher.copies.whole(key)
        if found:
            self.views[key], self.source[key] = found
            del self.misses[key]
        return found is not None

    def _receive(self, key: ChunkKey) -> None:
        """Take what the transfer has of a chunk."""
        assert self._transfer
        if kv := self._transfer.computed.get(key):
            self.views[key] = TensorView(kv)
            self.source[key] = COMPUTED
            self.misses.pop(key, None)
            return
        found = self._transfer.get(key)
        chunk = self._transfer.chunks.get(key)
        if isinstance(found, Miss) and found.kind == "absent" and key in self.misses:
            return  # the reason of the local store stays
        self._accept(key, found, "memory" if chunk and chunk.is_kept else REMOTE)

    def _accept(self, key: ChunkKey, found: ChunkView | Miss, place: str) -> None:
        if isinstance(found, Miss):
            self._miss(key, found)
        elif found.n_tokens != self._requests[key].n_tokens:
            self._miss(key, Miss("corrupt", "is not the chunk that its key names"))
        else:
            name = ""
            if key not in self.forgotten:
                found, name = self.fetcher.copies.view(key, found)
            self.misses.pop(key, None)
            self.views[key] = found
            self.source[key] = name or place

    def _miss(self, key: ChunkKey, miss: Miss) -> None:
        self.views.pop(key, None)
        self.source.pop(key, None)
        self.misses[key] = miss
