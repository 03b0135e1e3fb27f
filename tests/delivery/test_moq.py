"""One relay, one publisher, many engines: a chunk is sent once; without the relay engines answer all the same."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from blendserve.config import BlendConfig
from blendserve.delivery.catalogue import Catalogue
from blendserve.delivery.moq import Publisher, relay
from blendserve.engine.engine import Engine
from blendserve.store import KVStore
from blendserve.store.kdn import moq_reader
from blendserve.store.kdn.collection import Collection
from blendserve.store.kdn.pace import Pace
from blendserve.store.kdn.store import KdnStore
from tests.delivery.helpers import Service, settings
from tests.engine.helpers import CONFIG, PASSAGES, reader

moq = pytest.importorskip("moq", reason="moq-rs is not installed: pip install 'blendserve[moq]'")

READERS = 8


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
            self.url, self.fingerprint = f"https://{server.local_addr}", server.cert_fingerprints()[0]
            self.publisher = Publisher(self._store, self.url, self.fingerprint)
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
def service(made: tuple[KVStore, Collection]) -> Iterator[Service]:
    with Service(made[0]) as running:
        yield running


def answered(store: Any, passages: int = 3) -> Any:
    engine = Engine(CONFIG, reader(), store)
    prompt = engine.prompts.build("Who sat on the mat?", PASSAGES[:passages])
    return engine.blender.run(prompt, BlendConfig(method="blend"))


def chunks_served(service: Service) -> float:
    found = service.inner.metrics.registry.get_sample_value
    return sum(
        found("blendserve_delivered_chunks_total", {"source": s}) or 0.0
        for s in ("memory", "store", "missing")
    )


def test_many_engines_have_a_chunk_that_was_sent_once(
    made: tuple[KVStore, Collection], service: Service
) -> None:
    store, collection = made
    local = answered(store)
    with Relay(store) as there:
        options = settings(service.url, relay=there.url, relay_fingerprint=there.fingerprint)
        stores = [KdnStore(options) for _ in range(READERS)]
        try:
            with ThreadPoolExecutor(READERS) as pool:
                done = list(pool.map(answered, stores))
        finally:
            for each in stores:
                each.close()
    assert all(torch.equal(d.prefilled.logits, local.prefilled.logits) for d in done)
    assert all(d.report.chunks_hit == 3 for d in done)
    assert chunks_served(service) == 0  # all of them by the relay
    directory = Catalogue(store).directory(collection)
    engine = Engine(CONFIG, reader(), store)
    prompt = engine.prompts.build("Who sat on the mat?", PASSAGES[:3])
    keys = {engine.blender.key(c.ids) for c in prompt.chunks} | {engine.blender.key(prompt.prefix, ())}
    assert there.publisher.sent == sum(directory[key].bodies[0] - 4 for key in keys)


def test_without_the_relay_chunks_come_from_the_service(
    made: tuple[KVStore, Collection], service: Service
) -> None:
    local = answered(made[0], 5)
    with Relay(made[0]) as there:
        options = settings(service.url, relay=there.url, relay_fingerprint=there.fingerprint, deadline_s=10.0)
        with KdnStore(options) as store:
            answered(store)
            assert chunks_served(service) == 0
            there.kill()
            done = answered(store, 5)
            assert torch.equal(done.prefilled.logits, local.prefilled.logits)
            assert chunks_served(service) > 0


def test_what_is_there_a_moment_later_is_asked_for_again(
    made: tuple[KVStore, Collection], service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = moq.TrackProducer.create_group

    def later(track: Any, *args: Any) -> Any:
        time.sleep(0.05)
        return create(track, *args)

    monkeypatch.setattr(moq.TrackProducer, "create_group", later)
    monkeypatch.setattr(moq_reader, "LATER_S", (0.02,) * 1000)
    with Relay(made[0]) as there:
        options = settings(service.url, relay=there.url, relay_fingerprint=there.fingerprint, deadline_s=60.0)
        with KdnStore(options) as store:
            assert answered(store).report.chunks_hit == 3
    assert chunks_served(service) == 0


def test_a_relay_that_dies_in_the_middle_of_a_chunk_costs_time_alone(
    made: tuple[KVStore, Collection], service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames, arrived, some = Publisher._frames, Pace.arrived, threading.Event()

    class Half(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            yield from self[: len(self) // 2]
            raise ConnectionError  # the publisher is gone, too

    def halves(publisher: Publisher, name: str, track: str) -> list[bytes] | None:
        return (found := frames(publisher, name, track)) and Half(found)

    def seen(pace: Pace, n_bytes: int) -> None:
        arrived(pace, n_bytes)
        some.set()

    monkeypatch.setattr(Publisher, "_frames", halves)
    monkeypatch.setattr(Pace, "arrived", seen)
    local = answered(made[0])
    with Relay(made[0]) as there, ThreadPoolExecutor(1) as pool:
        options = settings(service.url, relay=there.url, relay_fingerprint=there.fingerprint)
        with KdnStore(options) as store:
            asked = pool.submit(answered, store)
            assert some.wait(60)  # a part of a chunk is here
            there.kill()
            done = asked.result(120)
    assert torch.equal(done.prefilled.logits, local.prefilled.logits)
    assert done.report.chunks_hit == 3
    assert chunks_served(service) > 0


def test_what_a_relay_sends_is_checked(
    made: tuple[KVStore, Collection], service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = Publisher._frames

    def damaged(publisher: Publisher, name: str, track: str) -> list[bytes] | None:
        found = frames(publisher, name, track)
        return found and [*found[:-1], found[-1][:-1] + bytes([found[-1][-1] ^ 4])]

    monkeypatch.setattr(Publisher, "_frames", damaged)
    local = answered(made[0])
    with Relay(made[0]) as there:
        options = settings(service.url, relay=there.url, relay_fingerprint=there.fingerprint)
        with KdnStore(options) as store:
            done = answered(store)
    assert torch.equal(done.prefilled.logits, local.prefilled.logits)
    assert done.report.chunks_hit == 3
    assert chunks_served(service) > 0
