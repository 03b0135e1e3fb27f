"""A service that lies: every lie is a miss with a reason, costs a bounded number of bytes, and never a wrong answer."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve.blend.blender import Blended
from blendserve.config import BlendConfig
from blendserve.delivery.pull import pull
from blendserve.engine.engine import Engine
from blendserve.errors import StoreError, StoreUnavailable
from blendserve.store import MemoryStore
from blendserve.store.base import TimeSaved
from blendserve.store.codecs.base import tables_hash
from blendserve.store.kdn.adapt import quickest
from blendserve.store.kdn.client import API, Client
from blendserve.store.kdn.pace import Pace
from blendserve.store.kdn.store import KdnStore
from tests.delivery.helpers import NAME, Known, Liar, Service, published, settings
from tests.engine.helpers import CONFIG, PASSAGES, reader

MOST_SENT = 16 << 20  # what sockets may hold between two processes, and a read

MOST_TRIES = (
    4 * 2 * 2 * 2
)  # chunks; a second connection; others' ends, as one liar's connections end together; again


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    store, _ = published(tmp_path_factory.mktemp("published"))
    with Service(store) as running:
        yield running


def blended(store: Any) -> Blended:
    engine = Engine(CONFIG, reader(), store)
    prompt = engine.prompts.build("Who sat on the mat?", PASSAGES[:3])
    return engine.blender.run(prompt, BlendConfig(method="blend"))


def head(length: int | None, status: str = "200 OK", more: str = "") -> bytes:
    said = f"Content-Length: {length}\r\n" if length is not None else ""
    return f"HTTP/1.1 {status}\r\n{said}{more}\r\n".encode()


def endless(line: socket.socket, count: Callable[[int], None]) -> None:
    while True:
        line.sendall(bytes(1 << 16))
        count(1 << 16)


def chunked(line: socket.socket, count: Callable[[int], None]) -> None:
    line.sendall(head(None, more="Transfer-Encoding: chunked\r\n"))
    while True:
        line.sendall(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
        count(1 << 16)


class Lies:
    """The truth about the collection, and about chunks what each lie says."""

    def __init__(self, honest: Service) -> None:
        self.honest, self.sent = honest, 0
        self._lock = threading.Lock()

    def count(self, n: int) -> None:
        with self._lock:
            self.sent += n

    def truth(self, path: str) -> bytes:
        return self.honest.http.get(self.honest.url + path).content

    def other_chunk(self, line: socket.socket, path: str) -> None:
        directory = self.truth(f"{API}/{NAME}/directory")
        rows = [directory[at : at + 48] for at in range(0, len(directory), 48)]
        other = next(row[:28].hex() for row in rows if row[:28].hex() not in path)
        body = self.truth(f"{path.rpartition('/')[0]}/{other}")
        line.sendall(head(len(body)) + body)

    def flipped(self, line: socket.socket, path: str) -> None:
        body = bytearray(self.truth(path))
        body[-9] ^= 4
        line.sendall(head(len(body)) + body)

    def longer(self, line: socket.socket, path: str) -> None:
        line.sendall(head(1 << 40))
        endless(line, self.count)

    def no_length(self, line: socket.socket, path: str) -> None:
        line.sendall(head(None))
        endless(line, self.count)

    def in_pieces_without_end(self, line: socket.socket, path: str) -> None:
        chunked(line, self.count)

    def large_header(self, line: socket.socket, path: str) -> None:
        body = self.truth(path)
        line.sendall(head(len(body)) + b"\xff\xff\xff\x7f" + body[4:])

    def short(self, line: socket.socket, path: str) -> None:
        body = self.truth(path)
        line.sendall(head(len(body)) + body[:10])
        line.shutdown(socket.SHUT_RDWR)

    def another_part(self, line: socket.socket, path: str) -> None:
        body = self.truth(path)
        line.sendall(
            head(10, "206 Partial Content", f"Content-Range: bytes 7-16/{len(body)}\r\n") + body[:10]
        )

    def no_http(self, line: socket.socket, path: str) -> None:
        line.sendall(b"+PONG\r\n" * 100)

    def endless_headers(self, line: socket.socket, path: str) -> None:
        line.sendall(b"HTTP/1.1 200 OK\r\n")
        while True:
            line.sendall(b"X: y\r\n" * 1000)
            self.count(6000)

    def speak(self, lie: str) -> Callable[[socket.socket, str], None]:
        def say(line: socket.socket, path: str) -> None:
            if "/chunks/" in path:
                getattr(self, lie)(line, path)
            else:
                body = self.truth(path)
                line.sendall(head(len(body)) + body)

        return say


LIES = [name for name in vars(Lies) if name not in ("count", "truth", "speak") and not name.startswith("_")]


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_a_miss_and_bounded(honest: Service, lie: str) -> None:
    lies = Lies(honest)
    with Liar(lies.speak(lie)) as liar, KdnStore(settings(liar.url)) as store:
        done = blended(store)
    plain = blended(MemoryStore(2**30))
    assert torch.equal(done.prefilled.logits, plain.prefilled.logits)
    assert done.report.chunks_hit == 0
    assert done.report.unusable or done.report.chunks_corrupt
    assert lies.sent < MOST_SENT
    assert len([r for r in liar.requests if "/chunks/" in r]) <= MOST_TRIES


@pytest.mark.parametrize("lie", [lie for lie in LIES if lie != "other_chunk"])
def test_a_lie_about_several_chunks_is_bounded_and_each_is_asked_for(honest: Service, lie: str) -> None:
    lies = Lies(honest)

    def speak(line: socket.socket, path: str) -> None:
        if "/layers" in path:
            getattr(lies, lie)(line, path)
        else:
            body = lies.truth(path)
            line.sendall(head(len(body)) + body)

    with (
        Liar(speak) as liar,
        KdnStore(settings(liar.url), quickest, pace=Known(1e9), saved=TimeSaved(1.0)) as store,
    ):
        list(store.keys())
        done = blended(store)
    assert any("/layers" in asked for asked in liar.requests)
    assert lies.sent < MOST_SENT
    assert done.report.chunks_hit + done.report.chunks_missing == 3
    plain = blended(MemoryStore(2**30))
    assert done.report.chunks_hit == 3 or torch.equal(done.prefilled.logits, plain.prefilled.logits)


def test_the_truth_is_no_miss(honest: Service) -> None:
    """Or the test above could not fail."""
    lies = Lies(honest)
    lies.no_http = lambda line, path: line.sendall(head(len(lies.truth(path))) + lies.truth(path))  # type: ignore[method-assign]
    with Liar(lies.speak("no_http")) as liar, KdnStore(settings(liar.url)) as store:
        assert blended(store).report.chunks_hit == 3


def test_silence_is_given_up_at_the_deadline_and_then_nobody_waits(honest: Service) -> None:
    quiet, lies = threading.Event(), Lies(honest)
    setattr(lies, "no_http", lambda line, path: quiet.wait(60))  # noqa: B010
    with Liar(lies.speak("no_http")) as liar, KdnStore(settings(liar.url, deadline_s=0.5)) as store:
        assert {why.kind for why in blended(store).report.unusable} == {"unreachable"}
        quiet.set()


@pytest.mark.parametrize("speak", [chunked, endless], ids=["pieces", "bytes"])
def test_a_description_without_end_is_none(speak: Any, tmp_path: Path) -> None:
    sent = [0]

    def count(n: int) -> None:
        sent[0] += n

    with Liar(lambda line, path: speak(line, count)) as liar, KdnStore(settings(liar.url)) as store:
        with pytest.raises(StoreUnavailable, match="no answer"):
            store.collection  # noqa: B018
        assert sent[0] < MOST_SENT


def test_a_reader_that_takes_nothing_is_cut(tmp_path: Path) -> None:
    """What it had asked for counts no longer among its requests."""
    store, _ = published(tmp_path)
    with Service(store, send_s=0.2, max_concurrent=1) as service:
        key = service.http.get(f"/collections/{NAME}/directory").content[:28].hex()
        with socket.create_connection(("127.0.0.1", service.port)) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            ask = f"GET {API}/{NAME}/chunks/{key} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            line.sendall(ask * 400)  # more than sockets hold
            while service.http.get(f"/collections/{NAME}/chunks/{key}").status_code != 200:
                pass


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "another"])
def test_an_index_names_no_files_of_its_own(honest: Service, tmp_path: Path, name: str) -> None:
    real = honest.http.get(f"/collections/{NAME}").json()
    manifest = honest.http.get(
        f"/collections/{NAME}/pieces/{real['files']['manifest.json']['pieces'][0]}"
    ).json()
    manifest["files"][name] = manifest["files"]["passages.jsonl"]
    forged = json.dumps(manifest).encode()
    hash = tables_hash(forged).hex()
    real["files"][name] = real["files"]["passages.jsonl"]
    real["files"]["manifest.json"] = {"n_bytes": len(forged), "pieces": [hash]}

    def speak(line: socket.socket, path: str) -> None:
        lies = {f"{API}/{NAME}": json.dumps(real).encode(), f"{API}/{NAME}/pieces/{hash}": forged}
        body = lies.get(path) or honest.http.get(honest.url + path).content
        line.sendall(head(len(body)) + body)

    with Liar(speak) as liar, pytest.raises(StoreUnavailable, match="other files"):
        pull(settings(liar.url), tmp_path / "index")
    assert not (tmp_path / "outside").exists()
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_before_the_first_request_is_bounded(honest: Service, lie: str) -> None:
    """A sample of the link, and of what decoding takes."""
    lies = Lies(honest)
    with Liar(lies.speak(lie)) as liar, KdnStore(settings(liar.url, level="auto")) as store:
        keys = list(store.keys())
        with suppress(StoreError):
            store.sample(keys, 1 << 12)
    assert lies.sent < MOST_SENT


def test_decoding_is_not_measured_on_what_would_take_more_memory_than_is_allowed(honest: Service) -> None:
    pace = Pace()
    with KdnStore(settings(honest.url, level="auto", in_flight_mb=1), pace=pace) as store:
        client, key = Client(store.config), next(iter(store.keys()))
        pace.learn_decoding(client, key, {"int8": 1 << 40}, 1 << 20, 10.0, lambda hash: None)
    assert pace.decoding("int8") == 0
