"""From settings to a running server, and its shutdown.

On SIGTERM or Ctrl-C, the server accepts no connections and answers new requests with 503. Running requests end, or are
cut after `drain_s`. Then the store is closed and the process exits with 0. A second Ctrl-C does not wait.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType

import uvicorn
from fastapi import FastAPI

from blendserve import console
from blendserve.config import Config, HttpConfig, ServeConfig, check_binding
from blendserve.engine.documents import Collections
from blendserve.engine.engine import Engine
from blendserve.errors import ConfigError
from blendserve.kdn.pull import resolve
from blendserve.serve.app import create_engine_app
from blendserve.serve.auth import Backend
from blendserve.serve.engine_client import LocalEngineClient
from blendserve.serve.middleware import log_json_to_stderr

# A prefill releases and takes the GIL hundreds of times. Each time it waits this long for a thread that parses.
SWITCH_INTERVAL_S = 5e-4

# A proxy usually keeps idle connections for 60 s. If ours closed first, a request in flight would be lost.
KEEP_ALIVE_S = 75


def serve(settings: Config, indexes: Sequence[str]) -> None:
    """Open the indexes, if any, and serve until told to stop.

    Raises ConfigError, IndexMissing, ModelError, StoreError.
    """
    config, folders = local_indexes(settings, indexes)
    with Engine.open(folders[0], config) if folders else Engine.open(config) as engine:
        library = Collections.open(engine.index, folders) if engine.index is not None else Collections({})
        run(engine, library, settings.serve)


def local_indexes(settings: Config, indexes: Sequence[str]) -> tuple[Config, list[str]]:
    """The engine's settings, without keys, and the folders of the indexes, after collections were pulled.

    Raises ConfigError for an address or a key file that cannot be used.
    """
    check_http(settings.serve)
    if not indexes:
        return settings.without_keys(), []
    first, config = resolve(indexes[0], settings.without_keys())
    return config, [first, *(resolve(index, config)[0] for index in indexes[1:])]


def check_http(http: HttpConfig) -> None:
    """Raises ConfigError for an address that cannot be used or needs API keys, and for a missing key file."""
    check_binding(http)
    if http.keys and not http.keys.exists():
        raise ConfigError(
            f"there is no key file {http.keys}: run `blendserve keys create NAME --file {http.keys}`",
            setting="serve.keys",
            path=http.keys,
        )
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    try:
        socket.create_server((http.host, http.port), family=family).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(
            f"cannot listen on {http.host}, port {http.port}: {reason}; give another --port or --host",
            setting="serve.port",
        ) from None


def run(engine: Engine, library: Collections, serve: ServeConfig) -> None:
    """Serve an open engine until told to stop."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    client = LocalEngineClient(engine, library, serve)
    HttpServer(create_engine_app(client), client).run()


class HttpServer(uvicorn.Server):
    """uvicorn, exiting with 0 on SIGTERM: it would raise the signal again."""

    def __init__(self, app: FastAPI, backend: Backend) -> None:
        """backend: of the app; drained on a signal, closed at the end of `run`."""
        log_json_to_stderr()
        super().__init__(
            uvicorn.Config(
                app,
                host=backend.http.host,
                port=backend.http.port,
                loop="asyncio",  # uvicorn would choose uvloop where Ray has installed it
                http="h11",
                log_config=None,
                access_log=False,
                lifespan="on",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(backend.http.drain_s),
            )
        )
        self._backend = backend

    def run(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        try:
            super().run()
        finally:
            self._backend.close()  # after a forced exit, which skips the application's own

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(None)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            console.note(f"Listening on http://{host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._backend.drain()
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
