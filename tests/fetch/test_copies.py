"""Copies in front of a store: which chunks the caches hold, and what they count. test_fetcher.py has any history."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blendserve.config import StoreConfig
from blendserve.errors import ConfigError
from blendserve.fetch import KVFetcher, open_storage, open_store
from blendserve.fetch.copies import Copies, CopyCache, open_copies
from blendserve.fetch.layers import LayerReader
from blendserve.store import LMDBStore, MemoryStore
from blendserve.store.codecs.base import Pair
from blendserve.store.policies import Admission, Always, TinyLFU
from tests.support.stores import CAP, LAYERS, UNIT, cache, copy_of, key_of, kv, put_kv, requests, same
from tests.support.streams import LateCopyStream

CUDA = torch.device("cuda", 0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LMDBStore]:
    with LMDBStore(tmp_path / "kv", CAP) as store:
        for n in range(8):
            put_kv(store, key_of(n), kv(n))
        yield store


def cached(disk: LMDBStore, *units: float, admission: Admission | None = None) -> KVFetcher:
    copies = Copies([cache(n * UNIT, admission) for n in units], admission)
    return KVFetcher(disk, copies=copies)


def held(fetcher: KVFetcher) -> list[tuple[int, int, int]]:
    """Chunks, their bytes in units, and hits of each cache."""
    return [(tier.chunks, tier.bytes // UNIT, tier.hits) for tier in fetcher.stats().tiers]


def ask(fetcher: KVFetcher, *numbers: int) -> None:
    for n in numbers:
        with fetcher.fetch(requests(n)) as fetch:
            assert same(copy_of(fetch.views[key_of(n)]), kv(n))


def test_a_cache_serves_its_copy_and_evicts_the_least_recently_used(disk: LMDBStore) -> None:
    fetcher = cached(disk, 2)
    ask(fetcher, 0, 0, 0)
    assert held(fetcher) == [(1, 1, 2)]
    assert (disk.stats().hits, fetcher.stats().hits) == (3, 3)  # the store counts all look-ups
    ask(fetcher, 1, 0, 2)
    assert held(fetcher) == [(2, 2, 3)]
    ask(fetcher, 0, 2, 1)
    assert held(fetcher) == [(2, 2, 5)]
    assert fetcher.stats().to_dict()["cache_hits"] == 5


def test_a_replaced_chunk_is_not_read_from_its_copy(disk: LMDBStore) -> None:
    fetcher = cached(disk, 2)
    ask(fetcher, 0, 0)
    put_kv(disk, key_of(0), kv(9))
    for _ in range(2):
        with fetcher.fetch(requests(0)) as fetch:
            assert same(copy_of(fetch.views[key_of(0)]), kv(9))


def test_resident_chunks_are_those_that_memory_holds_whole(disk: LMDBStore) -> None:
    fetcher = cached(disk, 2)
    ask(fetcher, 0, 1, 2)
    with fetcher.fetch(requests(3)) as fetch:
        fetch.views[key_of(3)].layer(0)  # one layer takes the place of a chunk
        assert fetcher.resident() == {key_of(2)}
        assert fetcher.locate(disk.describe([key_of(2), key_of(3)])) == {
            key_of(2): "cache",
            key_of(3): "local",
        }
        fetcher.forget([key_of(2), key_of(3)])
        fetch.extend(requests(2))
        assert same(copy_of(fetch.views[key_of(2)]), kv(2))
    assert fetcher.resident() == frozenset()
    memory = MemoryStore(CAP)
    put_kv(memory, key_of(0), kv(0))
    assert KVFetcher(memory).resident() == {key_of(0)}


def test_the_nearest_cache_that_admits_it_holds_a_chunk(disk: LMDBStore) -> None:
    admission = TinyLFU(seed=1)
    fetcher = cached(disk, 2, 3, admission=admission)
    ask(fetcher, *range(8), *range(8))
    assert held(fetcher) == [(2, 2, 2), (3, 3, 3)]  # equal frequencies move nothing
    ask(fetcher, 7, 7, 7, 7)
    assert held(fetcher)[0] == (2, 2, 2 + 3)  # from the second on, the first tier holds it
    fetcher = cached(disk, 0.5, 1)
    ask(fetcher, 0, 0)  # too large for the first tier
    assert held(fetcher) == [(0, 0, 0), (1, 1, 1)]


def test_a_view_of_an_evicted_chunk_stays_readable(disk: LMDBStore) -> None:
    fetcher = cached(disk, 1)
    with fetcher.fetch(requests(0)) as fetch:
        view = fetch.views[key_of(0)]
        view.layer(0)
        ask(fetcher, 1)
        for l in (0, 1):
            assert torch.equal(view.layer(l)[0], kv(0).keys[l])
        assert held(fetcher) == [(1, 1, 0)]


def load(fetcher: KVFetcher, stream: LateCopyStream, *numbers: int) -> None:
    """Read chunks as a prefill does, and check them."""
    with fetcher.fetch(requests(*numbers)) as fetch:
        reader = LayerReader([fetch.views[key_of(n)] for n in numbers], LAYERS, stream)
        layers = [reader.take(l) for l in range(LAYERS)]
        reader.close()
    stream.finish()
    for l, layer in enumerate(layers):
        for n, (keys, values) in zip(numbers, layer, strict=True):
            assert torch.equal(keys, kv(n).keys[l])
            assert torch.equal(values, kv(n).values[l])


def test_a_chunk_is_copied_once_to_a_late_device_or_into_pinned_memory(disk: LMDBStore) -> None:
    stream, config = LateCopyStream(), StoreConfig(device_bytes=2 * UNIT, memory_bytes=1 << 20)
    fetcher = KVFetcher(disk, copies=open_copies(config, CUDA, stream))
    for _ in range(3):
        load(fetcher, stream, 0, 1)
    assert len(stream.copies) == 2 * LAYERS  # keys and values together
    assert [(t.name, t.chunks, t.hits) for t in fetcher.stats().tiers] == [("device", 2, 4), ("host", 0, 0)]
    stream = LateCopyStream()
    config = StoreConfig(memory_bytes=1 << 20)
    fetcher = KVFetcher(disk, copies=open_copies(config, CUDA, stream))
    for _ in range(2):
        load(fetcher, stream, 3)
    assert len(stream.buffers) == LAYERS  # no copy went through the ring
    (host,) = fetcher.stats().tiers
    # A layer has 640 bytes; pinned memory comes in powers of two.
    assert (host.name, host.hits, host.bytes) == ("host", 1, LAYERS * 1024)


def test_a_cache_without_memory_keeps_its_size_and_requests_go_on(disk: LMDBStore) -> None:
    copies = list[None]()

    def copy(pair: Pair) -> Pair:
        copies.append(None)
        if len(copies) == 2 * LAYERS + 2:  # in the middle of the third chunk
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB\nand more")
        return pair[0].clone(), pair[1].clone()

    fetcher = KVFetcher(disk, copies=Copies([CopyCache("device", 5 * UNIT, Always(), copy)]))
    ask(fetcher, 0, 1, 2, 0, 1)
    assert held(fetcher) == [(2, 2, 2)]
    ask(fetcher, 3, 3, 4, 4)
    assert held(fetcher) == [(2, 2, 4)]
    assert fetcher.stats().tiers[0].cap_bytes == 2 * UNIT


def test_caches_that_cannot_be_are_refused(tmp_path: Path) -> None:
    config = StoreConfig(device_bytes=1000)
    with open_store(config, tmp_path) as store:  # a command without a reader needs no device
        assert isinstance(store, LMDBStore)
    with pytest.raises(ConfigError) as error:
        open_storage(config, tmp_path, torch.device("cpu"))
    assert error.value.setting == "store.device_bytes"
    with pytest.raises(ConfigError) as error:  # more than is free
        open_copies(StoreConfig(device_bytes=2_000_000_000), CUDA, LateCopyStream())
    assert error.value.setting == "store.device_bytes"
