"""Tiers in front of a store: which chunks are in them, that they give what the store holds, and what they count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blendserve.blend.loader import LayerReader
from blendserve.config import Config, StoreConfig, TiersConfig
from blendserve.errors import ConfigError, CorruptRecord
from blendserve.store import KVStore, LMDBStore, MemoryStore, TieredStore, TierStats, open_store
from blendserve.store.codecs.base import Pair
from blendserve.store.policies import Always, TinyLFU
from blendserve.store.tiers import Tier, tiers_for
from tests.kernels.cuda.streams import LateCopyStream
from tests.store.helpers import BIG, CAP, chunk, key_of, layer_name, read, same

LAYERS = 3
UNIT = chunk(10).n_bytes
CUDA = torch.device("cuda", 0)


def near(units: float, admission: Always | TinyLFU | None = None, name: str = "near") -> Tier:
    return Tier(
        name, round(units * UNIT), admission or Always(), lambda pair: (pair[0].clone(), pair[1].clone())
    )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LMDBStore]:
    with LMDBStore(tmp_path / "kv", CAP) as store:
        for n in range(8):
            store.put(key_of(n), chunk(10, seed=n))
        yield store


def hits(store: KVStore) -> list[int]:
    return [tier.hits for tier in store.stats().tiers]


def held(store: KVStore) -> list[tuple[int, int]]:
    return [(tier.chunks, tier.bytes // UNIT) for tier in store.stats().tiers]


def ask(store: KVStore, *numbers: int) -> None:
    for n in numbers:
        assert same(read(store, key_of(n)), chunk(10, seed=n))


def test_a_chunk_is_read_from_the_store_once(disk: LMDBStore) -> None:
    store = TieredStore(disk, [near(4)])
    ask(store, 0, 0, 0)
    assert hits(store) == [2]
    assert (disk.stats().hits, store.stats().hits) == (3, 3)  # the store is asked each time


def test_hot_is_what_a_tier_or_a_store_in_memory_has_whole(disk: LMDBStore) -> None:
    store = TieredStore(disk, [near(2)])
    ask(store, 0, 1, 2)
    with store.reading() as snapshot:
        view = snapshot.get(key_of(3))
        assert view
        view.layer(0)
        assert store.hot() == {
            key_of(2)
        }  # of the last one only a layer has been read, and it took the place of one
    store.delete(key_of(2))
    assert store.hot() == disk.hot() == set()
    memory = MemoryStore(CAP)
    memory.put(key_of(0), chunk(10))
    assert TieredStore(memory, []).hot() == {key_of(0)}


def test_what_a_tier_gives_is_not_read_from_the_store(tmp_path: Path) -> None:
    with LMDBStore(tmp_path, CAP) as disk:
        disk.put(key_of(0), chunk(BIG))
    with LMDBStore(tmp_path, CAP) as disk:
        store = TieredStore(disk, [near(1e3)])
        assert same(read(store, key_of(0)), chunk(BIG))
        tamper_open(disk, layer_name(0, 1))
        assert same(read(store, key_of(0)), chunk(BIG))
        with pytest.raises(CorruptRecord):
            read(disk, key_of(0))


def tamper_open(store: LMDBStore, name: bytes) -> None:
    """Change a record's bytes, and leave its header as it is."""
    with store._write() as txn:
        raw = bytearray(txn.get(name) or b"")
        raw[5] ^= 4
        txn.put(name, bytes(raw))


def test_the_least_recently_used_makes_room_and_the_cap_is_kept(disk: LMDBStore) -> None:
    store = TieredStore(disk, [near(2)])
    ask(store, 0, 1, 0, 2)
    assert held(store) == [(2, 2)]
    ask(store, 0, 2)
    assert hits(store) == [3]
    ask(store, 1)  # 0 goes
    assert hits(store) == [3]


def test_the_nearest_tier_that_wants_a_chunk_has_it_alone(disk: LMDBStore) -> None:
    admission = TinyLFU(seed=1)
    disk._traffic._admission = admission  # as open_store gives both the same
    store = TieredStore(disk, [near(2, admission, "a"), near(3, admission, "b")])
    ask(store, *range(8))
    ask(store, *range(8))
    assert held(store) == [(2, 2), (3, 3)]
    assert hits(store) == [2, 3]  # equal popularity moves nothing
    ask(store, 7, 7, 7, 7)
    assert hits(store)[0] == 2 + 3  # from the first of these on it is worth more than one of the first tier's


def test_a_chunk_too_large_for_a_tier_goes_to_the_next(disk: LMDBStore) -> None:
    store = TieredStore(disk, [near(0.5), near(1)])
    ask(store, 0, 0)
    assert held(store) == [(0, 0), (1, 1)]
    assert hits(store) == [0, 1]


def test_deleted_and_replaced_chunks_leave_at_once(disk: LMDBStore) -> None:
    store = TieredStore(disk, [near(4), near(4)])
    ask(store, 0, 1, 2)
    assert store.delete(key_of(0))
    assert read(store, key_of(0)) is None
    store.put(key_of(1), chunk(10, seed=99))
    assert held(store)[0] == (1, 1)
    assert same(read(store, key_of(1)), chunk(10, seed=99))


