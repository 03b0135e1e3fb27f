"""Precompute on a Ray cluster: actors with a reader each, one stack of chunks after another, into the shared store.

What makes it safe is the store, not Ray: an actor stores each chunk as soon as it is computed. An actor that dies is
started again where there is a CPU for it; the stacks that it had are not, as Ray would keep them waiting for that very
actor, and for ever if the cluster has become too small. What of them was not stored, and what somebody else is computing,
is left to the caller, who comes back to it at the end.
"""

from __future__ import annotations

import importlib
import logging
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from blendserve.blend.chunk_kv import STACK_TOKENS, in_stacks
from blendserve.blend.precompute import PrecomputeReport, PrecomputeRun
from blendserve.core import TokenIds
from blendserve.engine.engine import Engine
from blendserve.engine.library import Progress
from blendserve.errors import BlendserveError, ClusterUnavailable, ConfigError
from blendserve.registry import STORES
from blendserve.store import ChunkKey
from blendserve.workers.cluster import Share, cluster, has_room, import_ray, worker_config
from blendserve.workers.watch import watched

OpenEngine = Callable[[], Engine]
"""Opens an engine on the shared store; picklable. It needs no index: chunks come as token ids."""

PROBE: TokenIds = (0,)
TASKS_PER_WORKER = 64  # at most, so that few are computed again and the slowest worker is waited for briefly


class PrecomputeActor:
    """One worker: an engine of its own, for as long as the run lasts."""

    def __init__(self, open_engine: OpenEngine, probe: ChunkKey) -> None:
        """probe: what the caller's engine names the chunk PROBE. Raises ConfigError where this one names it otherwise."""
        self._engine = open_engine()
        self._engine.gate.require()
        if self._engine.blender.key(PROBE) != probe:
            raise ConfigError(
                "a worker's chunks would have other keys than the command's: its reader has other weights or another "
                "number format, as on a CPU beside a GPU; set reader.dtype, or give as many workers as there are GPUs"
            )

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Compute what of a stack is missing -> figures of PrecomputeReport, and how many tokens are done with.

        An error is told in `failed`, pickled: what Ray itself calls failed is a stack whose actor died.
        """
        chunks: list[TokenIds] = pickle.loads(row["stack"])
        try:
            report = self._engine.blender.precompute(chunks, others="leave")
        except Exception as error:
            told = error if isinstance(error, BlendserveError) else ClusterUnavailable(f"a worker: {error!r}")
            return {"failed": pickle.dumps(told), "computed": 0, "tokens": 0, "bytes": 0, "done": 0}
        figures = {"computed": report.computed, "tokens": report.tokens, "bytes": report.bytes}
        return {"failed": b"", **figures, "done": sum(map(len, chunks))}


def precompute_index(
    engine: Engine,
    folder: Path,
    workers: int,
    address: str | None = None,
    progress: Progress | None = None,
    learning: Progress = lambda done, total: None,
) -> PrecomputeReport:
    """`Engine.precompute` by actors of a Ray cluster (workers/cluster.py), for the engine of the index in this folder.

    What is learnt once is learnt here: tables of the codec when the engine was opened, before any actor, and how chunks
    move at the end. Raises ConfigError for a store that processes cannot share, and as `precompute` and `cluster`.
    """
    kind = engine.config.store.kind
    if not STORES.load(kind).persistent:
        raise ConfigError(f"workers cannot share a store of kind {kind!r}: set store.kind to another one")
    engine.gate.require()
    chunks, opener = engine.chunks(), partial(Engine.open, worker_config(engine.config, folder))
    with cluster(address, workers) as share:
        report = precompute(engine, opener, chunks, workers, share, progress)
    engine.learn(chunks, learning)
    return report


def precompute(
    engine: Engine,
    open_engine: OpenEngine,
    chunks: Sequence[TokenIds],
    workers: int,
    share: Share,
    progress: Progress | None = None,
) -> PrecomputeReport:
    """Compute and store these chunks by as many actors of the connected cluster.

    engine: the caller's own on the same store. It stores the prefix first, and what is left at the end. share: what each
    actor gets. `progress(tokens done, tokens in all)`. Raises StoreError and what opening an engine raises;
    ClusterUnavailable where Ray gives up. What was stored stays.
    """
    run = PrecomputeRun(progress)
    first = engine.blender.precompute([])
    run.count(first.computed, first.tokens, first.bytes)
    todo = engine.blender.missing(chunks)
    run.total = sum(map(len, todo))
    probe = engine.blender.key(PROBE)
    for done in _mapped(open_engine, probe, todo, workers, share) if todo else ():
        run.count(done["computed"], done["tokens"], done["bytes"])
        run.step(done["done"])
    last = engine.blender.precompute(chunks)
    run.count(last.computed, last.tokens, last.bytes)
    return run.report(last.chunks, last.left)


def _mapped(
    open_engine: OpenEngine, probe: ChunkKey, todo: Sequence[TokenIds], workers: int, share: Share
) -> Iterator[dict[str, Any]]:
    """What the actors say of each stack, in any order; of an actor that dies, nothing of those it had."""
    ray = import_ray()
    data = importlib.import_module("ray.data")  # seconds
    stacks = [{"stack": pickle.dumps(stack)} for stack in in_stacks(todo, STACK_TOKENS)]
    tasks = min(len(stacks), TASKS_PER_WORKER * workers)
    context = data.DataContext.get_current()
    context.enable_progress_bars, context.max_errored_blocks = False, -1  # no number of deaths ends it
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    with (
        warnings.catch_warnings()
    ):  # this way to give max_task_retries goes in Ray 2.64, and there is no other one yet
        warnings.simplefilter("ignore", DeprecationWarning)
        mapped = data.from_items(stacks, override_num_blocks=tasks).map(
            PrecomputeActor,
            fn_constructor_args=(open_engine, probe),
            compute=data.ActorPoolStrategy(size=min(workers, tasks)),
            num_cpus=share.cpus,
            num_gpus=share.gpus,
            max_task_retries=0,
        )
    try:
        for row in watched(mapped.iter_rows(), partial(has_room, share)):
            if row["failed"]:
                raise pickle.loads(row["failed"])
            yield row
    except ray.exceptions.RayError as error:
        raise own_error(error, f"the workers ended: {error}") from error


def own_error(error: BaseException, what: str) -> BlendserveError:
    """The error of ours that a Ray error carries, or one that says `what`."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, BlendserveError):
            return at
        at = getattr(at, "cause", None) or at.__cause__
    return ClusterUnavailable(what)
