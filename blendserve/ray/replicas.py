"""Replicas of an engine behind Ray Serve, and requests to them, which are retried when a replica dies."""

from __future__ import annotations

import asyncio
import importlib
import logging
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractContextManager, aclosing
from typing import Any, NamedTuple

from blendserve.config import ServeConfig
from blendserve.engine.engine import Engine
from blendserve.engine.request import Completed, Event, PrefillDone, TextDelta
from blendserve.errors import ClusterUnavailable, InputError
from blendserve.ray.cluster import WorkerResources, import_ray, unwrap_ray_error
from blendserve.ray.replica import EngineReplica, ModelFacts, RoutedRequest

CHUNK_ROUTER = "blendserve.ray.router:ChunkRouter"
ATTEMPTS = 6  # of one request; the next one follows a replica's death
PAUSE_S = 0.1  # before the third attempt, then doubled: Ray needs a while to notice a dead node
REPORT_PERIOD_S = 1.0
HEALTH_PERIOD_S = 2.0

log = logging.getLogger(__name__)


class ReplicaCount(NamedTuple):
    """Bounds of the number of replicas; equal ones for a fixed number."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> ReplicaCount:
        """Parse `2` or `1-4`. Raises InputError."""
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
        if not found or not 1 <= int(found[1]) <= int(found[2] or found[1]):
            raise InputError(
                f"--replicas cannot be {text!r}: give a number from 1 on, or the least and the most, such as 1-4"
            )
        return cls(int(found[1]), int(found[2] or found[1]))

    def options(self, slots: int) -> dict[str, Any]:
        """Options of a deployment. Ray Serve adds replicas while they have more than `slots` requests each on average."""
        if self.least == self.most:
            return {"num_replicas": self.least}
        bounds = {"min_replicas": self.least, "max_replicas": self.most}
        return {"autoscaling_config": {**bounds, "target_ongoing_requests": slots}}


class Replicas(AbstractContextManager["Replicas"]):
    """The replicas of one server on the connected cluster."""

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        config: ServeConfig,
        count: ReplicaCount,
        resources: WorkerResources,
        router: str = CHUNK_ROUTER,
    ) -> None:
        """config: without keys. resources: of each replica.

        Raises what opening an engine raises, and ClusterUnavailable.
        """
        self._ray = import_ray()
        self._serve = importlib.import_module("ray.serve")  # seconds
        router_config = importlib.import_module("ray.serve.config").RequestRouterConfig
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        self._serve.start(proxy_location="Disabled")  # HTTP is ours
        self._name = f"blendserve-{secrets.token_hex(4)}"  # others' servers may be on the same cluster
        self._deployment = self._serve.deployment(EngineReplica).options(
            name=self._name,
            **count.options(config.slots),
            max_ongoing_requests=config.slots + config.max_concurrent,
            ray_actor_options={"num_cpus": resources.cpus, "num_gpus": resources.gpus},
            request_router_config=router_config(
                request_router_class=router, request_routing_stats_period_s=REPORT_PERIOD_S
            ),
            health_check_period_s=HEALTH_PERIOD_S,
        )
        self._arguments = open_engine, config
        self._run()

    def _run(self) -> None:
        app = self._deployment.bind(*self._arguments)
        try:
            self._handle = self._serve.run(app, name=self._name, route_prefix=None)
        except (self._ray.exceptions.RayError, RuntimeError) as error:
            raise unwrap_ray_error(error, f"replicas cannot be started: {error}") from error

    def scale(self, n: int) -> None:
        """Run n replicas from now on; remaining ones keep their memory."""
        self._deployment = self._deployment.options(num_replicas=n)
        self._run()

    def __exit__(self, *_: object) -> None:
        self._serve.delete(self._name)
        self._handle.shutdown()  # else its thread goes on reporting to a cluster that may have ended

    def facts(self) -> ModelFacts:
        """What requests need to know of the model."""
        found: ModelFacts = self._handle.facts.remote().result()
        return found

    def answer(self, request: RoutedRequest) -> AsyncIterator[Event]:
        """The events of `answer_from`."""
        return answer_from(self._handle, self._ray.exceptions, request)


async def answer_from(handle: Any, errors: Any, request: RoutedRequest) -> AsyncIterator[Event]:
    """PrefillDone, pieces of text, then Completed or Failed, once each, however many replicas die.

    handle: of the deployment. errors: Ray's exceptions. Raises ClusterUnavailable if another replica's answer differs
    from text that was already sent.
    """
    replay = ReplayFilter()
    for attempt in range(ATTEMPTS):
        if attempt > 1:
            await asyncio.sleep(PAUSE_S * 2 ** (attempt - 2))
        stream = handle.options(stream=True).answer.remote(request)
        try:
            async with aclosing(_events(stream)) as events:
                async for event in events:
                    if (new := replay.unsent(event)) is not None:
                        yield new
            return
        except (errors.RayActorError, errors.NodeDiedError, errors.ObjectLostError):
            continue
        except errors.OutOfMemoryError as error:  # Ray ends a process if a machine's memory runs low
            log.warning("A replica was stopped during a request: %s", error)
        except errors.RayError as error:
            # Ray's text names machines and processes, which the client must not see.
            log.error("A replica failed: %s", error)
            raise unwrap_ray_error(error, "the replica failed: the server's log says why") from error
    raise ClusterUnavailable(f"{ATTEMPTS} replicas died during the request: send it again")


async def _events(stream: Any) -> AsyncGenerator[Event, None]:
    """The events of a replica, which is cancelled when the caller leaves early."""
    ended = False
    try:
        async for event in stream:
            ended = not isinstance(event, PrefillDone | TextDelta)
            yield event
    finally:
        if not ended:
            stream.cancel()


class ReplayFilter:
    """Drops the part of a repeated answer that the client already has."""

    def __init__(self) -> None:
        self._is_prefilled = False
        self._sent = ""
        self._replayed = ""

    def unsent(self, event: Event) -> Event | None:
        """The part of an event that the client does not have. Raises ClusterUnavailable if the text differs."""
        if isinstance(event, PrefillDone):
            is_first = not self._is_prefilled
            self._is_prefilled = True
            self._replayed = ""
            return event if is_first else None
        if isinstance(event, TextDelta):
            self._replayed += event.text
            n = min(len(self._replayed), len(self._sent))
            more = self._replayed[n:]
            agrees = self._replayed[:n] == self._sent[:n]
            self._sent += more
        else:
            more = ""
            agrees = not isinstance(event, Completed) or event.answer.text.startswith(self._sent)
        if not agrees:
            raise ClusterUnavailable(
                "a replica died while it answered, and another one's answer differs: send the request again"
            )
        return event if not isinstance(event, TextDelta) else TextDelta(more) if more else None
