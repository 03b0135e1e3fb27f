"""Hot chunks kept nearer than the store: in the device's memory, and in pinned memory, which it fetches by itself.

    look-up -> what the store's snapshot holds -> device tier -> host tier -> the store's own bytes

A tier never answers for the store. Each look-up goes to the store's snapshot first, and only the very record found
there is looked for in a tier, by its version. So what is deleted, replaced, another tenant's or a later snapshot's cannot
be met, whoever changed the store. A chunk deleted here leaves the tiers at once, one that another process deleted when
it is evicted.

A chunk is admitted whole, at a tier's cap by the store's own admission policy, and filled layer by layer as a request
reads it, decoded. It is kept by the nearest tier that admits it, and by one of them.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from blendserve.config import TiersConfig
from blendserve.errors import ConfigError
from blendserve.kernels.cuda.staging import CopyStream, apart, copy_stream_to, joined
from blendserve.store.base import ChunkInfo, KVStore, StoreStats, TierStats
from blendserve.store.codecs.base import Pair, Undecodable
from blendserve.store.key import ChunkKey
from blendserve.store.policies import LRU, Admission, Candidate
from blendserve.store.record import ChunkRecord
from blendserve.store.request_reads import Meanwhile, Reads, TimeSaved
from blendserve.store.view import ChunkView
from blendserve.store.wrapped import WrappedStore

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TierEntry:
    """A chunk in a tier, as far as it has been read."""

    version: Hashable
    n_bytes: int  # of that memory, for all layers
    layers: list[Pair | None]
    gone: bool = field(default=False)  # from the tier: who still reads it adds nothing to it

    @property
    def whole(self) -> bool:
        return all(self.layers)


class HeldChunk:
    """A ChunkView of an entry that is whole."""

    def __init__(self, entry: TierEntry) -> None:
        self._layers = [pair for pair in entry.layers if pair]
        self.version, self.n_layers = entry.version, len(entry.layers)
        self.n_tokens = int(self._layers[0][0].shape[1])
        self.n_bytes = self.raw_bytes = sum(
            p.numel() * p.element_size() for pair in self._layers for p in pair
        )

    def layer(self, l: int) -> Pair:
        if not 0 <= l < self.n_layers:
            raise IndexError(f"a chunk of {self.n_layers} layers has no layer {l}")
        return self._layers[l]


class Tier:
    """Chunks copied into one kind of memory, at most `cap_bytes` of them; the least recently used are evicted."""

    def __init__(
        self,
        name: str,
        cap_bytes: int,
        admission: Admission,
        copy: Callable[[Pair], Pair],
        footprint: Callable[[int], int] = int,
    ) -> None:
        """copy: a layer of a chunk into that memory. footprint: bytes of it that a copy of so many bytes occupies."""
        self.name, self.cap_bytes = name, cap_bytes
        self._admission, self._copy, self._footprint = admission, copy, footprint
        self._eviction = LRU()
        self._entries: OrderedDict[ChunkKey, TierEntry] = OrderedDict()  # least recently used first
        self._bytes = self._hits = 0
        self._using = threading.Lock()

    def find(self, key: ChunkKey, version: Hashable) -> TierEntry | None:
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

    def held(self, key: ChunkKey) -> TierEntry | None:
        """The entry of a chunk that is here whole, whichever record it came from. Counts as a use."""
        with self._using:
            entry = self._entries.get(key)
            if entry is None or not entry.whole:
                return None
            self._entries.move_to_end(key)
            self._hits += 1
            return entry

    def admit(self, key: ChunkKey, view: ChunkView) -> TierEntry | None:
        """An entry for this chunk, if it is worth those that are evicted for it."""
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
            entry = self._entries[key] = TierEntry(view.version, n_bytes, [None] * view.n_layers)
            self._bytes += n_bytes
            return entry

    def fill(self, key: ChunkKey, entry: TierEntry, l: int, pair: Pair) -> Pair:
        """Copy a layer of an admitted chunk -> the copy; what came when there is no memory for one."""
        if entry.gone:
            return pair
        try:
            copy = entry.layers[l] = self._copy(pair)
        except RuntimeError as error:  # CUDA's word for it; something else in the process has the memory
            log.warning("the %s tier stays as it is: %s", self.name, str(error).splitlines()[0])
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


class TieredStore(WrappedStore):
    """A store with tiers in front of it, the nearest first. Only reading differs."""

    def __init__(self, store: KVStore, tiers: Sequence[Tier]) -> None:
        super().__init__(store)
        self._tiers = tuple(tiers)

    @contextmanager
    def reading(self) -> Iterator[Reads]:
        with self._store.reading() as snapshot:
            yield _TieredSnapshot(snapshot, self._tiers)

    def put(self, key: ChunkKey, record: ChunkRecord, pin: bool = False) -> bool:
        stored = self._store.put(key, record, pin)
        if stored:
            self._forget(key)
        return stored

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        asked = list(keys)
        there = self._store.delete(asked)
        for key in asked:
            self._forget(key)
        return there

    def describe(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkInfo]:
        found = self._store.describe(keys)
        nearest = {key: tier.name for tier in reversed(self._tiers) for key in found if key in tier}
        return {key: replace(known, tier=nearest.get(key, known.tier)) for key, known in found.items()}

    def hot(self) -> frozenset[ChunkKey]:
        return self._store.hot().union(*(tier.keys() for tier in self._tiers))

    def stats(self, namespace: str | None = None) -> StoreStats:
        """Of the store. Of its tiers only for who may see the whole: what is in them comes from all tenants' requests."""
        stats = self._store.stats(namespace)
        return stats if namespace is not None else replace(stats, tiers=tuple(t.stats() for t in self._tiers))

    def close(self) -> None:
        for tier in self._tiers:
            tier.clear()
        self._store.close()

    def _forget(self, key: ChunkKey) -> None:
        for tier in self._tiers:
            tier.drop(key)


