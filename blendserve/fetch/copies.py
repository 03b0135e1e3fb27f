"""Decoded copies of chunks nearer than the store: on the device, in pinned memory, in memory.

    look-up -> record of the store -> device -> host -> memory -> the record itself

A cache does not answer for the store: the record is looked up first, and only a copy of that very record is used. So what
is deleted, replaced or another tenant's cannot be read from a copy. One exception: a whole copy of a chunk that a local
store in front of a remote one lacks saves the transfer.

A chunk is admitted whole, at the cap by the admission policy, and filled layer by layer as a prefill reads it. The
nearest cache that admits a chunk keeps it, and only that one.

Beside the caches, holds share what several queued prompts read: see HeldCopies.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from blendserve.config import StoreConfig
from blendserve.errors import ConfigError
from blendserve.fetch.copy_stream import CopyStream, copy_stream_to
from blendserve.fetch.pinned_ring import as_one, split_kv
from blendserve.registry import ADMISSIONS
from blendserve.store.base import TierStats
from blendserve.store.codecs.base import Pair
from blendserve.store.key import ChunkKey
from blendserve.store.policies import LRU, Admission, Always, Candidate
from blendserve.store.view import ChunkView

log = logging.getLogger(__name__)


@dataclass(slots=True)
class CacheEntry:
    """A chunk in a cache, as far as it has been read."""

    version: Hashable
    n_bytes: int  # of that memory, for all layers
    layers: list[Pair | None]
    gone: bool = False  # evicted: readers fill it no more

    @property
    def whole(self) -> bool:
        return all(self.layers)

    def view(self) -> ChunkView:
        """Of an entry that is whole, also after its eviction."""
        layers = [pair for pair in self.layers if pair]
        n_bytes = sum(map(_n_bytes, layers))
        n_tokens = int(layers[0][0].shape[1])
        return ChunkView(len(layers), n_tokens, n_bytes, n_bytes, self.version, layers.__getitem__)


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
        self.name, self.cap_bytes = name, cap_bytes
        self._admission, self._copy, self._footprint = admission, copy, footprint
        self._eviction = LRU()
        self._entries: OrderedDict[ChunkKey, CacheEntry] = OrderedDict()  # least recently used first
        self._bytes = self._hits = 0
        self._using = threading.Lock()

    def find(self, key: ChunkKey, version: Hashable) -> CacheEntry | None:
        """The entry of this very record; anything else under its key is dropped. Counts as a use."""
        with self._using:
            entry = self._entries.get(key)
            if entry is not None and entry.version != version:
                self._drop(key)
                return None
            if entry is not None:
                self._entries.move_to_end(key)
                self._hits += entry.whole
            return entry

    def __contains__(self, key: ChunkKey) -> bool:
        """Whether the chunk is here whole. Counts as no use of it."""
        entry = self._entries.get(key)
        return entry is not None and entry.whole

    def keys(self) -> frozenset[ChunkKey]:
        """Of the chunks that are here whole."""
        with self._using:
            return frozenset(key for key, entry in self._entries.items() if entry.whole)

    def held(self, key: ChunkKey) -> CacheEntry | None:
        """The entry of a chunk that is here whole, whichever record it came from. Counts as a use."""
        with self._using:
            entry = self._entries.get(key)
            if entry is None or not entry.whole:
                return None
            self._entries.move_to_end(key)
            self._hits += 1
            return entry

    def admit(self, key: ChunkKey, view: ChunkView) -> CacheEntry | None:
        """An entry for this chunk, if it is worth the chunks that are evicted for it."""
        n_bytes = view.n_layers * self._footprint(view.raw_bytes // view.n_layers)
        with self._using:
            candidates = (Candidate(k, entry.n_bytes) for k, entry in self._entries.items() if k != key)
            victims = self._eviction.victims(candidates, self._bytes + n_bytes - self.cap_bytes)
            if victims is None or (
                victims and not self._admission.admits(key, n_bytes, victims, len(self._entries))
            ):
                return None
            for victim in (key, *(v.key for v in victims)):
                self._drop(victim)
            entry = self._entries[key] = CacheEntry(view.version, n_bytes, [None] * view.n_layers)
            self._bytes += n_bytes
            return entry

    def fill(self, key: ChunkKey, entry: CacheEntry, l: int, pair: Pair) -> Pair:
        """Copy a layer of an admitted chunk -> the copy; what came when there is no memory for one."""
        if entry.gone:
            return pair
        try:
            copy = entry.layers[l] = self._copy(pair)
        except RuntimeError as error:  # CUDA's word for it; something else in the process has the memory
            log.warning("the %s cache grows no more: %s", self.name, str(error).splitlines()[0])
            with self._using:
                self._drop(key)
                self.cap_bytes = self._bytes
            return pair
        return copy

    def drop(self, key: ChunkKey) -> None:
        """Forget a chunk; who reads it reads on."""
        with self._using:
            self._drop(key)

    def clear(self) -> None:
        """Forget everything."""
        with self._using:
            for key in list(self._entries):
                self._drop(key)

    def stats(self) -> TierStats:
        with self._using:
            return TierStats(self.name, len(self._entries), self._bytes, self.cap_bytes, self._hits)

    def _drop(self, key: ChunkKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.gone = True
            self._bytes -= entry.n_bytes


class Copies:
    """All caches of one fetcher, the nearest first."""

    def __init__(self, caches: Sequence[CopyCache] = (), admission: Admission | None = None) -> None:
        """admission: sees every look-up."""
        self._caches, self._admission = tuple(caches), admission or Always()

    def view(self, key: ChunkKey, view: ChunkView) -> tuple[ChunkView, str]:
        """A view that reads from copies and makes them; the cache's name, if one has the chunk whole."""
        if not self._caches:
            return view, ""
        self._admission.record_access(key)
        places: list[tuple[CopyCache, CacheEntry]] = []
        for cache in self._caches:
            entry = cache.find(key, view.version) or (None if places else cache.admit(key, view))
            places += [(cache, entry)] if entry else []
            if entry and entry.whole:
                return _through(places, key, view), cache.name
        return _through(places, key, view), ""

    def whole(self, key: ChunkKey) -> tuple[ChunkView, str] | None:
        """A chunk that a cache has whole, whichever record it came from. Counts as a use."""
        for cache in self._caches:
            if entry := cache.held(key):
                return entry.view(), cache.name
        return None

    def locate(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, str]:
        """The name of the nearest cache that has each chunk whole. Counts as no use."""
        asked = list(keys)
        return {key: cache.name for cache in reversed(self._caches) for key in asked if key in cache}

    def keys(self) -> frozenset[ChunkKey]:
        return frozenset().union(*(cache.keys() for cache in self._caches))

    def drop(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            for cache in self._caches:
                cache.drop(key)

    def stats(self) -> tuple[TierStats, ...]:
        return tuple(cache.stats() for cache in self._caches)

    def clear(self) -> None:
        for cache in self._caches:
            cache.clear()


def _through(places: Sequence[tuple[CopyCache, CacheEntry]], key: ChunkKey, view: ChunkView) -> ChunkView:
    """The view, with each layer from the nearest place that has it; the places before that copy it."""

    def read(l: int, n: int = 0) -> Pair:
        if n == len(places):
            return view.layer(l)
        cache, entry = places[n]
        return entry.layers[l] or cache.fill(key, entry, l, read(l, n + 1))

    return view.reading(read)


def open_copies(config: StoreConfig, device: torch.device) -> Copies:
    """The caches that the settings ask for. Raises ConfigError for one that would do nothing on this device."""
    admission = ADMISSIONS.load(config.admission)()
    return Copies(open_caches(config, admission, device), admission)


def open_caches(
    config: StoreConfig, admission: Admission, device: torch.device, stream: CopyStream | None = None
) -> list[CopyCache]:
    """The caches that the settings ask for, the nearest first.

    stream: of copies to the device. Raises ConfigError for a cache that would do nothing there.
    """
    way = stream or copy_stream_to(device)
    if way is None:
        _refuse_gpus(config, device)
        return _memory_cache(config, admission)
    caches = []
    if config.device_bytes > (free := way.free_bytes()):
        raise ConfigError(
            f"setting 'store.device_bytes' cannot be {config.device_bytes}: beside the reader the GPU has {free} "
            "bytes free, and the caches of requests need some of them",
            setting="store.device_bytes",
        )
    if config.device_bytes:
        caches.append(CopyCache("device", config.device_bytes, admission, lambda pair: _sent(way, pair)))
    if config.memory_bytes:
        caches.append(
            CopyCache("host", config.memory_bytes, admission, lambda pair: _pinned(way, pair), _pinned_bytes)
        )
    return caches


def _memory_cache(config: StoreConfig, admission: Admission) -> list[CopyCache]:
    if not config.memory_bytes:
        return []
    return [
        CopyCache("memory", config.memory_bytes, admission, lambda pair: (pair[0].clone(), pair[1].clone()))
    ]


def _refuse_gpus(config: StoreConfig, device: torch.device) -> None:
    if config.device_bytes:
        raise ConfigError(
            f"setting 'store.device_bytes' cannot be {config.device_bytes}: the model runs on the "
            f"{device.type.upper()}; set store.memory_bytes, or model.device to a GPU",
            setting="store.device_bytes",
        )


def _sent(stream: CopyStream, pair: Pair) -> Pair:
    """On the device, ordered before later work on the stream."""
    with stream.entered():
        return split_kv([stream.send(part) for part in as_one(pair)])


def _pinned(stream: CopyStream, pair: Pair) -> Pair:
    """In one piece of pinned memory."""
    keys, values = pair
    half = keys.numel() * keys.element_size()
    both = stream.buffer(2 * half).view(keys.dtype).view(2, *keys.shape)
    return both[0].copy_(keys), both[1].copy_(values)


def _pinned_bytes(n_bytes: int) -> int:
    """torch's allocator of pinned memory gives out powers of two."""
    return 1 << max(0, n_bytes - 1).bit_length()


# Copies that queued prompts share


class Hold:
    """Keeps the copies of some chunks until it is closed. Closing is idempotent."""

    def __init__(self, copies: HeldCopies, keys: Iterable[ChunkKey]) -> None:
        self._copies, self._keys, self._closing = copies, frozenset(keys), threading.Lock()
        self._on_close: Callable[[], None] = lambda: None
        copies.retain(self._keys)

    def on_close(self, call: Callable[[], None]) -> None:
        """Call this, too, when it is closed."""
        self._on_close = call

    def close(self) -> None:
        with self._closing:
            keys, self._keys = self._keys, frozenset()
            call, self._on_close = self._on_close, lambda: None
        self._copies.release(keys)
        call()


class HeldCopies:
    """Decoded layers of chunks that at least two open holds name, at most `cap_bytes`. Thread-safe.

    A store's views end with its snapshot, so the layers are copies.
    """

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes, self.n_bytes = cap_bytes, 0
        self._holds: Counter[ChunkKey] = Counter()
        self._layers: dict[ChunkKey, dict[int, Pair]] = {}
        self._lock = threading.Lock()

    def retain(self, keys: frozenset[ChunkKey]) -> None:
        with self._lock:
            self._holds.update(keys)

    def release(self, keys: frozenset[ChunkKey]) -> None:
        """Drop the copies of chunks that no other hold names."""
        with self._lock:
            self._holds.subtract(keys)
            for key in [key for key in keys if self._holds[key] <= 0]:
                del self._holds[key]
                self.n_bytes -= sum(map(_n_bytes, self._layers.pop(key, {}).values()))

    def view(self, key: ChunkKey, view: ChunkView) -> ChunkView:
        """The same view, which reads and makes these copies."""
        return view.reading(partial(self._layer, key, view)) if self.cap_bytes else view

    def _layer(self, key: ChunkKey, view: ChunkView, l: int) -> Pair:
        """The copy of a layer; else the view's, copied if another hold names the chunk."""
        with self._lock:
            copy = self._layers.get(key, {}).get(l)
        if copy is not None:
            return copy
        pair = view.layer(l)
        with self._lock:
            copies = self._layers.setdefault(key, {}) if self._holds[key] > 1 else {l: pair}
            if l not in copies and self.n_bytes + _n_bytes(pair) <= self.cap_bytes:
                copies[l] = pair = (pair[0].clone(), pair[1].clone())
                self.n_bytes += _n_bytes(pair)
        return pair


def _n_bytes(pair: Pair) -> int:
    return sum(part.numel() * part.element_size() for part in pair)
