"""What stores tell of their chunks' tokens, here and on other machines, and near-duplicates found by it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blendserve.blend.blender import Blender
from blendserve.blend.cost import CostModel
from blendserve.config import BlendConfig, Method
from blendserve.core import Chunk, Prompt, TokenIds
from blendserve.errors import StoreUnavailable
from blendserve.store import KVStore, LayeredStore, LMDBStore, MemoryStore
from blendserve.store.base import ID_BATCH
from blendserve.store.key import ChunkKey
from blendserve.store.network.connection import Connection
from blendserve.store.valkey.names import HEADER, chunk_name
from blendserve.store.valkey.store import ValkeyStore
from tests.store.helpers import CAP, chunk, key_of
from tests.store.remote import RemoteStore
from tests.store.valkey.servers import needs_server, settings
from tests.support.blending import some_ids
from tests.support.models import tiny_adapter

PREFIX, SUFFIX = some_ids(5), some_ids(4, 1)
OLD, OTHER = some_ids(90, 2), some_ids(80, 3)
NEW, NEWER = (*OLD[:40], 96, *OLD[41:]), (*OTHER[:30], 96, *OTHER[31:])
NEAR = BlendConfig(method="blend", policy="none", correction="none", near=True)


class TellingStore(RemoteStore):
    """Another machine's store whose records tell their tokens."""

    def ids(self, keys: Iterable[ChunkKey]) -> Iterator[tuple[ChunkKey, TokenIds]]:
        self._trip()
        return self._store.ids(keys)

    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        self._trip()
        return self._store.keys(namespace)


def blender(store: KVStore) -> Blender:
    return Blender(tiny_adapter("llama"), "fingerprint", store, PREFIX, PREFIX)


def donors(by: Blender, *chunks: TokenIds) -> list[str]:
    """Of a prompt of these chunks."""
    report = by.run(Prompt(PREFIX, tuple(map(Chunk, chunks)), SUFFIX), NEAR).report
    return [donor for found in report.near for donor in found.donors]


@pytest.fixture
def store(path: Path) -> Iterator[ValkeyStore]:
    with ValkeyStore(settings(path), CAP) as store:
        yield store


@needs_server
def test_a_server_tells_what_was_put_a_batch_in_a_round_trip(
    store: ValkeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, damaged, silent = key_of(1), key_of(2), key_of(3)
    for n, key in enumerate((whole, damaged, silent)):
        kv = chunk(5, seed=n)
        store.put(key, replace(kv, ids=() if key == silent else some_ids(5, n)))
    raw = store._connection.ask(lambda client: client.hget(chunk_name(damaged), HEADER))
    bad = raw[:30] + bytes([raw[30] ^ 1]) + raw[31:]
    store._connection.ask(lambda client: client.hset(chunk_name(damaged), HEADER, bad))
    trips, ask = [0], Connection.ask

    def counted(self: Connection, *args: Any) -> Any:
        trips[0] += 1
        return ask(self, *args)

    monkeypatch.setattr(Connection, "ask", counted)
    many = [key_of(n) for n in range(ID_BATCH + 1)]
    assert dict(store.ids(many)) == {whole: some_ids(5, 0)}
    assert trips[0] == 2
    assert sorted(store.keys("")) == sorted([whole, damaged, silent])


@needs_server
def test_what_one_machine_stored_is_another_ones_donor(
    store: ValkeyStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blender(store).precompute([OLD, OTHER])
    with ValkeyStore(settings(path), CAP) as mine:
        by = blender(mine)
        by.donors.refresh()
        reads = [0]
        begin = Connection.begin

        def counted(self: Connection, *args: Any, **options: Any) -> Any:
            reads[0] += 1
            return begin(self, *args, **options)

        monkeypatch.setattr(Connection, "begin", counted)
        assert set(donors(by, NEW, NEWER)) == {by.key(OLD).hex(), by.key(OTHER).hex()}
        few = reads[0]
        donors(by, *(NEW[n:] for n in range(12)), NEWER)
        assert reads[0] - few <= few  # as many round trips, however many chunks are nearly there


def _layered(tmp_path: Path) -> tuple[LayeredStore, TellingStore]:
    remote = TellingStore(MemoryStore(CAP))
    blender(remote._store).precompute([OTHER])
    return LayeredStore(LMDBStore(tmp_path / "kv", CAP), remote), remote


def test_donors_lie_here_and_on_the_other_machine(tmp_path: Path) -> None:
    store, remote = _layered(tmp_path)
    with store:
        by = blender(store)
        by._store_prefix()
        store._near.put_coded(by.key(OLD), _coded(by, OLD))
        by.donors.refresh()
        assert donors(by, NEW, NEWER) == [by.key(OLD).hex(), by.key(OTHER).hex()]
        remote.trips.clear()
        assert not donors(by, some_ids(90, 70), some_ids(90, 71))
        assert len(remote.trips) <= 1  # for the chunks themselves


def test_with_the_other_machine_down_what_is_here_still_serves_and_nothing_is_forgotten(
    tmp_path: Path,
) -> None:
    store, remote = _layered(tmp_path)
    with store:
        by = blender(store)
        store._near.put_coded(by.key(OLD), _coded(by, OLD))
        by.donors.refresh()
        known = by.donors.index.keys
        remote.down = True
        assert donors(by, NEW, NEWER) == [by.key(OLD).hex()]
        by.donors.refresh()
        assert by.donors.index.keys == known == {by.key(OLD), by.key(OTHER)}
        remote.down = False
        store._fetcher._rest_until = 0.0
        assert donors(by, NEWER) == [by.key(OTHER).hex()]


def test_a_store_that_fails_tells_no_donors_and_costs_no_answer() -> None:
    store = TellingStore(MemoryStore(CAP))
    by = blender(store)
    by.precompute([OLD])
    by.donors.refresh()
    assert donors(by, NEW)
    store.down = True
    with pytest.raises(StoreUnavailable):
        dict(store.ids([by.key(OLD)]))
    report = by.run(Prompt(PREFIX, (Chunk(NEW),), SUFFIX), NEAR).report
    assert report.method == "blend"
    assert report.tokens_exact == report.tokens_reused == 0
    assert by.key(OLD) in by.donors.index


def _coded(by: Blender, ids: TokenIds) -> Any:
    scratch = MemoryStore(CAP)
    scratch.put(by.key(ids), by.computer(PREFIX).compute([ids])[0])
    return scratch.coded(by.key(ids))


@pytest.mark.parametrize(
    ("seconds", "method", "read"), [(0.1, "auto", 1), (9.0, "auto", 0), (9.0, "blend", 1)]
)
def test_auto_leaves_donors_there_if_fetching_them_takes_longer_than_they_save(
    seconds: float, method: Method, read: int
) -> None:
    store = TellingStore(MemoryStore(CAP))
    store.present = lambda keys, remote=True: set()  # type: ignore[method-assign]
    by, prompt = blender(store), Prompt(PREFIX, (Chunk(NEW),), SUFFIX)
    by._costs = CostModel(1e-6, 1.0, 0.0, 1e-6)  # a row costs a second
    by._link._rate.record(seconds * 100, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TellingStore, "far", True)
        blend = BlendConfig(method=method, near=True)
        assert len(by._worth_reading(prompt, blend, (0,), {by.key(OLD): len(OLD)})) == read
