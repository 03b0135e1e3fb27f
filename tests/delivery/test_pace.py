"""What is known of link, decoding and computing, and that choices rest on it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blendserve.store import ChunkKey
from blendserve.store.base import TimeSaved
from blendserve.store.chunk import StoredChunk
from blendserve.store.codecs.base import SLOW
from blendserve.store.kdn.client import Client
from blendserve.store.kdn.collection import read_directory
from blendserve.store.kdn.pace import BESIDE, Pace
from blendserve.store.kdn.store import KdnStore
from tests.delivery.helpers import LEVELS, NAME, Service, settings
from tests.engine.helpers import reader


def keys_of(service: Service) -> list[ChunkKey]:
    raw = service.http.get(f"/collections/{NAME}/directory").content
    return [*read_directory(raw, len(LEVELS))]


def test_what_decoding_takes_is_known_before_the_first_request(service: Service) -> None:
    pace = Pace()
    with KdnStore(settings(service.url, level="auto"), pace=pace) as store:
        assert [pace.decoding(level) for level in LEVELS] == [0.0, 0.0]
        found = store.sample(keys_of(service)[:1], 1)
        assert found is not None
        assert 0 < found.part <= 1
        assert pace.decoding("int8") > 0 == pace.decoding("raw")
        assert pace.round_trip > 0
        assert pace.n_bytes > 0
        assert store.sample([b"\0" * 28], 1) is None  # not of this collection


def test_a_service_that_is_slow_to_begin_is_no_long_round_trip(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken for one, it would be left out of every transfer's time, and the link look quicker each time."""
    now, takes, get = [0.0], iter([3.0, 0.5, 1.0]), Client.get

    def slowly(self: Client, *args: Any, **kwargs: Any) -> Any:
        if "headers" in kwargs or len(args) > 2:  # a part of a body: the others are descriptions
            now[0] += next(takes)
        return get(self, *args, **kwargs)

    monkeypatch.setattr(Client, "get", slowly)
    monkeypatch.setattr(
        "blendserve.store.kdn.store.time",
        SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic),
    )
    pace = Pace()
    with KdnStore(settings(service.url, level="auto"), pace=pace) as store:
        found = store.sample(keys_of(service)[:1], 1)
    assert found is not None
    assert found.round_trip == pace.round_trip == 0.5


def test_what_a_codec_makes_once_is_not_counted_as_decoding(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, made, layer = [0.0], set[int](), StoredChunk.layer

    def slow_at_first(self: StoredChunk, l: int) -> Any:
        now[0] += 1.0 if l in made else 5.0
        made.add(l)
        return layer(self, l)

    monkeypatch.setattr(StoredChunk, "layer", slow_at_first)
    monkeypatch.setattr(
        "blendserve.store.kdn.pace.time",
        SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic),
    )
    pace = Pace()
    with KdnStore(settings(service.url, level="auto"), pace=pace) as store:
        store.sample(keys_of(service)[:1], 1)
    chunk_s = pace.decoding("int8") * torch.get_num_threads() / BESIDE
    n_layers = reader().adapter.n_layers
    raw = service.http.get(f"/collections/{NAME}/directory").content
    tokens = sorted(entry.n_tokens for entry in read_directory(raw, len(LEVELS)).values())
    assert chunk_s * tokens[len(tokens) // 2] == pytest.approx(n_layers * 1.0)


def test_of_a_link_that_stood_still_nothing_is_known_and_it_is_trusted_when_a_request_came_through() -> None:
    pace = Pace()
    with pace.transfer():
        pace.arrived(10**6)
        assert (pace.bytes_per_s(), pace.wary) != (None, True)
        pace.silence()
        assert (pace.bytes_per_s(), pace.wary) == (None, True)
        pace.arrived(10**6)
    assert pace.bytes_per_s() is not None
    assert pace.wary
    pace.came_through()
    assert not pace.wary


@pytest.mark.parametrize(("everything", "of_one"), [(0.0, 1e6), (1e6, 0.0)])
def test_what_a_chunk_is_worth_is_its_own_where_it_is_told(
    service: Service, everything: float, of_one: float
) -> None:
    one, *others = keys_of(service)[:3]
    pace = Pace()
    with pace.transfer():  # so that something is known of the link
        pace.arrived(10**6)
    with KdnStore(settings(service.url, level="auto"), pace=pace) as store, store.reading() as snapshot:
        snapshot.expect([one, *others], saved=TimeSaved(everything, {one: of_one}))
        came = {key for key in (one, *others) if snapshot.get(key)}
        left = {key for key, why in snapshot.undecodable.items() if why.kind == SLOW}
    assert came == ({one} if of_one else {*others})
    assert left == {one, *others} - came
