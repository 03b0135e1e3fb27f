"""Tiers in front of a store: which chunks they hold, and what they count. test_machine.py has any history."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blendserve.config import StoreConfig, TiersConfig
from blendserve.errors import ConfigError
from blendserve.fetch.layers import LayerReader
from blendserve.store import KVStore, LMDBStore, MemoryStore, TieredStore, open_store
from blendserve.store.codecs.base import Pair
from blendserve.store.policies import Always, TinyLFU
from blendserve.store.tiers import Tier, tiers_for
from tests.support.stores import CAP, LAYERS, UNIT, chunk, key_of, put_kv, read, same, tier
from tests.support.streams import LateCopyStream

CUDA = torch.device("cuda", 0)


@pytest.fixture
def admission() -> TinyLFU:
    """The store's and its tiers', as open_store gives both the same."""
    return TinyLFU(seed=1)


@pytest.fixture
def disk(tmp_path: Path, admission: TinyLFU) -> Iterator[LMDBStore]:
    with LMDBStore(tmp_path / "kv", CAP, admission=admission) as store:
        for n in range(8):
            put_kv(store, key_of(n), chunk(10, seed=n))
        yield store


def tiered(disk: KVStore, *units: float, admission: TinyLFU | None = None) -> KVStore:
    return TieredStore(disk, [tier(n * UNIT, admission) for n in units])


def held(store: KVStore) -> list[tuple[int, int, int]]:
    """Chunks, their bytes in units, and hits of each tier."""
    return [(tier.chunks, tier.bytes // UNIT, tier.hits) for tier in store.stats().tiers]


def ask(store: KVStore, *numbers: int) -> None:
    for n in numbers:
        assert same(read(store, key_of(n)), chunk(10, seed=n))


def test_a_tier_serves_its_copy_and_evicts_the_least_recently_used(disk: LMDBStore) -> None:
    store = tiered(disk, 2)
    ask(store, 0, 0, 0)
    assert held(store) == [(1, 1, 2)]
    assert (disk.stats().hits, store.stats().hits) == (3, 3)  # the store counts all look-ups
    ask(store, 1, 0, 2)
    assert held(store) == [(2, 2, 3)]
    ask(store, 0, 2, 1)
    assert held(store) == [(2, 2, 5)]
    assert store.stats().to_dict()["tier_hits"] == 5


def test_hot_chunks_are_those_that_memory_holds_whole(disk: LMDBStore) -> None:
    store = tiered(disk, 2)
    ask(store, 0, 1, 2)
    with store.reading() as snapshot:
        view = snapshot.get(key_of(3))
        assert view
        view.layer(0)  # one layer takes the place of a chunk
        assert store.hot() == {key_of(2)}
    store.delete([key_of(2)])
    assert store.hot() == disk.hot() == set()
    memory = MemoryStore(CAP)
    put_kv(memory, key_of(0), chunk(10))
    assert TieredStore(memory, []).hot() == {key_of(0)}


def test_the_nearest_tier_that_admits_it_holds_a_chunk(disk: LMDBStore, admission: TinyLFU) -> None:
    store = tiered(disk, 2, 3, admission=admission)
    ask(store, *range(8), *range(8))
    assert held(store) == [(2, 2, 2), (3, 3, 3)]  # equal frequencies move nothing
    ask(store, 7, 7, 7, 7)
    assert held(store)[0] == (2, 2, 2 + 3)  # from the second on, the first tier holds it
    store = tiered(disk, 0.5, 1)
    ask(store, 0, 0)  # too large for the first tier
    assert held(store) == [(0, 0, 0), (1, 1, 1)]


def test_a_view_of_an_evicted_chunk_stays_readable(disk: LMDBStore) -> None:
    store = tiered(disk, 1)
    with store.reading() as snapshot:
        view = snapshot.get(key_of(0))
        assert view is not None
        view.layer(0)
        ask(store, 1)
        for l in (0, 1):
            assert torch.equal(view.layer(l)[0], chunk(10).keys[l])
        assert held(store) == [(1, 1, 0)]


def load(store: KVStore, stream: LateCopyStream, *numbers: int) -> None:
    """Read chunks as a prefill does, and check them."""
    with store.reading() as snapshot:
        views = [snapshot.get(key_of(n)) for n in numbers]
        reader = LayerReader([view for view in views if view is not None], LAYERS, stream)
        layers = [reader.take(l) for l in range(LAYERS)]
        reader.close()
    stream.finish()
    for l, layer in enumerate(layers):
        for n, (keys, values) in zip(numbers, layer, strict=True):
            assert torch.equal(keys, chunk(10, seed=n).keys[l])
            assert torch.equal(values, chunk(10, seed=n).values[l])


def test_a_chunk_is_copied_once_to_a_late_device_or_into_pinned_memory(disk: LMDBStore) -> None:
    stream, config = LateCopyStream(), TiersConfig(device_bytes=2 * UNIT, host_bytes=1 << 20)
    store = TieredStore(disk, tiers_for(config, Always(), CUDA, stream))
    for _ in range(3):
        load(store, stream, 0, 1)
    assert len(stream.copies) == 2 * LAYERS  # keys and values together
    assert [(t.name, t.chunks, t.hits) for t in store.stats().tiers] == [("device", 2, 4), ("host", 0, 0)]
    stream = LateCopyStream()
    store = TieredStore(disk, tiers_for(TiersConfig(host_bytes=1 << 20), Always(), CUDA, stream))
    for _ in range(2):
        load(store, stream, 3)
    assert len(stream.buffers) == LAYERS  # no copy went through the ring
    (host,) = store.stats().tiers
    # A layer has 640 bytes; pinned memory comes in powers of two.
    assert (host.name, host.hits, host.bytes) == ("host", 1, LAYERS * 1024)


def test_a_tier_without_memory_keeps_its_size_and_requests_go_on(disk: LMDBStore) -> None:
    copies = list[None]()

    def copy(pair: Pair) -> Pair:
        copies.append(None)
        if len(copies) == 2 * LAYERS + 2:  # in the middle of the third chunk
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB\nand more")
        return pair[0].clone(), pair[1].clone()

    store = TieredStore(disk, [Tier("device", 5 * UNIT, Always(), copy)])
    ask(store, 0, 1, 2, 0, 1)
    assert held(store) == [(2, 2, 2)]
    ask(store, 3, 3, 4, 4)
    assert held(store) == [(2, 2, 4)]
    assert store.stats().tiers[0].cap_bytes == 2 * UNIT


@pytest.mark.parametrize("name", ["device_bytes", "host_bytes"])
def test_tiers_that_cannot_be_are_refused(name: str, tmp_path: Path) -> None:
    config = StoreConfig(tiers={name: 1000})
    with open_store(config, tmp_path) as store:  # a command without a reader needs no device
        assert isinstance(store, LMDBStore)
    with pytest.raises(ConfigError) as error:
        open_store(config, tmp_path, device=torch.device("cpu"))
    assert error.value.setting == f"store.tiers.{name}"
    with pytest.raises(ConfigError) as error:  # more than is free
        tiers_for(TiersConfig(device_bytes=2_000_000_000), Always(), CUDA, LateCopyStream())
    assert error.value.setting == "store.tiers.device_bytes"
