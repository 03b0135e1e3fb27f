"""Precompute on a Ray cluster: actors with a model each, one batch of chunks after another, into the shared store.

The store makes it safe, not Ray: an actor stores each chunk as soon as it is computed. If an actor dies, another one
starts as soon as a machine has room. Its unfinished batches, and chunks that other processes have leased, are left to
the driver, which computes at the end what is still missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from blendserve.blend.chunk_kv import STACK_TOKENS, in_stacks
from blendserve.blend.precompute import PrecomputeReport, PrecomputeRun
from blendserve.core import TokenIds
from blendserve.engine.engine import Engine
from blendserve.errors import ClusterUnavailable, ConfigError
from blendserve.ray.cluster import WorkerResources, cluster, import_ray, unwrap_ray_error, worker_config
from blendserve.registry import STORES
from blendserve.store import ChunkKey
from blendserve.store.base import Progress

OpenEngine = Callable[[], Engine]
"""Opens an engine on the shared store; picklable. It needs no index: chunks come as token ids."""

PROBE: TokenIds = (0,)
IN_FLIGHT = 2  # batches of each actor, so that none waits for the driver
PATIENCE_S = 60.0  # for a machine with room for an actor, while none runs


class PrecomputeActor:
    """One worker: an engine of its own, opened with the first batch."""

    def __init__(self, open_engine: OpenEngine, probe: ChunkKey) -> None:
        """probe: the key of the chunk PROBE in the driver's engine."""
        self._open = open_engine
        self._probe = probe
        self._engine: Engine | None = None

    def ready(self) -> None:
        """Returns as soon as the actor runs."""

    def compute(self, chunks: list[TokenIds]) -> PrecomputeReport:
        """Compute and store missing chunks of a batch, except chunks leased by other processes.

        Raises ConfigError if this engine gives chunks other keys than the driver's.
        """
        if self._engine is None:
            engine = self._open()
            engine.gate.require()
            if engine.blender.key(PROBE) != self._probe:
                raise ConfigError(
                    "a worker's chunks would have other keys than the driver's: its model has other weights or another "
                    "number format, as on a CPU beside a GPU; set model.dtype, or give as many workers as there are GPUs"
                )
            self._engine = engine
        return self._engine.blender.writer.precompute(chunks, on_leased="skip")


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
    chunks = engine.chunks()
    opener = partial(Engine.open, worker_config(engine.config, folder))
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
    `progress(tokens done, tokens in all)`. Raises StoreError and what opening an engine raises; ClusterUnavailable if
    no machine has room for a worker. Chunks that were stored stay.
    """
    writer = engine.blender.writer
    missing = writer.missing(chunks)
    run = PrecomputeRun(progress, sum(map(len, missing)))
    if missing:
        batches = [list(batch) for batch in in_stacks(missing, STACK_TOKENS)]
        limits = {"num_cpus": resources.cpus, "num_gpus": resources.gpus}
        actor = import_ray().remote(PrecomputeActor).options(**limits)
        probe = engine.blender.key(PROBE)
        new_actor = partial(actor.remote, open_engine, probe)
        for batch, report in compute_batches(new_actor, min(workers, len(batches)), batches):
            run.count(report.computed, report.tokens, report.bytes)
            run.advance(sum(map(len, batch)))
    last = writer.precompute(chunks)
    run.count(last.computed, last.tokens, last.bytes)
    return run.report(last.chunks, last.left)


def compute_batches(
    new_actor: Callable[[], Any], n: int, batches: Sequence[list[TokenIds]]
) -> Iterator[tuple[list[TokenIds], PrecomputeReport]]:
    """Batches computed by `n` actors, in any order. If an actor dies, its batches are left out and another one starts.

    Raises ClusterUnavailable if no actor runs and no machine has room for one for PATIENCE_S.
    """
    ray = import_ray()
    todo = deque(batches)
    actors = [new_actor() for _ in range(n)]
    # Reference of a call -> its actor and batch; [] for an actor's start
    calls: dict[Any, tuple[Any, list[TokenIds]]] = {a.ready.remote(): (a, []) for a in actors}
    try:
        while (is_computing := any(batch for _, batch in calls.values())) or (todo and calls):
            ended, _ = ray.wait([*calls], timeout=None if is_computing else PATIENCE_S)
            if not ended:
                raise ClusterUnavailable(
                    f"no machine of the Ray cluster has had room for a worker for {PATIENCE_S:.0f} s: what was computed "
                    "is stored; add one (ray start --address ...) and run the same command again"
                )
            for call in ended:
                actor, batch = calls.pop(call)
                try:
                    report = ray.get(call)
                except ray.exceptions.RayActorError:
                    if all(other is not actor for other, _ in calls.values()):  # its last call
                        actors.remove(actor)
                        actors.append(new_actor())
                        calls[actors[-1].ready.remote()] = actors[-1], []
                    continue
                except ray.exceptions.RayError as error:
                    raise unwrap_ray_error(error, f"a worker failed: {error}") from error
                for _ in range(min(len(todo), 1 if batch else IN_FLIGHT)):
                    following = todo.popleft()
                    calls[actor.compute.remote(following)] = actor, following
                if batch:
                    yield batch, report
    finally:
        for actor in actors:
            ray.kill(actor)
