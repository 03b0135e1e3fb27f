"""The only way that blend/ and engine/ read chunk KV: look all of a prompt's chunks up, start transfers, hand out views.

fetch    chunks -> views, or a Miss with a reason for each; what a request costs travels in its ChunkRequests
prefetch a queued prompt: start its transfers, keep what others read of it
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace

from blendserve.core import ChunkKV
from blendserve.errors import ChunkLost, CorruptRecord, StoreError, StoreVersion
from blendserve.fetch.copies import Copies, HeldCopies, HeldView, Hold
from blendserve.fetch.link import LinkEstimator
from blendserve.fetch.waiting import ComputeWhileWaiting
from blendserve.store import (
    ChunkInfo,
    ChunkKey,
    ChunkView,
    KVStore,
    LayeredStore,
    Miss,
    Reads,
    StoreStats,
    TensorView,
)
from blendserve.store.request_reads import REMOTE, TimeSaved

COMPUTED = "computed"  # as a source
MIN_SPEEDUP = 0.95  # of fetching over computing, which is exact


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """One chunk that a prompt can use, and what having it is worth."""

    key: ChunkKey
    n_tokens: int
    saved_s: float | None = None  # prefill time that having it saves; None: fetch it whatever that takes
    compute_s: float | None = None  # time to compute it alone; None: never compute it while waiting


Compute = Callable[[ChunkRequest], ChunkKV]


class KVFetcher:
    """Brings chunk KV to the reader from the nearest place that has it. Thread-safe.

    A failure is a Miss with a reason, never an exception.
    """

    def __init__(
        self,
        store: KVStore,
        link: LinkEstimator | None = None,
        copies: Copies | None = None,
        held_bytes: int = 0,
    ) -> None:
        """link: of the store's remote part. held_bytes: limit of the copies that queued prompts share."""
        self.store, self.link, self.copies = store, link or LinkEstimator(), copies or Copies()
        self.held = HeldCopies(held_bytes)
        self._open: set[Fetch] = set()
        self._lock = threading.Lock()

    @property
    def has_remote(self) -> bool:
        """Whether chunks may come from another machine: only then do costs in a ChunkRequest matter."""
        return self.store.far

    @contextmanager
    def fetch(self, requests: Sequence[ChunkRequest], compute: Compute | None = None) -> Iterator[Fetch]:
        """Look all of them up and start all transfers; returns when the prefill may begin.

        compute: called in this thread, for requests with a `compute_s`, while the link is the slower of the two.
        """
        with ExitStack() as stack:
            try:
                snapshot: Reads | None = stack.enter_context(self.store.reading())
                fetch = Fetch(self, snapshot, compute)
            except StoreError as error:
                fetch = Fetch(self, None, compute, f"the store cannot be read: {error}")
            with self._lock:
                self._open.add(fetch)
            try:
                fetch.extend(requests)
                yield fetch
            finally:
                with self._lock:
                    self._open.remove(fetch)
        fetch.record()

    def prefetch(self, requests: Sequence[ChunkRequest]) -> Hold:
        """A prompt is queued: read its remote chunks ahead; keep what is read of it until the hold is closed."""
        with suppress(StoreError):
            skipped = self.slow(requests).keys() | self.copies.keys()
            self.store.prefetch([r.key for r in requests if r.key not in skipped], self.time_saved(requests))
        return Hold(self.held, [request.key for request in requests])

    def warm_up(self, requests: Sequence[ChunkRequest]) -> None:
        """Probe the link with these chunks, before the first prompt."""
        if self.has_remote:
            self.link.probe(self.store, [request.key for request in requests])

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """Drop copies of deleted chunks; fetches that are open make no new ones."""
        gone = frozenset(keys)
        with self._lock:
            for fetch in self._open:
                fetch.forgotten |= gone
        self.copies.drop(gone)

    def locate(self, infos: Mapping[ChunkKey, ChunkInfo]) -> dict[ChunkKey, str]:
        """Where each of these stored chunks would be read from."""
        return {key: info.tier for key, info in infos.items()} | self.copies.locate(infos)

    def resident(self) -> frozenset[ChunkKey]:
        """Chunks in this process's memory or on its device (for routing between replicas)."""
        return self.store.hot() | self.copies.keys()

    def stats(self, namespace: str | None = None) -> StoreStats:
        """The store's; with the caches' for the whole, as those hold what all tenants read."""
        stats = self.store.stats(namespace)
        return stats if namespace is not None else replace(stats, tiers=self.copies.stats())

    def close(self) -> None:
        """Free the copies; the store is its opener's to close."""
        self.copies.clear()

    def wait(self) -> None:
        """Wait until no probe is under way."""
        self.link.wait()

    def slow(self, requests: Sequence[ChunkRequest]) -> dict[ChunkKey, Miss]:
        """Remote chunks that are quicker to compute than to transfer, all or none. Raises StoreError."""
        costed = {r.key: r for r in requests if r.saved_s is not None}
        if not costed or not self.has_remote or self.store.compares_cost:
            return {}
        remote = costed.keys() - self.store.present(costed, remote=False)
        saved = sum(costed[key].saved_s or 0.0 for key in remote)
        fetching = self.link.seconds(sum(costed[key].n_tokens for key in remote))
        if fetching is None or not remote or fetching < MIN_SPEEDUP * saved:
            return {}
        return dict.fromkeys(
            remote,
            Miss(
                "slow link",
                f"fetching was estimated to take {fetching * 1e3:.0f} ms, and to save {saved * 1e3:.0f} ms",
            ),
        )

    def time_saved(self, requests: Iterable[ChunkRequest]) -> TimeSaved | None:
        """What a store that compares costs compares fetching with; None where every chunk is fetched."""
        saved: Mapping[ChunkKey, float] = {r.key: r.saved_s for r in requests if r.saved_s is not None}
        tokens = sum(r.n_tokens for r in requests if r.saved_s is not None)
        if not saved or not self.store.compares_cost:
            return None
        return TimeSaved(sum(saved.values()) / max(1, tokens), saved)


