"""Delivery over real sockets: a published toy collection, servers, peers that pace or lie, and what a request must say.

A test lets each piece of a chunk pass (`Before`), so that events order everything. `check` compares an answer with that
of a local store that holds what the request used.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import httpx
import torch

from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.cost import CostModel
from blendserve.config import BlendConfig, DeliverConfig, KdnConfig
from blendserve.core import Prompt
from blendserve.engine.engine import Engine
from blendserve.fetch import TieredStore
from blendserve.fetch.kdn.manifest import LENGTH, Collection, Directory
from blendserve.fetch.kdn.source import KdnSource
from blendserve.kdn.publish import publish
from blendserve.kdn.target import PublishTarget
from blendserve.serve.app import create_app
from blendserve.serve.delivery import DeliveryBackend, router
from blendserve.store import ChunkKey, KVStore, MemoryStore
from blendserve.store.base import REMOTE
from blendserve.store.codecs.int8 import Int8
from blendserve.store.codecs.raw import Raw
from blendserve.store.record import decode_header
from tests.support.blending import check_report
from tests.support.engines import CONFIG, PASSAGES
from tests.support.engines import toy_model as model
from tests.support.http import DOCUMENTS, Listener, index

HEADER = -1
Before = Callable[[ChunkKey, int, bytearray], None]
"""Called before a piece is sent: chunk, layer or HEADER, bytes. It may wait, change the bytes, or raise to cut."""


def head(length: int | None, status: str = "200 OK", more: str = "") -> bytes:
    """The head of a reply. length: of the body; None = not announced."""
    announced = f"Content-Length: {length}\r\n" if length is not None else ""
    return f"HTTP/1.1 {status}\r\n{announced}{more}\r\n".encode()


class Peer(socketserver.ThreadingTCPServer):
    """Answers each connection as `speak(connection, path of the request)` does. A context manager."""

    daemon_threads = True

    def __init__(self, speak: Callable[[socket.socket, str], None]) -> None:
        self.paths = paths = list[str]()  # of all requests

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                # sent is nearly received
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
                with suppress(OSError):
                    while first := self.rfile.readline().decode():
                        while self.rfile.readline().strip():
                            pass
                        paths.append(first.split()[1])
                        speak(self.connection, paths[-1])

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Paced:
    """Sends the files of a collection, and chunks piece by piece: whole ones, whatever range is asked for."""

    def __init__(self, made: Published, before: Before) -> None:
        self.made, self.before = made, before
        self.asked: Counter[ChunkKey] = Counter()
        self.most_at_once = 0  # chunks that are sent
        self._now = 0
        self._lock = threading.Lock()

    def __call__(self, connection: socket.socket, path: str) -> None:
        body, key = self.made.file(path), self.made.keys.get(path.rpartition("/")[2])
        connection.sendall(head(len(body)))
        if key is None:
            connection.sendall(body)
            return
        with self._lock:
            self.asked[key] += 1
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            for l, n_bytes in pieces(key, body):
                part, body = bytearray(body[:n_bytes]), body[n_bytes:]
                self.before(key, l, part)
                connection.sendall(part)
        finally:
            with self._lock:
                self._now -= 1


def pieces(key: ChunkKey, body: bytes) -> Iterator[tuple[int, int]]:
    """The parts of a body in order: layer or HEADER, number of bytes."""
    end = LENGTH.size + LENGTH.unpack_from(body)[0]
    yield HEADER, end
    yield from enumerate(decode_header(key, body[LENGTH.size : end]).lengths)


# A published collection, and requests over it

NAME = "manual"  # a collection of two levels
PATIENT_S = 30.0  # where nothing may fail: a test machine may stop for a while
LEVELS = ("raw", "int8")
BLEND = BlendConfig(method="blend")
SLOW = CostModel(0.0, 100.0, 0.0, 0.0)  # seconds a row


def publisher(folder: Path, store: KVStore) -> Engine:
    """An engine with an index of the toy documents, over this store."""
    engine = Engine(CONFIG, model(), store)
    engine.index = index(folder / NAME, engine.prompts, DOCUMENTS)
    return engine


@dataclass(frozen=True)
class Published:
    """The toy collection as files."""

    store: KVStore  # it was published from
    folder: Path
    collection: Collection

    @property
    def place(self) -> str:
        return f"{self.folder}/{NAME}"

    @cached_property
    def directory(self) -> Directory:
        return Directory(self.file(f"directory/{self.collection.directory}"), len(self.collection.levels))

    @cached_property
    def keys(self) -> dict[str, ChunkKey]:
        """By the name of each chunk's file, at all levels."""
        return {body.hash.hex(): key for key, bodies in self.directory.items() for body in bodies}

    def file(self, path: str) -> bytes:
        return (self.folder / path.lstrip("/")).read_bytes()

    def chunk(self, level: int = 0) -> str:
        """The path of the first passage's chunk."""
        return f"chunks/{self.directory[some_key()][level].hash.hex()}"


