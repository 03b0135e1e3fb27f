"""The store contract by example, on every kind of store. test_machine.py has any history of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from blendserve.config import Config, StoreConfig
from blendserve.core import ChunkKV
from blendserve.errors import ConfigError, StoreError, StoreUnavailable
from blendserve.registry import STORES as KINDS
from blendserve.store import KVStore, open_store
from tests.store.toy_store import ToyStore
from tests.support.stores import EVERY_KIND, ROOMY, SHARED_KINDS, STORES, chunk, key_of, read, same
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("toy_codec")


@pytest.fixture(params=EVERY_KIND)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
    with STORES[request.param](tmp_path, ROOMY).open() as store:
        yield store


def test_a_chunk_of_any_dtype_and_length_is_read_bit_for_bit(store: KVStore) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tokens in (0, 1, 7, 300):
            kv = chunk(tokens, dtype=dtype)
            store.put(key_of(1), kv)
            assert same(read(store, key_of(1)), kv)
            with store.reading() as snapshot:
                view = snapshot.get(key_of(1))
                assert view is not None
                assert (view.n_tokens, view.raw_bytes) == (tokens, kv.n_bytes)
                assert view.n_bytes == store.stats().bytes


def test_put_replaces_the_whole_chunk_and_verify_counts_what_is_stored(store: KVStore) -> None:
    store.put(key_of(1), chunk(50, layers=6))
    chunks = {key_of(1): chunk(4, layers=2, seed=1), key_of(2): chunk(9, layers=5, kv_heads=1, head_dim=16)}
    for key, kv in chunks.items():
        store.put(key, kv)
    assert all(same(read(store, key), kv) for key, kv in chunks.items())
    assert sorted(store.keys()) == sorted(chunks)
    stats, seen = store.stats(), list[tuple[int, int]]()
    assert (stats.chunks, stats.tokens) == (2, 13)
    assert stats.raw_bytes == sum(kv.n_bytes for kv in chunks.values())
    report = store.verify(lambda done, total: seen.append((done, total)))
    assert (report.good, report.bad, seen[-1]) == (2, (), (2, 2))


def test_the_store_keeps_its_own_copy_of_strided_tensors(store: KVStore) -> None:
    long = chunk(12)
    kv = ChunkKV(long.keys[:, :, 2:9].requires_grad_(), long.values[:, :, 2:9])
    store.put(key_of(1), kv)
    long.keys.detach().zero_()
    assert same(read(store, key_of(1)), ChunkKV(chunk(12).keys[:, :, 2:9], chunk(12).values[:, :, 2:9]))


@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_one_process_holds_a_lease_until_it_is_released_or_expires(kind: str, tmp_path: Path) -> None:
    place = STORES[kind](tmp_path)
    with place.open() as store, place.other() as other:
        lease = store.lease(key_of(1), 60)
        assert lease is not None
        assert other.lease(key_of(1), 60) is None
        assert store.lease(key_of(1), 60) is None  # also in the same process
        assert other.lease(key_of(2), 60) is not None
        lease.release()
        short = other.lease(key_of(1), 0.001)
        assert short is not None
        place.clock.advance(1)
        late = eventually(lambda: store.lease(key_of(1), 60))
        assert late is not None
        short.release()  # it has expired, so it does not end the new one
        assert other.lease(key_of(1), 60) is None
        late.release()
        assert other.lease(key_of(1), 60) is not None


@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_a_read_only_store_changes_nothing(kind: str, tmp_path: Path) -> None:
    place = STORES[kind](tmp_path)
    with place.open() as store:
        store.put(key_of(1), chunk())
    before = place.records()
    with place.open_to_read() as store:
        assert same(read(store, key_of(1)), chunk())
        assert store.stats().hits == 1
        for change in (
            lambda: store.put(key_of(2), chunk()),
            lambda: store.delete(key_of(1)),
            lambda: store.pin([key_of(1)]),
            lambda: store.put_tables("toy", "reader", b"x"),
        ):
            with pytest.raises(StoreUnavailable):
                change()
        assert store.verify().good == 1
    assert place.records() == before


@pytest.mark.parametrize(
    "kv",
    [
        ChunkKV(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 4, 4)),
        ChunkKV(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4).half()),
        ChunkKV(torch.zeros(1, 2, 3, 4).char(), torch.zeros(1, 2, 3, 4).char()),
        ChunkKV(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)),
        ChunkKV(torch.zeros(0, 2, 3, 4), torch.zeros(0, 2, 3, 4)),
        ChunkKV(torch.zeros(1, 2, 3, 0), torch.zeros(1, 2, 3, 0)),
        ChunkKV(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), ids=(1,)),
    ],
)
def test_tensors_that_are_no_chunk_are_refused(store: KVStore, kv: ChunkKV) -> None:
    with pytest.raises(StoreError):
        store.put(key_of(1), kv)
    assert list(store.keys()) == []


def test_threads_read_and_write_concurrently(store: KVStore) -> None:
    """Each key holds only chunks made of its own number, in one of several lengths."""

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(20):
            n, tokens = dice.randrange(1, 4), dice.choice([1, 40, 200])
            if seed < 2:
                store.put(key_of(n), ChunkKV(*(torch.full((2, 2, tokens, 8), float(x)) for x in (n, -n))))
            for _ in range(2):
                kv = read(store, key_of(n))
                assert kv is None or ((kv.keys == n).all() and (kv.values == -n).all())

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(work, range(5)))
    assert store.verify().bad == ()


def test_a_store_kind_is_one_file_and_one_line_in_the_registry(tmp_path: Path) -> None:
    KINDS.add("toy", "tests.store.toy_store:ToyStore")
    try:
        config = Config(store={"kind": "toy", "cap_gb": 0.001})
        with open_store(config.store, tmp_path) as store:
            store.put(key_of(1), chunk())
            assert same(read(store, key_of(1)), chunk())
            assert isinstance(store, ToyStore)
            assert (store.snapshots, store.stats().cap_bytes) == (1, 1_000_000)
        (tmp_path / "config.yaml").write_text(config.to_yaml())
        assert Config.load(tmp_path / "config.yaml") == config
    finally:
        KINDS.remove("toy")
    with pytest.raises(ConfigError) as error:
        StoreConfig(kind="toy")
    assert error.value.setting == "store.kind"