@dataclass(eq=False)
class Fetch:
    """What one prompt got. Valid until the `with` block ends. Threads may share it."""

    fetcher: KVFetcher
    snapshot: Reads | None  # None: the store cannot be read
    compute: Compute | None
    trouble: str = ""  # why the store cannot be read
    views: dict[ChunkKey, ChunkView] = field(default_factory=dict)
    misses: dict[ChunkKey, Miss] = field(default_factory=dict)
    computed: dict[ChunkKey, ChunkKV] = field(default_factory=dict)  # while others were in transit
    source: dict[ChunkKey, str] = field(default_factory=dict)  # device host memory local remote computed
    forgotten: frozenset[ChunkKey] = frozenset()  # deleted since this was opened

    def __post_init__(self) -> None:
        self._waiting = ComputeWhileWaiting(self.compute)
        self._requests: dict[ChunkKey, ChunkRequest] = {}
        self._fetch_s = self._reading_s = 0.0
        self._reading_tokens = 0

    @property
    def waited_s(self) -> float:
        """Time in which a thread waited for the link."""
        return self._waiting.waited

    def extend(self, requests: Sequence[ChunkRequest]) -> None:
        """Look more chunks up, such as near-duplicate donors. Those that are known are not looked up again."""
        new = {r.key: r for r in requests if r.key not in self._requests}
        self._requests |= new
        if self.snapshot is None:
            self.misses |= dict.fromkeys(new, Miss("unreachable", self.trouble))
            return
        clock = self.fetcher.link.clock
        start = clock()
        with suppress(StoreError):
            self.misses |= self.fetcher.slow([*new.values()])
        self._use_copies(new)
        asked = [key for key in new if key not in self.misses and key not in self.views]
        self._waiting.expect(new.values(), self.fetcher.store.compares_cost)
        self.snapshot.expect(
            asked, self._waiting if self.fetcher.has_remote else None, self.fetcher.time_saved(new.values())
        )
        local = self._held_locally(asked)
        for key in sorted(
            asked, key=lambda key: key not in local
        ):  # what comes from afar evicts no copy of this prompt
            self._look_up(key)
        self._fetch_s += clock() - start

    def _held_locally(self, keys: Sequence[ChunkKey]) -> Set[ChunkKey]:
        """Those in the local store or in a copy; all of them where there is no remote store."""
        store = self.fetcher.store
        return store.present(keys, remote=False) if isinstance(store, LayeredStore) else set(keys)

    def _use_copies(self, keys: Iterable[ChunkKey]) -> None:
        """Of chunks that a local store in front of a remote one lacks: a whole copy saves the transfer."""
        store, copies = self.fetcher.store, self.fetcher.copies
        whole = set(keys) & copies.keys() - self.forgotten if isinstance(store, LayeredStore) else set()
        for key in whole - store.present(whole, remote=False) if whole else ():
            if found := copies.whole(key):
                self.views[key], self.source[key] = found
                self.misses.pop(key, None)

    def drop(self, lost: StoreError) -> None:
        """After an error in a layer: wait until nothing is in transit. `views` and `misses` are final then."""
        if isinstance(lost, CorruptRecord):
            self._miss(lost.key, Miss("corrupt", lost.what))
        elif isinstance(lost, ChunkLost):
            for key in [key for key, source in self.source.items() if source == REMOTE]:
                self._look_up(key)
        else:
            self.snapshot, self.trouble = None, f"the store cannot be read: {lost}"
            for key in [*self.views]:
                self._miss(key, Miss("unreachable", self.trouble))

    def record_reading(self, seconds: float, tokens: int) -> None:
        """Reading and decoding so many tokens' KV took the prefill so many seconds, waiting excluded."""
        self._reading_s, self._reading_tokens = seconds, tokens

    def record(self) -> None:
        """Tell the link estimator what this prompt took; probe the link if some chunks did not come."""
        link = self.fetcher.link
        if remote := sum(self.views[key].n_tokens for key, source in self.source.items() if source == REMOTE):
            link.record(self._fetch_s + self.waited_s, remote)
            link.record_decoding(self._reading_s, self._reading_tokens)
        if self.fetcher.has_remote:
            kinds = ("slow link", "unreachable")
            link.probe_later(
                self.fetcher.store, [key for key, miss in self.misses.items() if miss.kind in kinds]
            )

    def _look_up(self, key: ChunkKey) -> None:
        found = None if key in self._waiting.computed else self._read(key)
        if kv := self._waiting.computed.get(key):  # by now: the read may have waited for the link
            self.computed[key], self.views[key], self.source[key] = kv, TensorView(kv), COMPUTED
        elif isinstance(found, Miss) or found is None:
            self._miss(key, found or Miss("absent"))
        elif found.n_tokens != self._requests[key].n_tokens:
            self._miss(key, Miss("corrupt", "is not the chunk that its key names"))
        else:
            held, name = self.fetcher.held, ""
            if key not in self.forgotten:
                found, name = self.fetcher.copies.view(key, found)
            self.views[key] = HeldView(key, found, held) if held.cap_bytes else found
            self.source[key] = name or (self.snapshot.tier(key) if self.snapshot else "")

    def _read(self, key: ChunkKey) -> ChunkView | Miss | None:
        assert self.snapshot is not None
        try:
            view = self.snapshot.get(key)
            why = None if view else self.snapshot.undecodable.get(key)
            return Miss(why.kind, str(why)) if why else view
        except CorruptRecord as error:
            return Miss("corrupt", error.what)
        except StoreVersion as error:
            return Miss("corrupt", str(error))
        except StoreError as error:
            return Miss("unreachable", f"the store cannot be read: {error}")

    def _miss(self, key: ChunkKey, miss: Miss) -> None:
        self.views.pop(key, None)
        self.source.pop(key, None)
        self.misses[key] = miss
