"""A published toy collection, and services that deliver it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from blendserve.config import KdnConfig, changed
from blendserve.delivery.publish import publish
from blendserve.engine.engine import Engine
from blendserve.serve.config import DeliverConfig
from blendserve.serve.kdn.running import make_app
from blendserve.serve.kdn.service import DeliveryService
from blendserve.store import KVStore, MemoryStore
from blendserve.store.kdn.collection import Collection
from blendserve.store.kdn.pace import Pace
from tests.engine.helpers import CONFIG, reader
from tests.serve.helpers import DOCUMENTS, index

NAME = "manual"
PATIENT_S = 30.0  # where nothing is to fail: a test machine may stop for a while
LEVELS = ("raw", "int8")


def publisher(folder: Path, store: KVStore, **changes: Any) -> Engine:
    """An engine with an index of the toy documents, over this store."""
    engine = Engine(changed(CONFIG, **changes), reader(), store)
    engine.index = index(folder / NAME, engine.prompts, DOCUMENTS)
    return engine


def published(folder: Path, name: str = NAME) -> tuple[KVStore, Collection]:
    """A store with the toy collection in it."""
    store = MemoryStore(2**30)
    return store, publish(publisher(folder, store), name, LEVELS[1:])


class Service:
    """A delivery service behind a real socket. A context manager."""

    def __init__(self, store: KVStore, certificate: tuple[Path, Path] | None = None, **settings: Any) -> None:
        """certificate: speak TLS with this one and its key."""
        self.inner = DeliveryService(store, DeliverConfig(**settings))
        config = uvicorn.Config(make_app(self.inner), port=0, log_level="critical", lifespan="on")
        if certificate:
            config.ssl_certfile, config.ssl_keyfile = certificate
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._uvicorn.run)
        self._thread.start()
        while not self._uvicorn.started:
            time.sleep(0.005)
        self.port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
        self.url = f"{'https' if certificate else 'http'}://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=f"{self.url}/v1/kdn", timeout=300)

    def stop(self) -> None:
        self.http.close()
        self._uvicorn.should_exit = True
        self._uvicorn.force_exit = True
        self._thread.join()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def settings(url: str, **options: Any) -> KdnConfig:
    return KdnConfig(url=url, **{"collection": NAME, "level": "raw", "deadline_s": PATIENT_S, **options})


class Known(Pace):
    """A link whose rate is what it is said to be."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def bytes_per_s(self) -> float | None:
        return self.rate


class Liar:
    """Answers every connection by a script of its own: what a hostile peer may do. A context manager."""

    def __init__(self, speak: Callable[[socket.socket, str], None]) -> None:
        """speak: to a connection, of which the first line of each request was read."""
        self._listener, self._speak = socket.create_server(("127.0.0.1", 0)), speak
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Liar:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        line.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16
        )  # what it says is what was taken, nearly
        with line, line.makefile("rb") as asked:
            try:
                while first := asked.readline().decode():
                    while asked.readline().strip():
                        pass
                    self.requests.append(first)
                    self._speak(line, first.split()[1])
            except OSError:
                return