class _TieredSnapshot:
    """A snapshot of the store, some of whose chunks are nearer."""

    def __init__(self, snapshot: Reads, tiers: Sequence[Tier]) -> None:
        self._snapshot, self._tiers = snapshot, tiers
        self._from: dict[ChunkKey, str] = {}  # chunks that a tier has whole

    @property
    def undecodable(self) -> Mapping[ChunkKey, Undecodable]:
        return self._snapshot.undecodable

    def expect(
        self, keys: Sequence[ChunkKey], meanwhile: Meanwhile | None = None, saved: TimeSaved | None = None
    ) -> None:
        self._snapshot.expect(keys, meanwhile, saved)

    def get(self, key: ChunkKey) -> ChunkView | None:
        view = self._snapshot.get(key)
        if view is None:
            return None
        places = places_of(key, view, self._tiers)
        for tier, entry in places:
            if entry.whole:
                self._from[key] = tier.name
        return TieredView(key, view, places)

    def tier(self, key: ChunkKey) -> str:
        return self._from.get(key) or self._snapshot.tier(key)


def places_of(key: ChunkKey, view: ChunkView, tiers: Sequence[Tier]) -> list[tuple[Tier, TierEntry]]:
    """Where a chunk is or will be, the nearest first; those after it serve until that one is whole."""
    places: list[tuple[Tier, TierEntry]] = []
    for tier in tiers:
        entry = tier.find(key, view.version) or (None if places else tier.admit(key, view))
        places += [(tier, entry)] if entry else []
        if entry and entry.whole:
            break
    return places


class TieredView:
    """A stored chunk, each layer from the nearest place that has it."""

    def __init__(self, key: ChunkKey, view: ChunkView, places: Sequence[tuple[Tier, TierEntry]]) -> None:
        self._key, self._view, self._places = key, view, places
        self.n_layers, self.n_tokens = view.n_layers, view.n_tokens
        self.n_bytes, self.raw_bytes, self.version = view.n_bytes, view.raw_bytes, view.version

    def layer(self, l: int) -> Pair:
        if not 0 <= l < self.n_layers:
            raise IndexError(f"a chunk of {self.n_layers} layers has no layer {l}")
        return self._layer(l, self._places)

    def _layer(self, l: int, places: Sequence[tuple[Tier, TierEntry]]) -> Pair:
        if not places:
            return self._view.layer(l)
        (tier, entry), *farther = places
        return entry.layers[l] or tier.fill(self._key, entry, l, self._layer(l, farther))


def tiers_for(
    config: TiersConfig, admission: Admission, device: torch.device, stream: CopyStream | None = None
) -> list[Tier]:
    """The tiers that the settings ask for. `admission`: the store's own, which sees every look-up.

    stream: the way to the device. Raises ConfigError for a tier that would do nothing there.
    """
    way = stream or copy_stream_to(device)
    tiers = _memory_tier(config, admission)
    if way is None:
        _refuse_gpus(config, device)
        return tiers
    near = []
    if config.device_bytes > (free := way.free_bytes()):
        raise ConfigError(
            f"setting 'store.tiers.device_bytes' cannot be {config.device_bytes}: beside the reader the GPU has {free} "
            "bytes free, and the caches of requests need some of them",
            setting="store.tiers.device_bytes",
        )
    if config.device_bytes:
        near.append(Tier("device", config.device_bytes, admission, lambda pair: _sent(way, pair)))
    if config.host_bytes:
        near.append(
            Tier("host", config.host_bytes, admission, lambda pair: _pinned(way, pair), _pinned_bytes)
        )
    return near + tiers


def _memory_tier(config: TiersConfig, admission: Admission) -> list[Tier]:
    if not config.memory_bytes:
        return []
    return [Tier("memory", config.memory_bytes, admission, lambda pair: (pair[0].clone(), pair[1].clone()))]


def _refuse_gpus(config: TiersConfig, device: torch.device) -> None:
    for name, size in (("device_bytes", config.device_bytes), ("host_bytes", config.host_bytes)):
        if size:
            raise ConfigError(
                f"setting 'store.tiers.{name}' cannot be {size}: the reader runs on the {device.type.upper()}, where no "
                "memory is nearer than the process's own; set store.tiers.memory_bytes, or reader.device to a GPU",
                setting=f"store.tiers.{name}",
            )


def _sent(stream: CopyStream, pair: Pair) -> Pair:
    """On the device, for whoever comes behind it on the stream."""
    with stream.entered():
        return apart([stream.send(part) for part in joined(pair)])


def _pinned(stream: CopyStream, pair: Pair) -> Pair:
    """In one piece of pinned memory."""
    keys, values = pair
    half = keys.numel() * keys.element_size()
    both = stream.buffer(2 * half).view(keys.dtype).view(2, *keys.shape)
    return both[0].copy_(keys), both[1].copy_(values)


def _pinned_bytes(n_bytes: int) -> int:
    """torch's allocator of pinned memory gives out powers of two."""
    return 1 << max(0, n_bytes - 1).bit_length()
