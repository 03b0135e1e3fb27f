"""A chunk's layers while they come, and what waiting for them counts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from blendserve.store.chunk import StoredChunk
from blendserve.store.codecs.predict.codec import Predict
from blendserve.store.network.arrival import Arrival
from blendserve.store.network.deadline import Deadline
from blendserve.store.record import encode
from tests.store.test_predict import decoded, related, tables

KEY = b"k" * 28
LONG = 60.0


def test_layers_that_need_those_below_are_decoded_as_they_come() -> None:
    codec, kv = Predict.with_tables(2, tables()), related(60, 99)
    header, segments = encode(KEY, kv, codec)
    arrival, expected = Arrival(), decoded(codec, kv)
    arrival.begin(header)
    chunk = StoredChunk(KEY, header, lambda l: arrival.segment(header, l, LONG), lambda hash: tables())
    with ThreadPoolExecutor(1) as pool:
        waits = [pool.submit(chunk.layer, l) for l in range(4)]
        for l, segment in enumerate(segments):
            assert not waits[l].done()
            assert not arrival.whole
            arrival.add(segment)
            keys, values = waits[l].result(LONG)
            assert torch.equal(keys, expected.keys[l])
            assert torch.equal(values, expected.values[l])
    assert arrival.whole


@pytest.mark.parametrize("how", ["end", "begin"])
def test_who_waits_is_let_go_when_the_layer_does_not_come(how: str) -> None:
    header, segments = encode(KEY, related(60, 99), Predict.with_tables(2, tables()))
    other, others = encode(KEY, related(60, 99), Predict.with_tables(1, tables()))
    arrival = Arrival()
    arrival.begin(header)
    arrival.add(segments[0])
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(arrival.segment, header, 1, LONG)
        arrival.end() if how == "end" else arrival.begin(other)
        assert waits.result(LONG) is None
    if how == "begin":
        arrival.add(others[0])
    assert (arrival.segment(header, 0, 0.0) is None) == (how == "begin")
    assert arrival.segment(header, 2, 0.0) is None


def test_what_several_threads_wait_at_the_same_time_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("blendserve.store.network.deadline.time.monotonic", lambda: now[0])
    allowed = Deadline(10.0)
    with allowed.waiting():
        now[0] = 1.0
        with allowed.waiting():
            now[0] = 3.0
            assert (allowed.waited, allowed.left) == (3.0, 7.0)
        now[0] = 4.0
    now[0] = 100.0
    assert (allowed.waited, allowed.left) == (4.0, 6.0)
    with allowed.waiting():
        now[0] = 107.0
    assert (allowed.waited, allowed.left) == (11.0, 0.0)
