"""Delivery over real sockets: a published toy collection, a service, peers that pace or lie, and what a request must say.

A test lets each piece of a chunk pass (`Before`), so that events order everything. `check` compares an answer with that
of a local store that holds what the request used.
"""

from __future__ import annotations

import re
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
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
from blendserve.fetch.kdn.manifest import LENGTH, Collection
from blendserve.fetch.kdn.source import KdnSource
from blendserve.kdn.publish import publish
from blendserve.serve.app import create_app
from blendserve.serve.delivery import DeliveryBackend, router
from blendserve.store import ChunkKey, KVStore, MemoryStore
from blendserve.store.base import REMOTE
from blendserve.store.clock import TimeSource
from blendserve.store.codecs.int8 import Int8
from blendserve.store.codecs.raw import Raw
from blendserve.store.key import KEY_BYTES
from blendserve.store.record import decode_header
from tests.support.blending import check_report
from tests.support.engines import CONFIG, PASSAGES
from tests.support.engines import toy_model as model
from tests.support.http import DOCUMENTS, Listener, index

HEADER = -1
KEY = re.compile(f"[0-9a-f]{{{2 * KEY_BYTES}}}")  # of a chunk, in a path
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
                self.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16
                )  # sent is nearly received
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
    """Speaks as the service at `url` does, and sends chunks piece by piece: whole ones, whatever range is asked for."""

    def __init__(self, url: str, before: Before) -> None:
        self.url, self.before = url, before
        self.asked: Counter[ChunkKey] = Counter()
        self.most_at_once = 0  # chunks in one request

    def __call__(self, connection: socket.socket, path: str) -> None:
        reply = httpx.get(self.url + path, timeout=300)
        body, keys = reply.content, [bytes.fromhex(key) for key in KEY.findall(path)]
        self.asked.update(keys)
        self.most_at_once = max(self.most_at_once, len(keys))
        connection.sendall(head(len(body), f"{reply.status_code} x"))
        if not keys or not reply.is_success:
            connection.sendall(body)
            return
        for key, l, n_bytes in pieces(keys, body):
            part, body = bytearray(body[:n_bytes]), body[n_bytes:]
            self.before(key, l, part)
            connection.sendall(part)


def pieces(keys: list[ChunkKey], body: bytes) -> Iterator[tuple[ChunkKey, int, int]]:
    """The parts of a body in order: chunk, layer or HEADER, number of bytes."""
    lengths = []
    for key in keys:
        end = LENGTH.size + LENGTH.unpack_from(body)[0]
        lengths.append(decode_header(key, body[LENGTH.size : end]).lengths)
        yield key, HEADER, end
        body = body[end:]
    for l, layer in enumerate(zip(*lengths, strict=True)):
        yield from ((key, l, n) for key, n in zip(keys, layer, strict=True))


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


def published(folder: Path) -> tuple[KVStore, Collection]:
    """A store with the toy collection in it."""
    store = MemoryStore(2**30)
    return store, publish(publisher(folder, store), NAME, LEVELS[1:])


class Service:
    """A delivery service behind a real socket. A context manager."""

    def __init__(self, store: KVStore, clock: TimeSource = time, tls: Any = None, **settings: Any) -> None:
        """tls: options of uvicorn."""
        self.backend = DeliveryBackend(store, DeliverConfig(**settings), clock)
        app = create_app(self.backend, [router])
        self._listener = Listener(app, log_level="critical", **(tls or {}))
        self.port = self._listener.port
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=f"{self.url}/v1", timeout=300)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.http.get(f"/collections/{NAME}/{path}".rstrip("/"), headers=headers)

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
    service: Service,
    before: Before = lambda key, l, part: None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[tuple[TieredStore, Paced]]:
    """A store over a paced peer, which has read the description and the directory. options: of the source."""
    paced = Paced(service.url, before)
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
