"""What every store must do: each kind, a coded store, a toy of the tests' own, also behind tiers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.bench.servers import binary
from blendserve.config import StoreConfig
from blendserve.core import ChunkKV
from blendserve.errors import StoreError, StoreFull
from blendserve.registry import CODECS
from blendserve.store import KVStore, LayeredStore, LMDBStore, MemoryStore, open_store
from tests.store.helpers import chunk, key_of, read, same, tiered
from tests.store.toy_codec import Toy
from tests.store.valkey.servers import needs_server, store_at

MB = 1_000_000


MAKERS: dict[str, Callable[[Path, int], KVStore]] = {
    "lmdb": LMDBStore,
    "memory": lambda path, cap_bytes: MemoryStore(cap_bytes),
    "valkey": store_at,
    "coded lmdb": lambda path, cap_bytes: LMDBStore(path, cap_bytes, codec=Toy()),
    "layered": lambda path, cap_bytes: LayeredStore(
        LMDBStore(path, cap_bytes), MemoryStore(cap_bytes), write="through"
    ),
    "toy": lambda path, cap_bytes: open_store(
        StoreConfig(kind="toy", cap_gb=cap_bytes / 1e9, eviction="refuse", admission="always"), None
    ),
}
SHARED = "valkey"
KINDS = [
    pytest.param(kind, marks=needs_server if kind.startswith(SHARED) else ())
    for kind in (*MAKERS, *(f"{kind} behind tiers" for kind in MAKERS if kind != "layered"))
]
pytestmark = pytest.mark.usefixtures("toy_store", "toy_codec")


def make(kind: str, path: Path, cap_bytes: int = 10 * MB) -> KVStore:
    inner, _, before = kind.partition(" behind")
    store = MAKERS[inner](path / "kv", cap_bytes)
    return tiered(store) if before else store


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def stored_bytes(kind: str, path: Path, kv: ChunkKV) -> int:
    """What a chunk counts for in a store of this kind."""
    with make(kind, path / "measured") as store:
        store.put(key_of(1), kv)
        return store.stats().bytes


@pytest.fixture
def store(kind: str, tmp_path: Path) -> Iterator[KVStore]:
    with make(kind, tmp_path) as store:
        yield store


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
def test_a_chunk_comes_back_bit_for_bit(store: KVStore, dtype: torch.dtype, tokens: int) -> None:
    kv = chunk(tokens, dtype=dtype)
    store.put(key_of(1), kv)
    assert same(read(store, key_of(1)), kv)
    with store.reading() as snapshot:
        view = snapshot.get(key_of(1))
        assert view is not None
        assert (view.n_tokens, view.n_bytes, view.raw_bytes) == (tokens, store.stats().bytes, kv.n_bytes)


def test_what_is_put_uncoded_is_stored_as_it_is_whatever_else_is_written(store: KVStore) -> None:
    kv, other = chunk(7), chunk(7, seed=1)
    assert store.put_uncoded(key_of(1), kv, pin=True)
    store.put(key_of(2), other)
    assert same(read(store, key_of(1)), kv)
    coded = store.coded(key_of(1))
    assert coded is not None
    assert coded.coding.codec == CODECS.default
    assert sum(map(len, coded.segments)) == kv.n_bytes
    assert not store.delete(key_of(3))
    assert store.verify().good == 2


def test_what_is_known_of_chunks_is_what_was_put(store: KVStore) -> None:
    sizes = {}
    for n, tokens in enumerate((4, 9, 2)):
        before = store.stats().bytes
        store.put(key_of(n), chunk(tokens, seed=n), pin=n == 1)
        sizes[key_of(n)] = store.stats().bytes - before
    store.put(key_of(0, "other"), chunk(3))
    hits = store.stats().hits
    found = store.info([key_of(2), key_of(1), key_of(7), key_of(0), key_of(0, "other")])
    assert found.keys() == {*sizes, key_of(0, "other")}
    assert {key: found[key].n_bytes for key in sizes} == sizes
    assert [found[key_of(n)].n_tokens for n in range(3)] == [4, 9, 2]
    assert [found[key_of(n)].pinned for n in range(3)] == [False, True, False]
    assert all(found[key_of(n)].raw_bytes == chunk(t).n_bytes for n, t in enumerate((4, 9, 2)))
    with store.reading() as snapshot:
        for key, known in found.items():
            assert snapshot.get(key) is not None
            assert known.tier in {snapshot.tier(key), "local", "remote"}
    assert store.stats().hits == hits + len(found)  # by `get` alone
    assert store.info([]) == {}


def test_what_was_not_put_is_not_there(store: KVStore) -> None:
    assert key_of(1) not in store
    assert read(store, key_of(1)) is None
    assert not store.delete(key_of(1))
    assert list(store.keys()) == []


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


def test_a_snapshot_sees_the_store_as_it_was(store: KVStore, kind: str) -> None:
    store.put(key_of(1), chunk())
    with store.reading() as snapshot:
        view = snapshot.get(key_of(1))
        store.put(key_of(1), chunk(seed=1))
        store.put(key_of(2), chunk())
        assert view is not None
        assert torch.equal(view.layer(0)[0], chunk().keys[0])
        again = snapshot.get(key_of(1))
        assert again is not None
        assert torch.equal(again.layer(1)[0], chunk().keys[1])
        if not kind.startswith((SHARED, "layered")):  # there, what was never asked for may have come since
            assert snapshot.get(key_of(2)) is None
    assert same(read(store, key_of(1)), chunk(seed=1))


def test_what_is_expected_is_found_as_if_it_were_not(store: KVStore) -> None:
    store.put(key_of(1), chunk())
    with store.reading() as snapshot:
        snapshot.expect([key_of(1), key_of(2)])
        view = snapshot.get(key_of(1))
        assert view is not None
        assert torch.equal(view.layer(0)[0], chunk().keys[0])
        assert snapshot.get(key_of(2)) is None
    assert (store.stats().hits, store.stats().misses) == (1, 1)


def test_a_chunk_is_leased_to_one_who_may_give_it_back(store: KVStore) -> None:
    for _ in range(2):
        lease = store.lease(key_of(1), seconds=60)
        assert lease is not None
        with lease:
            lease.release()


def test_a_deleted_chunk_is_gone_and_its_bytes_are_free(store: KVStore) -> None:
    store.put(key_of(1), chunk())
    assert store.delete(key_of(1))
    assert key_of(1) not in store
    assert store.stats().bytes == 0
    assert store.verify().good == 0


def test_the_cap_refuses_and_keeps_what_is_there(kind: str, tmp_path: Path) -> None:
    kv = chunk(100)
    with make(kind, tmp_path, cap_bytes=2 * stored_bytes(kind, tmp_path, kv)) as store:
        for n in range(2):
            store.put(key_of(n), chunk(100, seed=n))
        with pytest.raises(StoreFull, match=r"store\.cap_gb"):
            store.put(key_of(2), kv)
        with pytest.raises(StoreFull):
            store.put(key_of(1), chunk(101))
        assert all(same(read(store, key_of(n)), chunk(100, seed=n)) for n in range(2))
        store.put(key_of(1), chunk(100, seed=9))  # replacing needs no room
        assert store.verify().good == 2


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


def attempt(store: KVStore, step: str, n: int, tokens: int) -> object:
    try:
        return store.delete(key_of(n)) if step == "delete" else store.put(key_of(n), chunk(tokens))
    except StoreFull:
        return "full"


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "delete"]), st.integers(0, 3), st.integers(0, 40)), max_size=12
    )
)
def test_both_stores_tell_the_same_story(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    """Any sequence of puts and deletes, also beyond the cap, leaves both stores alike."""
    outcomes = []
    for kind in ("lmdb", "memory", "lmdb behind tiers", *([SHARED] if binary() else [])):
        with make(kind, tmp_path_factory.mktemp("s"), cap_bytes=12_000) as store:
            told = [attempt(store, *step) for step in steps]
            stats = store.stats()
            held = [
                (key, kv.n_tokens) for key in sorted(store.keys()) if (kv := read(store, key)) is not None
            ]
            outcomes.append((told, held, stats.bytes, stats.chunks, stats.tokens))
            assert stats.bytes <= 12_000
            assert store.verify().bad == ()
    assert all(outcome == outcomes[0] for outcome in outcomes)
