"""What a probe of the service measures: the round trip, the rate, and decoding by level."""

from __future__ import annotations

import pytest

from blendserve.config import changed
from blendserve.engine.engine import Engine
from blendserve.errors import StoreUnavailable
from blendserve.fetch.incoming import ChunkRequest
from blendserve.fetch.kdn.source import KdnSource
from blendserve.store import ChunkKey
from tests.support.engines import CONFIG, toy_reader
from tests.support.peers import HEADER, LEVELS, NAME, Paced, Peer, Service, settings, some_key
from tests.support.waiting import ManualClock, eventually


def test_decoding_is_measured_before_the_first_request(service: Service) -> None:
    source = KdnSource(settings(service.url, level="auto"))
    assert [source.link.decode_s(level) for level in LEVELS] == [0.0, 0.0]
    sample = source.probe([some_key()], 1)
    assert sample
    assert sample.n_bytes > 0
    assert 0 < sample.round_trip_s < sample.seconds * 100
    assert source.link.decode_s("int8") > 0 == source.link.decode_s("raw")
    assert source.probe([b"\0" * 28], 1) is None  # not of this collection
    source.close()


def test_an_engine_without_an_index_measures_its_link_when_it_opens(service: Service) -> None:
    config = changed(CONFIG, store={"location": f"{service.url}/{NAME}"})
    with Engine.open(config, reader=toy_reader()) as engine:
        source = engine.fetcher.source
        assert source
        eventually(lambda: source.link.rate)


def test_a_round_trip_is_the_shortest_of_three(service: Service) -> None:
    """The seconds of a slow start would be left out of every transfer: the link would look faster each time."""
    clock, seconds = ManualClock(), iter([3.0, 0.5, 1.0])

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if l == HEADER:
            clock.advance(next(seconds, 0.0))

    with Peer(Paced(service.url, before)) as peer:
        source = KdnSource(settings(peer.url), clock=clock)
        sample = source.probe([some_key()], 1)
        assert sample
        assert sample.round_trip_s == pytest.approx(0.5)
        source.close()


def test_the_settings_choose_the_levels(service: Service) -> None:
    asked = [ChunkRequest(some_key(), 1), ChunkRequest(b"\0" * 28, 1)]
    for level, known in (("auto", LEVELS), *((level, (level,)) for level in LEVELS)):
        source = KdnSource(settings(service.url, level=level))
        assert {key: tuple(sizes) for key, sizes in source.sizes(asked).items()} == {some_key(): known}
        source.close()
    source = KdnSource(settings(service.url, level="cachegen"))
    with pytest.raises(StoreUnavailable):
        source.sizes(asked)
    source.close()
