"""Precompute on a Ray cluster: actors with a model each, one batch of chunks after another, into the shared store.

The store makes it safe, not Ray: an actor stores each chunk as soon as it is computed. Ray restarts an actor that dies
where there is a CPU for it. The batches that it had, and chunks that other processes have leased, are left to the
driver, which computes at the end what is still missing.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from blendserve.blend.chunk_kv import STACK_TOKENS, in_stacks
from blendserve.blend.precompute import PrecomputeReport, PrecomputeRun
from blendserve.core import TokenIds
from blendserve.engine.engine import Engine
from blendserve.errors import ClusterUnavailable, ConfigError
from blendserve.ray.cluster import (
    WorkerResources,
    can_fit_worker,
    cluster,
    import_ray,
    unwrap_ray_error,
    worker_config,
)
from blendserve.registry import STORES
from blendserve.store import ChunkKey
from blendserve.store.base import Progress

OpenEngine = Callable[[], Engine]
"""Opens an engine on the shared store; picklable. It needs no index: chunks come as token ids."""

PROBE: TokenIds = (0,)
IN_FLIGHT = 2  # batches of each actor, so that none waits for the driver
POLL_S = 1.0
PATIENCE_S = 60.0  # for a machine with room for a worker

log = logging.getLogger(__name__)


class Computed(NamedTuple):
    """What an actor did of one batch."""

    chunks: int
    tokens: int
    n_bytes: int
    done: int  # tokens of the batch, computed or found


class PrecomputeActor:
    """One worker: an engine of its own, opened with the first batch."""

    def __init__(self, open_engine: OpenEngine, probe: ChunkKey) -> None:
        """probe: the key of the chunk PROBE in the driver's engine."""
        self._open, self._probe = open_engine, probe
        self._engine: Engine | None = None

    def ready(self) -> None:
        """Open the engine. Raises ConfigError where it gives the chunk PROBE another key than the driver's."""
        if self._engine is not None:
            return
        engine = self._open()
        engine.gate.require()
        if engine.blender.key(PROBE) != self._probe:
            raise ConfigError(
                "a worker's chunks would have other keys than the driver's: its model has other weights or another "
                "number format, as on a CPU beside a GPU; set model.dtype, or give as many workers as there are GPUs"
            )
        self._engine = engine

    def compute(self, chunks: list[TokenIds]) -> Computed:
        """Compute and store what is missing of a batch, but chunks that other processes have leased."""
        self.ready()
        assert self._engine is not None
        report = self._engine.blender.writer.precompute(chunks, on_leased="skip")
        return Computed(report.computed, report.tokens, report.bytes, sum(map(len, chunks)))


def precompute_index(
    engine: Engine,
    folder: Path,
    workers: int,
    address: str | None = None,
    progress: Progress | None = None,
    learning: Progress = lambda done, total: None,
) -> PrecomputeReport:
    """`Engine.precompute` by actors of a Ray cluster, for the engine of the index in this folder.

    The driver fits what is fitted once: the codec's tables when the engine was opened, the correction prior at the end.
    Raises ConfigError for a store that processes cannot share, and as `precompute` and `cluster`.
    """
    kind = engine.config.store.kind
    if not STORES.load(kind).persistent:
        raise ConfigError(
            f"workers cannot share a store of kind {kind!r}: set store.location to a folder or a server"
        )
    engine.gate.require()
    chunks, opener = engine.chunks(), partial(Engine.open, worker_config(engine.config, folder))
    with cluster(address, workers) as resources:
        report = precompute(engine, opener, chunks, workers, resources, progress)
    engine.learn(chunks, learning)
    return report


