"""From settings to a running server, and its shutdown.

On SIGTERM or Ctrl-C, the server answers new requests with 503, `/ready` too, so that a load balancer sends no more.
Running requests end, or are cut after `drain_s`. Then the port and the store are closed and the process exits with 0. A
second Ctrl-C does not wait.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from blendserve import console
from blendserve.config import Config, HttpConfig, ServeConfig, check_binding
from blendserve.engine.documents import Collections
from blendserve.engine.engine import Engine
from blendserve.errors import ConfigError
from blendserve.kdn.pull import resolve
from blendserve.serve.app import create_engine_app
from blendserve.serve.auth import ServiceBackend
from blendserve.serve.connections import AcceptErrors, Connection, Connections, raise_file_limit
from blendserve.serve.engine_client import LocalEngineClient
from blendserve.serve.middleware import log_to_stderr
from blendserve.timing import Clock

# A prefill releases and takes the GIL hundreds of times. Each time it waits this long for a thread that parses.
SWITCH_INTERVAL_S = 5e-4

# A proxy usually keeps idle connections for 60 s. If ours closed first, a request in flight would be lost.
KEEP_ALIVE_S = 75

TICK_S = 0.1  # in which a second Ctrl-C is noticed

ANY_ADDRESS = ("0.0.0.0", "::")


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
    check_port(http.host, http.port)


def check_port(host: str, port: int) -> None:
    """Raises ConfigError for an address that cannot be listened on."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except (OSError, OverflowError) as error:
        reason = os.strerror(getattr(error, "errno", None) or 0) if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {reason}; give another --port or --host",
            setting="serve.port",
        ) from None


def run(engine: Engine, library: Collections, serve: ServeConfig, page_key: str = "") -> None:
    """Serve an open engine until told to stop. page_key: of the page's printed URL. Raises ConfigError."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    engine.blender.planner.calibrate()  # reports say what full prefill would take
    client = LocalEngineClient(engine, library, serve)
    listen(create_engine_app(client), client, page_key)


def listen(app: FastAPI, backend: ServiceBackend, page_key: str = "") -> None:
    """Serve an application until told to stop, with the log on stderr. Raises ConfigError for an address without keys."""
    check_binding(backend.http)
    log_to_stderr()
    HttpServer(app, backend, page_key).run()


class HttpServer(uvicorn.Server):
    """uvicorn with limits of connections. It exits with 0 on SIGTERM: uvicorn would raise the signal again."""

    def __init__(self, app: FastAPI, backend: ServiceBackend, page_key: str = "", **options: Any) -> None:
        """backend: of the app; drained on a signal, closed at the end of `run`. options: of uvicorn.

        page_key: an API key that was made for this run; the page's URL with it is printed.
        """
        connections = Connections(raise_file_limit())
        http = backend.http
        settings: dict[str, Any] = {
            "host": http.host,
            "port": http.port,
            "backlog": connections.backlog,
            "loop": "asyncio",  # uvicorn would choose uvloop where Ray has installed it
            "http": Connection,
            "log_config": None,
            "access_log": False,
            "lifespan": "on",
            "proxy_headers": bool(http.proxies),
            "forwarded_allow_ips": list(http.proxies),
            "timeout_keep_alive": KEEP_ALIVE_S,
        }
        super().__init__(uvicorn.Config(app, **settings | options))
        self.server_state = connections
        self._backend = backend
        self._page_key = page_key

    def run(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        try:
            super().run()
        finally:
            self._backend.close()  # after a forced exit, which skips the application's own

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        asyncio.get_running_loop().set_exception_handler(AcceptErrors())
        await super().startup(None)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            console.note(f"Listening on http://{host}:{port}")
            if self._page_key:
                shown = "127.0.0.1" if host in ANY_ADDRESS else host
                console.note(f"Open http://{shown}:{port}/#key={self._page_key}")

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Keep the port open until the running requests have ended, then end as uvicorn does."""
        clock = Clock()
        running = {*self.server_state.tasks}
        while running and not self.force_exit and clock.elapsed() < self._backend.http.drain_s:
            _, running = await asyncio.wait(running, timeout=TICK_S)
        left_s = self._backend.http.drain_s - clock.elapsed()
        self.config.timeout_graceful_shutdown = math.ceil(max(0.0, left_s))
        await super().shutdown(None)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._backend.drain()
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