def test_who_still_reads_an_evicted_chunk_reads_on(disk: LMDBStore) -> None:
    store = TieredStore(disk, [near(1)])
    with store.reading() as snapshot:
        view = snapshot.get(key_of(0))
        assert view is not None
        view.layer(0)
        ask(store, 1)
        assert torch.equal(view.layer(0)[0], chunk(10).keys[0])
        assert torch.equal(view.layer(1)[0], chunk(10).keys[1])
        assert held(store) == [(1, 1)]
        with pytest.raises(IndexError):
            view.layer(LAYERS)
        with pytest.raises(IndexError):
            view.layer(-1)


def test_a_tenant_is_told_nothing_of_the_tiers(disk: LMDBStore) -> None:
    store = TieredStore(disk, [near(4)])
    ask(store, 0)
    assert store.stats("").tiers == ()
    assert store.stats().tiers == (TierStats("near", 1, UNIT, 4 * UNIT, 0),)
    figures = store.stats().to_dict()
    assert (figures["near_chunks"], figures["near_bytes"], figures["near_hits"]) == (1, UNIT, 0)
    assert "tiers" not in figures


def test_on_a_device_that_is_late_hot_chunks_are_sent_once(disk: LMDBStore) -> None:
    stream, config = LateCopyStream(), TiersConfig(device_bytes=2 * UNIT, host_bytes=1 << 20)
    store = TieredStore(disk, tiers_for(config, Always(), CUDA, stream))
    for _ in range(3):
        layers = load(store, stream, (0, 1))
        stream.finish()
        for l, layer in enumerate(layers):
            for n, (keys, values) in enumerate(layer):
                assert torch.equal(keys, chunk(10, seed=n).keys[l])
                assert torch.equal(values, chunk(10, seed=n).values[l])
    assert len(stream.copies) == 2 * LAYERS  # of two chunks, once, keys and values together
    assert [(t.name, t.chunks, t.hits) for t in store.stats().tiers] == [("device", 2, 4), ("host", 0, 0)]


def test_the_host_tier_is_pinned_and_fetched_from(disk: LMDBStore) -> None:
    stream = LateCopyStream()
    store = TieredStore(disk, tiers_for(TiersConfig(host_bytes=1 << 20), Always(), CUDA, stream))
    load(store, stream, (3,))
    assert len(stream.buffers) == LAYERS  # nothing went through the ring, not even the first time
    (layer, *_) = load(store, stream, (3,))
    stream.finish()
    assert len(stream.buffers) == LAYERS
    assert torch.equal(layer[0][0], chunk(10, seed=3).keys[0])
    (tier,) = store.stats().tiers
    assert (tier.name, tier.hits) == ("host", 1)
    assert tier.bytes == LAYERS * 1024  # a layer has 640 bytes; pinned memory comes in powers of two


def load(
    store: KVStore, stream: LateCopyStream, numbers: tuple[int, ...]
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    with store.reading() as snapshot:
        views = [snapshot.get(key_of(n)) for n in numbers]
        reader = LayerReader([view for view in views if view is not None], LAYERS, stream)
        layers = [reader.take(l) for l in range(LAYERS)]
        reader.close()
        return layers


def test_without_memory_for_it_a_tier_stays_as_it_is_and_requests_go_on(disk: LMDBStore) -> None:
    copies = list[None]()

    def copy(pair: Pair) -> Pair:
        copies.append(None)
        if len(copies) == 2 * LAYERS + 2:  # in the middle of the third chunk
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB\nand more")
        return pair[0].clone(), pair[1].clone()

    store = TieredStore(disk, [Tier("device", 5 * UNIT, Always(), copy)])
    ask(store, 0, 1, 2, 0, 1)
    assert held(store) == [(2, 2)]
    assert hits(store) == [2]
    ask(store, 3, 3, 4, 4)
    assert held(store) == [(2, 2)]
    assert store.stats().tiers[0].cap_bytes == 2 * UNIT


def test_more_than_the_device_has_free_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device_bytes' cannot be 2000000000: .* 1073741824 bytes free"):
        tiers_for(TiersConfig(device_bytes=2_000_000_000), Always(), CUDA, LateCopyStream())


@pytest.mark.parametrize("name", ["device_bytes", "host_bytes"])
def test_on_a_cpu_tiers_are_refused_by_name(name: str, tmp_path: Path) -> None:
    config = StoreConfig(tiers={name: 1000})
    with pytest.raises(ConfigError, match=rf"store\.tiers\.{name}.*runs on the CPU"):
        open_store(config, tmp_path, device=torch.device("cpu"))
    with open_store(config, tmp_path) as store:  # whoever only looks at the store has no reader
        assert isinstance(store, LMDBStore)


def test_no_tiers_by_default(tmp_path: Path) -> None:
    assert tiers_for(TiersConfig(), Always(), CUDA, LateCopyStream()) == []
    with open_store(StoreConfig(), tmp_path, device=torch.device("cpu")) as store:
        assert isinstance(store, LMDBStore)


def test_the_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"store\.tiers\.device_bytes"):
        Config(store={"tiers": {"device_bytes": -1}})
    with pytest.raises(ConfigError, match="device_bytes"):
        Config(store={"tiers": {"device_byte": 1}})