def precompute(
    engine: Engine,
    open_engine: OpenEngine,
    chunks: Sequence[TokenIds],
    workers: int,
    resources: WorkerResources,
    progress: Progress | None = None,
) -> PrecomputeReport:
    """Compute and store these chunks by `workers` actors of the connected cluster.

    engine: the driver's own on the same store; it computes what is left at the end. resources: of each actor.
    `progress(tokens done, tokens in all)`. Raises StoreError and what opening an engine raises; ClusterUnavailable where
    no machine has room for a worker. Chunks that were stored stay.
    """
    writer = engine.blender.writer
    missing = writer.missing(chunks)
    run = PrecomputeRun(progress, sum(map(len, missing)))
    if missing:
        batches = [list(batch) for batch in in_stacks(missing, STACK_TOKENS)]
        actors = Actors(open_engine, engine.blender.key(PROBE), min(workers, len(batches)), resources)
        for computed in actors.map(batches):
            run.count(computed.chunks, computed.tokens, computed.n_bytes)
            run.advance(computed.done)
    last = writer.precompute(chunks)
    run.count(last.computed, last.tokens, last.bytes)
    return run.report(last.chunks, last.left)


class Actors:
    """Actors of the connected cluster, and the batches that each of them has."""

    def __init__(self, open_engine: OpenEngine, probe: ChunkKey, n: int, resources: WorkerResources) -> None:
        self._ray, self._resources = import_ray(), resources
        options = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "max_restarts": -1}
        actor = self._ray.remote(PrecomputeActor).options(**options)
        self._actors = [actor.remote(open_engine, probe) for _ in range(n)]
        self._tasks: dict[Any, Any] = {}  # reference of a running call -> its actor
        self._restarting: dict[Any, Any] = {}  # the same of `ready` calls to actors that died
        self._without_room: float | None = None  # since when no machine has room for a worker

    def map(self, batches: Sequence[list[TokenIds]]) -> Iterator[Computed]:
        """What the actors computed, in any order; nothing of the batches of an actor that died."""
        todo = deque(batches)
        try:
            for actor in IN_FLIGHT * self._actors:
                self._give(actor, todo)
            while self._tasks or (todo and self._restarting):
                calls = [*self._tasks, *self._restarting]
                ended, _ = self._ray.wait(calls, timeout=POLL_S)
                if not ended:
                    self._require_room()
                for call in ended:
                    yield from self._finish(call, todo)
        finally:
            for actor in self._actors:
                self._ray.kill(actor)

    def _give(self, actor: Any, todo: deque[list[TokenIds]]) -> None:
        if todo:
            self._tasks[actor.compute.remote(todo.popleft())] = actor

    def _finish(self, call: Any, todo: deque[list[TokenIds]]) -> Iterator[Computed]:
        """Take the result of a call and give its actor another batch."""
        was_restarting = call in self._restarting
        actor = self._restarting.pop(call) if was_restarting else self._tasks.pop(call)
        try:
            result = self._ray.get(call)
        except self._ray.exceptions.RayActorError:
            if actor not in self._restarting.values():
                if was_restarting:
                    time.sleep(POLL_S)  # Ray has no call that waits for a restart
                self._restarting[actor.ready.remote()] = actor
            return
        except self._ray.exceptions.RayError as error:
            raise unwrap_ray_error(error, f"a worker failed: {error}") from error
        self._without_room = None
        for _ in range(IN_FLIGHT if was_restarting else 1):
            self._give(actor, todo)
        if not was_restarting:
            yield Computed(*result)

    def _require_room(self) -> None:
        """Raises ClusterUnavailable where no machine has had room for a worker for PATIENCE_S."""
        if can_fit_worker(self._resources):
            self._without_room = None
        elif self._without_room is None:
            self._without_room = time.monotonic()
            log.warning(
                "no machine of the Ray cluster has room for a worker: waiting %.0f s for one", PATIENCE_S
            )
        elif time.monotonic() - self._without_room > PATIENCE_S:
            raise ClusterUnavailable(
                "no machine of the Ray cluster has room for a worker any more: what was computed is stored; add one "
                "(ray start --address ...) and run the same command again"
            )
