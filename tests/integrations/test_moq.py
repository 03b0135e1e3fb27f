"""One relay, one publisher, many engines: a chunk is sent once; without the relay engines answer all the same."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlencode

import pytest
import torch

from blendserve.config import Config
from blendserve.errors import ConfigError
from blendserve.fetch import TieredStore, open_store
from blendserve.fetch.link import LinkEstimator
from blendserve.registry import STORES
from tests.support.peers import (
    NAME,
    PATIENT_S,
    Published,
    Service,
    answered,
    blender,
    kdn_store,
    published,
    question,
    settings,
)
from tests.support.waiting import eventually

pytest.importorskip("moq", reason="moq-rs is not installed: pip install '.[integrations]'")

from blendserve_moq.relay import Publisher, relay
from blendserve_moq.source import MoqSource

ROOT = Path(__file__).parents[2]
READERS = 8
Frames = list[bytes]


class Relay(ExitStack):
    """A relay and a publisher on a loop of their own, until it is closed."""

    def __init__(self, made: Published) -> None:
        super().__init__()
        self._made, self._ready = made, threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        thread.start()
        assert self._ready.wait(60)
        self.callback(thread.join)
        self.callback(self._loop.call_soon_threadsafe, self._over.set)

    async def _run(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        async with relay("127.0.0.1:0") as server:
            self.options = {
                "relay": f"https://{server.local_addr}",
                "fingerprint": server.cert_fingerprints()[0],
            }
            self.publisher = Publisher(settings(str(self._made.folder)), *self.options.values())
            feeding = asyncio.create_task(self.publisher.run(self._ready.set))
            await self._over.wait()
            feeding.cancel()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return published(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def service(made: Published) -> Iterator[Service]:
    with Service(made.folder) as running:
        yield running


@pytest.fixture
def by_http(service: Service, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts the chunks that the server has delivered by HTTP from now on."""
    paths, check = list[str](), service.backend.check_access

    def noted(tenant: Any, path: str) -> None:
        paths.append(path)
        check(tenant, path)

    monkeypatch.setattr(service.backend, "check_access", noted)
    return lambda: sum(path.startswith("chunks/") for path in paths)


def changed_frames(monkeypatch: pytest.MonkeyPatch, change: Callable[[Frames], Frames]) -> None:
    """The publisher sends these in place of a chunk's frames."""
    frames = Publisher.frames
    monkeypatch.setattr(
        Publisher,
        "frames",
        lambda publisher, track: (found := frames(publisher, track)) and change(found),
    )


def is_right(done: Any, made: Published, passages: int = 3) -> bool:
    here = answered(made.store, passages)
    return torch.equal(done.result.logits, here.result.logits) and done.report.chunks_hit == passages


def test_many_engines_have_a_chunk_that_was_sent_once(
    made: Published, service: Service, by_http: Any
) -> None:
    with Relay(made) as there:
        stores = [
            there.enter_context(kdn_store(settings(service.url), MoqSource, **there.options))
            for _ in range(READERS)
        ]
        with ThreadPoolExecutor(READERS) as pool:
            done = list(pool.map(lambda store: answered(store, 3), stores))
    assert all(is_right(d, made) for d in done)
    assert by_http() == 0
    keys = {blender(made.store).key(chunk.ids) for chunk in question(3).chunks}
    assert there.publisher.sent == sum(made.directory[key][0].n_bytes - 4 for key in keys)


def test_a_relay_that_dies_between_requests_or_in_the_middle_of_a_chunk_costs_time_alone(
    made: Published, service: Service, by_http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    halved, arrived = threading.Event(), LinkEstimator.arrived

    class Half(Frames):
        def __iter__(self) -> Iterator[bytes]:
            yield from self[: len(self) // 2]
            raise ConnectionError  # the publisher ends, too

    changed_frames(monkeypatch, lambda frames: Half(frames) if halved.is_set() else frames)
    there = Relay(made)
    with (
        there,
        ThreadPoolExecutor(1) as pool,
        mock.patch.object(LinkEstimator, "arrived", autospec=True, side_effect=arrived) as parts,
        kdn_store(settings(service.url), MoqSource, **there.options) as store,
    ):
        assert is_right(answered(store, 3), made)
        assert by_http() == 0
        parts.reset_mock()
        halved.set()
        # Of the deadline: how long the relay is waited for.
        monkeypatch.setattr("blendserve_moq.source.RELAY_SHARE", 0.05)
        asked = pool.submit(answered, store, 5)
        eventually(lambda: parts.called)  # a part of a chunk is here
        there.close()
        assert is_right(asked.result(120), made, 5)
        assert by_http() > 0
        assert is_right(answered(store, 5), made, 5)


def test_what_a_relay_sends_is_checked(
    made: Published, service: Service, by_http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed_frames(monkeypatch, lambda frames: [*frames[:-1], frames[-1][:-1] + bytes([frames[-1][-1] ^ 4])])
    with Relay(made) as there, kdn_store(settings(service.url), MoqSource, **there.options) as store:
        assert is_right(answered(store, 3), made)
    assert by_http() > 0


def test_a_location_names_service_and_relay_once_the_package_is_installed(
    made: Published, service: Service, by_http: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError):
        Config(store={"location": f"moq+{service.url}/{NAME}"})
    project = (ROOT / "integrations" / "moq" / "pyproject.toml").read_text()
    installed = tmp_path / "blendserve_moq-0.dist-info"
    installed.mkdir()
    entry = project.partition('[project.entry-points."blendserve.stores"]\n')[2].partition("\n")[0]
    (installed / "entry_points.txt").write_text(f"[blendserve.stores]\n{entry.replace(chr(34), '')}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with ExitStack() as after, Relay(made) as there:
        after.callback(STORES.remove, "moq")
        location = f"moq+{service.url}/{NAME}?{urlencode(there.options)}"
        store = Config(store={"location": location, "level": "raw", "deadline_s": PATIENT_S}).store
        with open_store(store, None) as opened:
            assert isinstance(opened, TieredStore)
            assert is_right(answered(opened, 3), made)
        assert by_http() == 0
        for options in ("", "?fingerprint=aa", f"?{urlencode(there.options)}&other=1"):
            wrong = Config(store={"location": f"moq+{service.url}/{NAME}{options}"}).store
            with pytest.raises(ConfigError) as caught:
                open_store(wrong, None)
            assert caught.value.setting == "store.remote.location"
