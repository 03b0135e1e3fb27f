"""From settings to a running server, and to its orderly end.

SIGTERM or Ctrl-C: no new connections, 503 for new requests on old ones; what runs is finished, or cut after `drain_s`;
then the store is closed and the process exits with 0. A second Ctrl-C does not wait.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from blendserve import console
from blendserve.config import Config, HttpConfig, ServeConfig, check_binding
from blendserve.engine.engine import Engine, made_for
from blendserve.engine.library import Library
from blendserve.engine.prompt import PromptBuilder
from blendserve.kdn.pull import resolve
from blendserve.models.loader import load_tokenizer
from blendserve.paths import index_folder
from blendserve.ray.cluster import cluster, worker_config
from blendserve.ray.replicas import ReplicaCount, Replicas
from blendserve.retrieve import Embedder, VectorIndex, read_manifest
from blendserve.serve import logs
from blendserve.serve.app import make_app, make_cluster_app
from blendserve.serve.routed import RemoteReader, RoutedService
from blendserve.serve.service import Service

log = logging.getLogger(__name__)

# A pass gives the GIL back and wants it again hundreds of times; beside a thread that parses, it waits so long each time.
SWITCH_S = 5e-4

# A proxy in front keeps idle connections for 60 s as a rule. If ours closed first, a request in flight would be lost.
KEEP_ALIVE_S = 75


def serve(settings: Config, indexes: Sequence[str]) -> None:
    """Open the indexes, serve until told to stop. Raises ConfigError, IndexMissing, ModelError, StoreError."""
    check_binding(settings.serve)
    first, config = resolve(indexes[0], settings.without_keys())
    folders = [first, *(resolve(index, config)[0] for index in indexes[1:])]
    with Engine.open(first, config) as engine:
        assert engine.index is not None
        library = Library.open(engine.index, folders, engine.prompts)
        run(engine, library, settings.serve)


def serve_cluster(
    settings: Config, indexes: Sequence[str], replicas: ReplicaCount, address: str | None
) -> None:
    """The same with replicas of the engine on a Ray cluster, which is joined or started (ray/cluster.py).

    Raises ClusterUnavailable, too.
    """
    check_binding(settings.serve)
    first, config = resolve(indexes[0], settings.without_keys())
    folders = [first, *(resolve(index, config)[0] for index in indexes[1:])]
    folder = index_folder(first)
    read_manifest(folder)  # before anything heavy is started
    opener = partial(Engine.open, worker_config(config, folder))
    log.info("Starting replicas: %s", replicas)
    with (
        cluster(address, replicas.most) as share,
        Replicas(opener, settings.serve.batching, replicas, share) as group,
    ):
        facts = group.facts()
        reader = RemoteReader(facts, load_tokenizer(config.reader))
        prompts = PromptBuilder(reader.tokenizer, config.prompt)
        embedder = Embedder.load(config.retrieve.embedder)
        made = made_for(facts.name, facts.dtype, facts.fingerprint, prompts)
        library = Library.open(VectorIndex.open(folder, embedder, **made), folders, prompts)
        service = RoutedService(config, library, settings.serve, reader, prompts, group)
        HttpServer(make_cluster_app(service), settings.serve, service.drain).run()


def run(
    engine: Engine, library: Library, serve: ServeConfig, announce: Callable[[str], None] = console.note
) -> None:
    """Serve an open engine until told to stop."""
    service = Service(engine, library, serve)
    sys.setswitchinterval(SWITCH_S)
    try:
        HttpServer(make_app(service), serve, service.drain, announce).run()
    finally:
        service.close()  # a forced end skips the application's own


class HttpServer(uvicorn.Server):
    """uvicorn, ending with 0 on SIGTERM: it would raise the signal again."""

    def __init__(
        self,
        app: FastAPI,
        http: HttpConfig,
        stopping: Callable[[], None],
        announce: Callable[[str], None] = console.note,
    ) -> None:
        """stopping: called on SIGTERM. announce: gets the line `Listening on URL`."""
        logs.to_stderr()
        super().__init__(
            uvicorn.Config(
                app,
                host=http.host,
                port=http.port,
                loop="asyncio",  # the same on every machine: Ray brings others, which uvicorn would take
                http="h11",
                log_config=None,
                access_log=False,
                lifespan="on",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(http.drain_s),
            )
        )
        self._announce, self._stopping = announce, stopping

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(None)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._announce(f"Listening on http://{host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._stopping()
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
