"""The contract by example, on every kind of store. test_machine.py has any history of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from blendserve.core import ChunkKV
from blendserve.errors import StoreError
from blendserve.store import KVStore
from tests.store.helpers import chunk, key_of, read, same
from tests.store.valkey.servers import needs_server
from tests.support.stores import ROOMY, STORES, Place

PLACES = [pytest.param(kind, marks=needs_server if kind == "valkey" else ()) for kind in STORES]
pytestmark = pytest.mark.usefixtures("toy_codec")


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return STORES[request.param](tmp_path, ROOMY)


@pytest.fixture
def store(place: Place) -> Iterator[KVStore]:
    with place.open() as store:
        yield store


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_chunk_comes_back_bit_for_bit(store: KVStore, dtype: torch.dtype) -> None:
    for tokens in (0, 1, 7, 300):
        kv = chunk(tokens, dtype=dtype)
        store.put(key_of(1), kv)
        assert same(read(store, key_of(1)), kv)
        with store.reading() as snapshot:
            view = snapshot.get(key_of(1))
            assert view is not None
            assert (view.n_tokens, view.n_bytes, view.raw_bytes) == (tokens, store.stats().bytes, kv.n_bytes)


@pytest.mark.parametrize("kind", [pytest.param("lmdb"), pytest.param("valkey", marks=needs_server)])
def test_a_lease_is_for_one_process_until_it_is_released(kind: str, tmp_path: Path) -> None:
    place = STORES[kind](tmp_path)
    with place.open() as store, place.other() as other:
        mine = store.lease(key_of(1), 60)
        assert mine is not None
        assert other.lease(key_of(1), 60) is None
        assert store.lease(key_of(1), 60) is None  # not twice in one process either
        assert other.lease(key_of(2), 60) is not None
        mine.release()
        assert other.lease(key_of(1), 60) is not None


def test_chunks_of_several_models_live_side_by_side(store: KVStore) -> None:
    chunks = {key_of(1): chunk(4, layers=2), key_of(2): chunk(9, layers=5, kv_heads=1, head_dim=16)}
    for key, kv in chunks.items():
        store.put(key, kv)
    assert all(same(read(store, key), kv) for key, kv in chunks.items())
    assert sorted(store.keys()) == sorted(chunks)
    stats = store.stats()
    assert (stats.chunks, stats.tokens) == (2, 13)
    assert stats.raw_bytes == sum(kv.n_bytes for kv in chunks.values())


def test_putting_again_replaces_the_whole_chunk(store: KVStore) -> None:
    store.put(key_of(1), chunk(50, layers=6))
    small = chunk(3, layers=2, seed=1)
    store.put(key_of(1), small)
    assert same(read(store, key_of(1)), small)
    assert store.stats().raw_bytes == small.n_bytes
    assert store.verify().bad == ()


def test_a_strided_chunk_is_stored_as_it_reads(store: KVStore) -> None:
    long = chunk(12)
    store.put(key_of(1), ChunkKV(long.keys[:, :, 2:9].requires_grad_(), long.values[:, :, 2:9]))
    assert same(read(store, key_of(1)), ChunkKV(long.keys[:, :, 2:9].detach(), long.values[:, :, 2:9]))


def test_the_store_keeps_its_own_copy(store: KVStore) -> None:
    kv = chunk()
    store.put(key_of(1), kv)
    kv.keys.zero_()
    assert same(read(store, key_of(1)), chunk())


@pytest.mark.parametrize(
    "kv",
    [
        ChunkKV(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 4, 4)),
        ChunkKV(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4, dtype=torch.float16)),
        ChunkKV(torch.zeros(1, 2, 3, 4, dtype=torch.int8), torch.zeros(1, 2, 3, 4, dtype=torch.int8)),
        ChunkKV(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)),
        ChunkKV(torch.zeros(0, 2, 3, 4), torch.zeros(0, 2, 3, 4)),
        ChunkKV(torch.zeros(1, 2, 3, 0), torch.zeros(1, 2, 3, 0)),
    ],
)
def test_tensors_that_are_no_chunk_are_refused(store: KVStore, kv: ChunkKV) -> None:
    with pytest.raises(StoreError, match="chunk"):
        store.put(key_of(1), kv)
    assert list(store.keys()) == []


def test_verify_counts_and_tells_its_progress(store: KVStore) -> None:
    for n in range(4):
        store.put(key_of(n), chunk(n))
    seen: list[tuple[int, int]] = []
    report = store.verify(lambda done, total: seen.append((done, total)))
    assert (report.good, report.bad) == (4, ())
    assert seen[-1] == (4, 4)


def test_threads_read_and_write_at_once(store: KVStore) -> None:
    """Each key only ever holds chunks made of its own number, in one of several lengths."""

    def write(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(15):
            n = dice.randrange(1, 4)
            store.put(key_of(n), constant(n, dice.choice([1, 40, 200])))

    def look(seed: int) -> int:
        dice, found = random.Random(seed), 0
        for _ in range(60):
            n = dice.randrange(1, 4)
            kv = read(store, key_of(n))
            assert kv is None or ((kv.keys == n).all() and (kv.values == -n).all())
            found += kv is not None
        return found

    with ThreadPoolExecutor(5) as pool:
        jobs = [pool.submit(job, seed) for seed, job in enumerate([write, write, look, look, look])]
        assert [job.result() for job in jobs][:2] == [None, None]
    assert store.verify().bad == ()


def constant(n: int, tokens: int) -> ChunkKV:
    return ChunkKV(*(torch.full((2, 2, tokens, 8), float(x)) for x in (n, -n)))
