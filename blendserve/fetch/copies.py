"""Decoded copies of chunks nearer than the store: on the device, in pinned memory, in memory.

    look-up -> record of the store -> device -> host -> memory -> the record itself

A cache does not answer for the store: the record is looked up first, and only a copy of that very record is used. So a
deleted or replaced chunk, or another tenant's, cannot be read from a copy. One exception: a whole copy of a chunk that a
local store in front of a remote one lacks saves the transfer.

A chunk is admitted whole, at the cap by the admission policy, and filled layer by layer as a prefill reads it. Only the
nearest cache that admits a chunk keeps it. The last cache, SharedCopies, keeps what several queued prompts read.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from blendserve.config import StoreConfig
from blendserve.errors import ConfigError
from blendserve.fetch.copy_stream import CopyStream, as_one, copy_stream_to, split_kv
from blendserve.machine import checked_cap
from blendserve.registry import ADMISSIONS
from blendserve.store import ChunkKey, ChunkView
from blendserve.store.base import TierStats
from blendserve.store.codecs.base import Pair
from blendserve.store.policies import Admission, Always, Candidate, least_recent

log = logging.getLogger(__name__)


@dataclass(slots=True)
class CacheEntry:
    """A chunk in a cache, as far as it has been read."""

    version: Hashable
    n_bytes: int  # of that memory, for all layers
    layers: list[Pair | None]
    is_lossless: bool
    is_evicted: bool = False  # readers fill it no more

    @property
    def is_whole(self) -> bool:
        return all(self.layers)

    def view(self) -> ChunkView:
        """The view of an entry that is whole, also after its eviction."""
        layers = [pair for pair in self.layers if pair]
        n_bytes = sum(part.nbytes for pair in layers for part in pair)
        n_tokens = layers[0][0].shape[1]
        sizes = (len(layers), n_tokens, n_bytes, n_bytes)
        read = layers.__getitem__
        return ChunkView(*sizes, self.version, read, in_memory=True, is_lossless=self.is_lossless)


class CopyCache:
    """Chunks copied into one kind of memory, at most `cap_bytes` of them; the least recently used are evicted."""

    def __init__(
        self,
        name: str,
        cap_bytes: int,
        admission: Admission,
        copy: Callable[[Pair], Pair],
        footprint: Callable[[int], int] = int,
    ) -> None:
        """copy: a layer of a chunk into that memory. footprint: bytes of it that a copy of these bytes occupies."""
        self.name = name
        self.cap_bytes = cap_bytes
        self.n_bytes = 0
        self._admission = admission
        self._copy = copy
        self._footprint = footprint
        self._entries: OrderedDict[ChunkKey, CacheEntry] = OrderedDict()  # least recently used first
        self._hits = 0
        self._lock = threading.RLock()

    def find(self, key: ChunkKey, version: Hashable = None) -> CacheEntry | None:
        """The entry of this very record, dropping another one's; if None, of any record, if whole. Counts as a use."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or (version is None and not entry.is_whole):
                return None
            if version is not None and entry.version != version:
                self.drop(key)
                return None
            self._entries.move_to_end(key)
            self._hits += entry.is_whole
            return entry

    def __contains__(self, key: ChunkKey) -> bool:
        """Whether the chunk is here whole. Counts as no use of it."""
        entry = self._entries.get(key)
        return entry is not None and entry.is_whole

    def keys(self) -> list[ChunkKey]:
        """The chunks that are here whole."""
        with self._lock:
            return [key for key in self._entries if key in self]

    def admit(self, key: ChunkKey, view: ChunkView) -> CacheEntry | None:
        """An entry for this chunk, if it is worth the chunks that are evicted for it."""
        n_bytes = view.n_layers * self._footprint(view.raw_bytes // view.n_layers)
        with self._lock:
            candidates = (Candidate(k, entry.n_bytes) for k, entry in self._entries.items() if k != key)
            victims = least_recent(candidates, self.n_bytes + n_bytes - self.cap_bytes)
            admits = self._admission.admits
            if victims is None or (victims and not admits(key, n_bytes, victims, len(self._entries))):
                return None
            for victim in (key, *(v.key for v in victims)):
                self.drop(victim)
            layers: list[Pair | None] = [None] * view.n_layers
            entry = self._entries[key] = CacheEntry(view.version, n_bytes, layers, view.is_lossless)
            self.n_bytes += n_bytes
            return entry

    def fill(self, key: ChunkKey, entry: CacheEntry, l: int, pair: Pair) -> Pair:
        """Copy a layer of an admitted chunk -> the copy; the layer itself if there is no memory for one."""
        if entry.is_evicted:
            return pair
        try:
            pair = entry.layers[l] = self._copy(pair)
        except RuntimeError as error:  # out of memory on a device: other work in this process needs it
            log.warning("the %s cache cannot grow further: %s", self.name, str(error).splitlines()[0])
            with self._lock:
                self.drop(key)
                self.cap_bytes = self.n_bytes
        return pair

    def drop(self, key: ChunkKey) -> None:
        """Forget a chunk; its readers read on."""
        with self._lock:
            if entry := self._entries.pop(key, None):
                entry.is_evicted = True
                self.n_bytes -= entry.n_bytes

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(self.name, len(self._entries), self.n_bytes, self.cap_bytes, self._hits)


class SharedCopies(CopyCache):
    """Copies of chunks that at least two queued prompts use, at most `cap_bytes`; none is evicted for another."""

    def __init__(self, cap_bytes: int = 0) -> None:
        super().__init__("memory", cap_bytes, Always(), _cloned)
        self._holds: Counter[ChunkKey] = Counter()

    @property
    def n_held(self) -> int:
        """Chunks that queued prompts use; 0 when no request waits or is prefilled."""
        return len(self._holds)

    def hold(self, keys: Iterable[ChunkKey]) -> None:
        """A prompt of these chunks is queued."""
        with self._lock:
            self._holds.update(keys)

    def release(self, keys: Iterable[ChunkKey]) -> None:
        """It has read them: drop the copies of chunks that no other one uses."""
        with self._lock:
            self._holds.subtract(keys)
            for key in [key for key in keys if self._holds[key] <= 0]:
                del self._holds[key]
                self.drop(key)

    def admit(self, key: ChunkKey, view: ChunkView) -> CacheEntry | None:
        with self._lock:
            has_room = self.n_bytes + view.raw_bytes <= self.cap_bytes
            return super().admit(key, view) if self._holds[key] > 1 and has_room else None


class Copies:
    """All caches of one fetcher, the nearest first."""

    def __init__(self, caches: Sequence[CopyCache] = (), admission: Admission | None = None) -> None:
        """admission: sees every look-up."""
        self._caches = tuple(caches)
        self._admission = admission or Always()
        self.shared = SharedCopies()
        self._all = (*self._caches, self.shared)

    def view(self, key: ChunkKey, view: ChunkView) -> tuple[ChunkView, str]:
        """A view that reads from copies and makes them; the cache's name, if one has the chunk whole.

        Shared copies have none: they end with the queue, and a report must not depend on other prompts.
        """
        if not self._caches and not self.shared.cap_bytes:
            return view, ""
        self._admission.record_access(key)
        places: list[tuple[CopyCache, CacheEntry]] = []
        name = ""
        for cache in self._all:
            entry = cache.find(key, view.version) or (None if places else cache.admit(key, view))
            places += [(cache, entry)] if entry else []
            if entry and entry.is_whole:
                name = "" if cache is self.shared else cache.name
                break
        return _read_through(places, key, view), name

    def whole(self, key: ChunkKey) -> tuple[ChunkView, str] | None:
        """A chunk that a cache has whole, whichever record it came from. Counts as a use."""
        return next(((e.view(), cache.name) for cache in self._all if (e := cache.find(key))), None)

    def locate(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, str]:
        """The name of the nearest cache that has each chunk whole. Counts as no use."""
        asked = list(keys)
        return {key: cache.name for cache in reversed(self._all) for key in asked if key in cache}

    def keys(self) -> frozenset[ChunkKey]:
        return frozenset().union(*(cache.keys() for cache in self._all))

    def drop(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            for cache in self._all:
                cache.drop(key)

    def stats(self) -> tuple[TierStats, ...]:
        """The statistics of the caches that the settings ask for."""
        return tuple(cache.stats() for cache in self._caches)


def _read_through(
    places: Sequence[tuple[CopyCache, CacheEntry]], key: ChunkKey, view: ChunkView
) -> ChunkView:
    """The view, with each layer from the nearest place that has it; the places before that copy it."""
    if not places:
        return view

    def read(l: int, n: int = 0) -> Pair:
        if n == len(places):
            return view.layer(l)
        cache, entry = places[n]
        return entry.layers[l] or cache.fill(key, entry, l, read(l, n + 1))

    return replace(view.reading(read), in_memory=len(places) == 1 and places[0][1].is_whole)


def open_copies(config: StoreConfig, device: torch.device, stream: CopyStream | None = None) -> Copies:
    """The caches that the settings ask for. stream: of copies to the device, by default its own.

    Raises ConfigError for a cache that would do nothing on this device.
    """
    admission = ADMISSIONS.load(config.admission)()
    stream = stream or copy_stream_to(device)
    if config.device_bytes > (free := stream.free_bytes() if stream else 0):
        why = f"the model runs on the {device.type.upper()}; set store.memory_bytes, or model.device to a GPU"
        if stream:
            why = f"the GPU has {free} bytes free besides the model, and the caches of requests need some of them"
        raise ConfigError(
            f"setting 'store.device_bytes' cannot be {config.device_bytes}: {why}",
            setting="store.device_bytes",
        )
    checked_cap(config.memory_bytes, "store.memory_bytes")
    caches = [CopyCache("memory", config.memory_bytes, admission, _cloned)]
    if stream:
        device_cache = CopyCache("device", config.device_bytes, admission, partial(_sent, stream))
        to_host = partial(_pinned, stream)
        caches = [device_cache, CopyCache("host", config.memory_bytes, admission, to_host, _pinned_bytes)]
    return Copies([cache for cache in caches if cache.cap_bytes], admission)


def _cloned(pair: Pair) -> Pair:
    return pair[0].clone(), pair[1].clone()


def _sent(stream: CopyStream, pair: Pair) -> Pair:
    """Send a pair to the device, ordered before later work on the stream."""
    with stream.entered():
        return split_kv([stream.send(part) for part in as_one(pair)])


def _pinned(stream: CopyStream, pair: Pair) -> Pair:
    return split_kv([stream.pinned(part) for part in as_one(pair)])


def _pinned_bytes(n_bytes: int) -> int:
    """torch's allocator of pinned memory gives out powers of two."""
    return 1 << max(0, n_bytes - 1).bit_length()
