"""The store contract by example, on every kind of store. test_machine.py has any history of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve.config import StoreConfig
from blendserve.core import ChunkKV
from blendserve.errors import ConfigError, StoreUnavailable
from blendserve.fetch import TieredStore, open_store
from blendserve.store import KVStore, LMDBStore, MemoryStore, VerifyReport
from tests.support.places import EVERY_KIND, REMOTE_STORES, SHARED_KINDS, STORES
from tests.support.stores import CAP, ROOMY, chunk, has, key_of, put_kv, read, same, stored_view
from tests.support.valkey import store_at
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("toy_codec")


@pytest.fixture(params=[*EVERY_KIND, "tiered", "behind"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
    with (STORES | REMOTE_STORES)[request.param](tmp_path, ROOMY).open() as store:
        yield store


def test_a_chunk_of_any_dtype_and_shape_replaces_another_and_is_read_bit_for_bit(store: KVStore) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tokens, layers, head_dim in ((0, 3, 4), (1, 6, 4), (7, 2, 16), (300, 3, 4)):
            kv = chunk(tokens, layers, head_dim=head_dim, dtype=dtype)
            put_kv(store, key_of(1), kv)
            assert store.verify() == VerifyReport(1, ())
            assert same(read(store, key_of(1)), kv)
            with store.snapshot() as snapshot:
                view = stored_view(store, snapshot, key_of(1))
                assert (view.n_tokens, view.raw_bytes) == (tokens, kv.n_bytes)
                assert view.n_bytes == store.stats().bytes


def test_the_store_keeps_its_own_copy_of_strided_tensors(store: KVStore) -> None:
    long = chunk(12)
    kv = ChunkKV(long.keys[:, :, 2:9].requires_grad_(), long.values[:, :, 2:9])
    put_kv(store, key_of(1), kv)
    long.keys.detach().zero_()
    assert same(read(store, key_of(1)), ChunkKV(chunk(12).keys[:, :, 2:9], chunk(12).values[:, :, 2:9]))


@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_a_lease_ends_with_its_time_and_its_release_does_not_end_the_next_one(
    kind: str, tmp_path: Path
) -> None:
    place = STORES[kind](tmp_path)
    with place.open() as store, place.other() as other:
        assert other.lease([key_of(1)], 0.001)
        place.clock.advance(1)
        assert eventually(lambda: store.lease([key_of(1)], 60))
        other.release([key_of(1)])
        assert not other.lease([key_of(1)], 60)


@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_a_read_only_store_changes_nothing(kind: str, tmp_path: Path) -> None:
    opened = LMDBStore if kind == "lmdb" else store_at
    with opened(tmp_path, CAP) as store:
        put_kv(store, key_of(1), chunk())
        before = store.stats(), store.describe([key_of(1)])
    with opened(tmp_path, CAP, read_only=True) as store:
        assert same(read(store, key_of(1)), chunk())
        assert (store.stats().hits, store.verify().good) == (1, 1)
        for change in (
            lambda: put_kv(store, key_of(2), chunk()),
            lambda: store.delete([key_of(1)]),
            lambda: store.pin([key_of(1)]),
            lambda: store.blobs.put("toy", "reader", b"x"),
        ):
            with pytest.raises(StoreUnavailable):
                change()
    with opened(tmp_path, CAP) as store:
        assert (store.stats(), store.describe([key_of(1)])) == before


def test_threads_read_and_write_concurrently(store: KVStore) -> None:
    """Each key holds only chunks made of its own number, in one of several lengths."""

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(20):
            n, tokens = dice.randrange(1, 4), dice.choice([1, 40, 200])
            if seed < 2:
                put_kv(store, key_of(n), ChunkKV(*(torch.full((2, 2, tokens, 8), float(x)) for x in (n, -n))))
            for _ in range(2):
                kv = read(store, key_of(n))
                assert kv is None or ((kv.keys == n).all() and (kv.values == -n).all())

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(work, range(5)))
    assert store.verify().bad == ()


def test_the_settings_choose_the_store(tmp_path: Path) -> None:
    remote = {"location": str(tmp_path / "far"), "cap_gb": 0.01}
    layered = {"memory_bytes": 10_000, "remote": remote, "remote_write": "through"}
    default = tmp_path / "default"
    rows: list[tuple[dict[str, Any], Path | None, type[KVStore]]] = [
        ({"location": "memory"}, default, MemoryStore),
        ({}, None, MemoryStore),  # no folder for the default kind
        ({}, default, LMDBStore),
        ({"location": str(tmp_path / "own")}, default, LMDBStore),
        (layered, tmp_path / "near", TieredStore),
    ]
    for settings, folder, kind in rows:
        with open_store(StoreConfig(cap_gb=0.001, **settings), folder) as store:
            assert type(store) is kind
            assert (put_kv(store, key_of(1), chunk()), store.stats().cap_bytes) == (True, 1_000_000)
    for name in ("default", "own", "near", "far"):
        with LMDBStore(tmp_path / name, ROOMY, read_only=True) as store:
            assert has(store, key_of(1))
    with open_store(StoreConfig(location="memory"), tmp_path / "kept", persistent=True) as store:
        assert type(store) is LMDBStore
    with open_store(StoreConfig(**layered), tmp_path / "near", read_only=True) as store:
        assert type(store) is LMDBStore
    with pytest.raises(ConfigError) as error:
        open_store(StoreConfig(remote={}), tmp_path / "other")
    assert error.value.setting == "store.remote.location"
