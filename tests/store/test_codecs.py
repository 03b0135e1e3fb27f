"""Coded chunks: decoded in order whoever asks, counted as stored, and a miss where they cannot be decoded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendserve.core import ChunkKV
from blendserve.errors import CorruptRecord
from blendserve.registry import CODECS
from blendserve.store import KVStore, LMDBStore, VerifyReport, record
from blendserve.store.chunk import StoredChunk
from blendserve.store.codecs.base import Buffer
from tests.store.helpers import BIG, CAP, chunk, flip, key_of, layer_name, read, same, tamper, tiered
from tests.store.toy_codec import Toy

pytestmark = pytest.mark.usefixtures("toy_codec")
LAYERS = 6
KEY = key_of(1)


@pytest.fixture
def store(path: Path) -> Iterator[LMDBStore]:
    with LMDBStore(path, CAP, codec=Toy(level=6)) as store:
        yield store


def smooth(tokens: int, seed: int = 0) -> ChunkKV:
    """Layers that are nearly those below them."""
    first = chunk(tokens, layers=1, seed=seed)
    keys, values = (part.expand(LAYERS, *part.shape[1:]).clone() for part in (first.keys, first.values))
    keys[3] += 1
    return ChunkKV(keys, values)


class Records:
    """A coded chunk's records, and which of them were read."""

    def __init__(self, kv: ChunkKV) -> None:
        self.header, self.segments = record.encode(KEY, kv, Toy(level=6))
        self.read: list[int] = []

    def view(self) -> StoredChunk:
        return StoredChunk(KEY, self.header, self._read)

    def _read(self, l: int) -> Buffer:
        self.read.append(l)
        return self.segments[l]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=st.lists(st.integers(0, LAYERS - 1), max_size=12))
def test_in_whatever_order_layers_are_asked_for_each_is_right(asked: list[int]) -> None:
    kv = chunk(5, layers=LAYERS)
    view = Records(kv).view()
    for l in asked:
        keys, values = view.layer(l)
        assert torch.equal(keys, kv.keys[l])
        assert torch.equal(values, kv.values[l])


def test_in_order_every_segment_is_read_once() -> None:
    records = Records(chunk(5, layers=LAYERS))
    view = records.view()
    for l in range(LAYERS):
        view.layer(l)
    assert records.read == list(range(LAYERS))
    for wrong in (-1, LAYERS):
        with pytest.raises(IndexError):
            view.layer(wrong)


def test_threads_may_share_a_view() -> None:
    kv = chunk(5, layers=LAYERS)
    view = Records(kv).view()

    def look(l: int) -> bool:
        return all(torch.equal(view.layer(m)[0], kv.keys[m]) for m in (l, LAYERS - 1, 0))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(look, [0, 1, 2, 3, 4, 5] * 20))


def test_damage_below_a_layer_is_told_and_what_is_below_that_is_read_on(store: LMDBStore, path: Path) -> None:
    kv = chunk(BIG, layers=LAYERS)
    store.put(KEY, kv)
    store.close()
    tamper(path, flip(layer_name(1, 2), 50))
    with LMDBStore(path, CAP) as store, store.reading() as snapshot:
        view = snapshot.get(KEY)
        assert view is not None
        for l in (5, 2, 3):
            with pytest.raises(CorruptRecord, match="layer 2 fails"):
                view.layer(l)
        assert torch.equal(view.layer(1)[0], kv.keys[1])
        assert store.stats().corrupt == 3


def test_a_segment_that_is_whole_and_no_segment_is_damage() -> None:
    records = Records(chunk(5))
    records.segments[0] = b"not deflated at all"
    lengths = (len(records.segments[0]), *records.header.lengths[1:])
    sums = (record._segment_checksum(KEY, records.header.fields, 0, records.segments[0]),)
    records.header = record.Header(
        records.header.shape,
        records.header.coding,
        lengths,
        sums + records.header.checksums[1:],
        records.header.fields,
    )
    with pytest.raises(CorruptRecord, match="layer 0 cannot be decoded"):
        records.view().layer(0)


def test_tiers_hold_decoded_chunks_and_count_them_so(store: LMDBStore) -> None:
    kv = smooth(100)
    store.put(KEY, kv)
    behind: KVStore = tiered(store, caps=(kv.n_bytes - 1, kv.n_bytes))
    for _ in range(2):
        assert same(read(behind, KEY), kv)
    assert [(tier.chunks, tier.bytes, tier.hits) for tier in behind.stats().tiers] == [
        (0, 0, 0),
        (1, kv.n_bytes, 1),
    ]


def test_a_chunk_whose_tables_are_not_here_is_a_miss_with_a_reason(
    store: LMDBStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.put(KEY, chunk())
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Toy, "tables_here", {})
        for _ in range(2):
            assert read(store, KEY) is None
        stats = store.stats()
        assert (stats.misses, stats.undecodable, stats.corrupt, stats.hits) == (2, 2, 0, 0)
        assert len(caplog.records) == 1  # once for all chunks, not once a request
        assert "the tables" in caplog.text
        assert "are not here" in caplog.text
        assert KEY in store
        assert store.verify() == VerifyReport(1, ())  # nothing is wrong with it
    assert same(read(store, KEY), chunk())


def test_a_chunk_of_an_unknown_codec_is_a_miss_and_can_be_replaced(store: LMDBStore, path: Path) -> None:
    store.put(KEY, chunk(), pin=True)
    CODECS.remove("toy")
    try:
        assert read(store, KEY) is None
        assert store.stats().undecodable == 1
        store.close()
        with LMDBStore(path, CAP) as other:
            assert other.stats().undecodable == 1  # counted for good
            other.put(KEY, chunk(seed=1))
            assert same(read(other, KEY), chunk(seed=1))
            assert other.stats().pins == 1
    finally:
        CODECS.add("toy", "tests.store.toy_codec:Toy")
