"""A lone store on another machine: what was read ahead is used, and asked for once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from blendserve.store import MemoryStore, ReadAhead
from blendserve.store.base import REMOTE
from tests.store.helpers import CAP, chunk, key_of
from tests.store.remote import RemoteStore


@pytest.fixture
def remote() -> RemoteStore:
    far = RemoteStore(MemoryStore(CAP))
    for n in range(3):
        far.put(key_of(n), chunk(seed=n))
    return far


@pytest.fixture
def ahead(remote: RemoteStore) -> Iterator[ReadAhead]:
    with ReadAhead(remote, CAP) as store:
        yield store


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not what():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_what_was_read_ahead_is_not_asked_for_again(ahead: ReadAhead, remote: RemoteStore) -> None:
    keys = [key_of(n) for n in range(4)]  # the last one is nowhere
    ahead.prefetch(keys)
    wait_for(lambda: remote.trips == [4])
    with ahead.reading() as snapshot:
        snapshot.expect(keys)
        for n in range(3):
            view = snapshot.get(keys[n])
            assert view is not None
            for l in range(view.n_layers):
                for got, put in zip(
                    view.layer(l), (chunk(seed=n).keys[l], chunk(seed=n).values[l]), strict=True
                ):
                    assert torch.equal(got, put)
            assert snapshot.tier(keys[n]) == REMOTE
        assert snapshot.get(keys[3]) is None
        assert not snapshot.undecodable
    assert remote.trips == [4, 0]


def test_what_several_wait_for_is_read_once(ahead: ReadAhead, remote: RemoteStore) -> None:
    ahead.prefetch([key_of(0), key_of(1)])
    ahead.prefetch([key_of(0), key_of(2)])
    wait_for(lambda: sorted(remote.trips) == [1, 2])
    for n in (1, 2):
        with ahead.reading() as snapshot:
            snapshot.expect([key_of(0), key_of(n)])
            assert snapshot.get(key_of(0)) is not None
    assert sum(remote.trips) == 3
    with ahead.reading() as snapshot:
        snapshot.expect([key_of(0)])  # nobody has said that they would come
    assert sum(remote.trips) == 4


def test_what_was_not_is_asked_for_in_one_go(ahead: ReadAhead, remote: RemoteStore) -> None:
    with ahead.reading() as snapshot:
        snapshot.expect([key_of(0), key_of(1)])
        assert snapshot.get(key_of(1)) is not None
    assert remote.trips == [2]


def test_what_could_not_be_read_ahead_is_missing_for_its_reason(
    ahead: ReadAhead, remote: RemoteStore
) -> None:
    remote.down = True
    ahead.prefetch([key_of(0)])
    wait_for(lambda: ahead._fetcher.failures > 0)
    remote.down = False
    with ahead.reading() as snapshot:
        snapshot.expect([key_of(0)])
        assert snapshot.get(key_of(0)) is None
        assert snapshot.undecodable[key_of(0)].kind == "unreachable"


def test_a_chunk_that_was_deleted_meanwhile_is_not_used(ahead: ReadAhead, remote: RemoteStore) -> None:
    ahead.prefetch([key_of(0)])
    wait_for(lambda: remote.trips == [1])
    assert ahead.delete(key_of(0))
    with ahead.reading() as snapshot:
        assert snapshot.get(key_of(0)) is None
