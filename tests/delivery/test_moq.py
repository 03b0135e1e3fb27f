"""One relay, one publisher, many engines: a chunk is sent once; without the relay engines answer all the same."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from blendserve.fetch.kdn.manifest import Collection
from blendserve.fetch.kdn.moq import MoqSource
from blendserve.fetch.link import LinkEstimator
from blendserve.kdn.catalogue import Catalogue
from blendserve.kdn.moq import Publisher, relay
from blendserve.store import KVStore
from tests.support.peers import Service, answered, blender, kdn_store, question, settings

moq = pytest.importorskip("moq", reason="moq-rs is not installed: pip install 'blendserve[moq]'")

READERS = 8
Made = tuple[KVStore, Collection]
Frames = list[bytes]


class Relay:
    """A relay and a publisher on a loop of their own. A context manager."""

    def __init__(self, store: KVStore) -> None:
        self._store, self._loop = store, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._ready, self._over = threading.Event(), asyncio.Event()
        self._running = asyncio.run_coroutine_threadsafe(self._run(), self._loop)
        assert self._ready.wait(60), self._running

    async def _run(self) -> None:
        async with relay("127.0.0.1:0") as server:
            self.options = {
                "relay": f"https://{server.local_addr}",
                "relay_fingerprint": server.cert_fingerprints()[0],
            }
            self.publisher = Publisher(self._store, *self.options.values())
            feeding = asyncio.create_task(self.publisher.run(self._ready.set))
            await self._over.wait()
            feeding.cancel()

    def kill(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._over.set)
            self._running.result(60)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@pytest.fixture
def by_http(service: Service) -> Callable[[], float]:
    """Counts the chunks that the service has delivered by HTTP from now on."""

    def served() -> float:
        (metric,) = service.backend.metrics.chunks.collect()
        return sum(sample.value for sample in metric.samples if sample.name.endswith("_total"))

    before = served()
    return lambda: served() - before


def changed_frames(monkeypatch: pytest.MonkeyPatch, change: Callable[[Frames], Frames]) -> None:
    """The publisher sends these in place of a chunk's frames."""
    frames = Publisher.frames
    monkeypatch.setattr(
        Publisher,
        "frames",
        lambda publisher, name, track: (found := frames(publisher, name, track)) and change(found),
    )


def is_right(done: Any, made: Made, passages: int = 3) -> bool:
    here = answered(made[0], passages)
    return torch.equal(done.result.logits, here.result.logits) and done.report.chunks_hit == passages


def test_many_engines_have_a_chunk_that_was_sent_once(made: Made, service: Service, by_http: Any) -> None:
    with Relay(made[0]) as there:
        stores = [kdn_store(settings(service.url, **there.options), MoqSource) for _ in range(READERS)]
        try:
            with ThreadPoolExecutor(READERS) as pool:
                done = list(pool.map(lambda store: answered(store, 3), stores))
        finally:
            for each in stores:
                each.close()
    assert all(is_right(d, made) for d in done)
    assert by_http() == 0
    directory, of, prompt = Catalogue(made[0]).directory(made[1]), blender(made[0]), question(3)
    keys = {of.key(chunk.ids) for chunk in prompt.chunks}
    assert there.publisher.sent == sum(directory[key].bodies[0] - 4 for key in keys)


def test_a_relay_that_dies_between_requests_or_in_the_middle_of_a_chunk_costs_time_alone(
    made: Made, service: Service, by_http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, some, halved = LinkEstimator.arrived, threading.Event(), threading.Event()

    class Half(Frames):
        def __iter__(self) -> Iterator[bytes]:
            yield from self[: len(self) // 2]
            raise ConnectionError  # the publisher ends, too

    def seen(link: LinkEstimator, n_bytes: int) -> None:
        arrived(link, n_bytes)
        some.set()

    changed_frames(monkeypatch, lambda frames: Half(frames) if halved.is_set() else frames)
    monkeypatch.setattr(LinkEstimator, "arrived", seen)
    there = Relay(made[0])
    with (
        there,
        ThreadPoolExecutor(1) as pool,
        kdn_store(settings(service.url, **there.options), MoqSource) as store,
    ):
        assert is_right(answered(store, 3), made)
        assert by_http() == 0
        some.clear()
        halved.set()
        monkeypatch.setattr(
            "blendserve.fetch.kdn.moq.RELAY_SHARE", 0.05
        )  # of the deadline: how long the relay is waited for
        asked = pool.submit(answered, store, 5)
        assert some.wait(60)  # a part of a chunk is here
        there.kill()
        assert is_right(asked.result(120), made, 5)
        assert by_http() > 0
        assert is_right(answered(store, 5), made, 5)


def test_what_a_relay_sends_is_checked(
    made: Made, service: Service, by_http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed_frames(monkeypatch, lambda frames: [*frames[:-1], frames[-1][:-1] + bytes([frames[-1][-1] ^ 4])])
    with Relay(made[0]) as there, kdn_store(settings(service.url, **there.options), MoqSource) as store:
        assert is_right(answered(store, 3), made)
    assert by_http() > 0