def published(folder: Path, **options: Any) -> Published:
    """The toy collection, published into `folder`/www. options: of publish."""
    store = MemoryStore(2**30)
    engine, place = publisher(folder, store), folder / "www"
    return Published(store, place, publish(engine, PublishTarget(f"{place}/{NAME}"), LEVELS[1:], **options))


class Service:
    """`kdn serve` behind a real socket. A context manager."""

    def __init__(self, folder: Path, tls: Any = None, **settings: Any) -> None:
        """tls: options of uvicorn."""
        self.backend = DeliveryBackend(folder, DeliverConfig(**settings))
        app = create_app(self.backend, [router])
        self._listener = Listener(app, log_level="critical", **(tls or {}))
        self.port = self._listener.port
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=300)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.http.get(path, headers=headers)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._listener.close(force=True)


def settings(url: str, **options: Any) -> KdnConfig:
    return KdnConfig(url=url, **{"collection": NAME, "level": "raw", "deadline_s": PATIENT_S, **options})


def kdn_store(config: KdnConfig, kind: type[KdnSource] = KdnSource, **options: Any) -> TieredStore:
    """As an engine with a collection as `store.location` has it. options: of the source."""
    return TieredStore(MemoryStore(0), kind(config, **options))


class Unprobed(KdnSource):
    """Its link is not probed after a request: what a peer is asked for is what requests need."""

    def probe(self, keys: Any, n_bytes: int) -> None: ...


@contextmanager
def delivered(
    made: Published,
    before: Before = lambda key, l, part: None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[tuple[TieredStore, Paced]]:
    """A store over a paced peer, which has read the description and the directory. options: of the source."""
    paced = Paced(made, before)
    with Peer(paced) as peer, kdn_store(settings(peer.url, **(config or {})), Unprobed, **options) as store:
        store.source.contains([])
        yield store, paced


def blender(store: KVStore, **options: Any) -> Blender:
    prompts = Engine(CONFIG, model(), store).prompts
    return Blender(model().decoder, model().fingerprint, store, prompts.prefix, prompts.kv_context, **options)


def question(passages: int = len(PASSAGES)) -> Prompt:
    prompts = Engine(CONFIG, model(), MemoryStore(1)).prompts
    return prompts.build("Who sat on the mat?", PASSAGES[:passages])


def some_key() -> ChunkKey:
    """The first passage's."""
    return blender(MemoryStore(1)).key(question().chunks[0].ids)


def answered(store: KVStore, passages: int = 4) -> Prefilled:
    return blender(store).run(question(passages), BLEND)


@cache
def truth(level: str = "raw") -> Blender:
    """Over a local store that has the KV of every passage at this level."""
    of = blender(MemoryStore(2**30))
    of.writer.codec = Raw() if level == "raw" else Int8()
    of.writer.precompute([chunk.ids for chunk in question().chunks])
    return of


def check(done: Prefilled, prompt: Prompt, blend: BlendConfig = BLEND, level: str = "raw") -> None:
    """Every chunk came, and the logits are those of a local store at that level, to the bit."""
    check_report(done.report, prompt)
    assert (done.report.tiers, done.report.unusable) == ({REMOTE: len(prompt.chunks)}, [])
    blend = blend.with_values(method=done.report.method)
    assert torch.equal(done.result.logits, truth(level).run(prompt, blend).result.logits)
