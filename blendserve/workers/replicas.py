"""Replicas of an engine behind Ray Serve, and requests to them: one that a dead replica was answering is asked again."""

from __future__ import annotations

import asyncio
import importlib
import logging
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, replace
from typing import Any

from blendserve.engine.engine import Engine
from blendserve.engine.queued import Event, Finished, Piece, Started
from blendserve.errors import ClusterUnavailable, InputError
from blendserve.timing import Clock
from blendserve.workers.cluster import Share, import_ray
from blendserve.workers.precompute import own_error
from blendserve.workers.replica import EngineReplica, ReaderFacts, RoutedRequest

APP = "blendserve"
CHUNK_ROUTER = "blendserve.workers.router:ChunkRouter"
ATTEMPTS = 6  # of one request, each on a replica's death
PAUSE_S = 0.1  # before the third, and twice as long before each further one: a dead node is not known to be dead at once
STATS_S = 1.0  # between two words of a replica about what is hot
HEALTH_S = 2.0


@dataclass(frozen=True, slots=True)
class ReplicaCount:
    """How many replicas there are: always the same, or as many between two numbers as there is work for."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> ReplicaCount:
        """From `2` or `1-4`. Raises InputError."""
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
        if not found or not 1 <= int(found[1]) <= int(found[2] or found[1]):
            raise InputError(
                f"--replicas cannot be {text!r}: give a number from 1 on, or the least and the most, such as 1-4"
            )
        return cls(int(found[1]), int(found[2] or found[1]))

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least} to {self.most}"

    def options(self, slots: int) -> dict[str, Any]:
        """Of a deployment. Ray Serve adds replicas while they have more to answer than `slots` each, as a mean."""
        if self.least == self.most:
            return {"num_replicas": self.least}
        bounds = {"min_replicas": self.least, "max_replicas": self.most}
        return {"autoscaling_config": {**bounds, "target_ongoing_requests": slots}}


class Replicas(AbstractContextManager["Replicas"]):
    """Started on the connected cluster, and ended at the end."""

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        batching: Mapping[str, Any],
        count: ReplicaCount,
        share: Share,
        router: str = CHUNK_ROUTER,
    ) -> None:
        """batching: arguments of BatchEngine. share: what each replica gets.

        Raises what opening an engine raises, and ClusterUnavailable.
        """
        self._ray = import_ray()
        self._serve = importlib.import_module("ray.serve")  # seconds
        config = importlib.import_module("ray.serve.config")
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        self._serve.start(proxy_location="Disabled")  # HTTP is ours
        self.name = f"{APP}-{secrets.token_hex(4)}"  # others' servers may be on the same cluster
        self._deployment = self._serve.deployment(EngineReplica).options(
            name=self.name,
            **count.options(batching["slots"]),
            max_ongoing_requests=batching["slots"] + batching["queue"],
            ray_actor_options={"num_cpus": share.cpus, "num_gpus": share.gpus},
            request_router_config=config.RequestRouterConfig(
                request_router_class=router, request_routing_stats_period_s=STATS_S
            ),
            health_check_period_s=HEALTH_S,
        )
        self._bound = open_engine, dict(batching)
        self._run()

    def _run(self) -> None:
        app = self._deployment.bind(*self._bound)
        try:
            self._handle = self._serve.run(app, name=self.name, route_prefix=None)
        except (self._ray.exceptions.RayError, RuntimeError) as error:
            raise own_error(error, f"replicas cannot be started: {error}") from error

    def scale(self, n: int) -> None:
        """So many replicas from now on; those that run and stay keep what they have in memory."""
        self._deployment = self._deployment.options(num_replicas=n)
        self._run()

    def __exit__(self, *_: object) -> None:
        self._serve.delete(self.name)
        self._handle.shutdown()  # or a thread of it goes on to tell a cluster that may have ended how many wait

    def facts(self) -> ReaderFacts:
        """Of the reader that they all have."""
        found: ReaderFacts = self._handle.facts.remote().result()
        return found

    def answer(self, request: RoutedRequest, keys: frozenset[bytes]) -> AsyncIterator[Event]:
        """As `answer_from` gives it. keys: of the request's chunks."""
        return answer_from(self._handle, self._ray.exceptions, request, keys)


async def answer_from(
    handle: Any, errors: Any, request: RoutedRequest, keys: frozenset[bytes]
) -> AsyncIterator[Event]:
    """Started, pieces, and at last Finished or Failed, once each, however many replicas ended.

    handle: of the deployment. errors: Ray's exceptions. keys: of the request's chunks. Where text was sent already and
    another replica says something else, that is an error, not a second answer. Raises ClusterUnavailable.
    """
    clock, said = Clock(), Said()
    for attempt in range(ATTEMPTS):
        if attempt > 1:
            await asyncio.sleep(PAUSE_S * 2 ** (attempt - 2))
        sent = replace(request, seconds=request.seconds + clock.elapsed())
        stream = handle.options(stream=True).answer.remote(sent, keys=keys)
        try:
            async with aclosing(_events(stream)) as events:
                async for event in events:
                    for new in said.new(event):
                        yield new
            return
        except (errors.RayActorError, errors.NodeDiedError, errors.ObjectLostError):
            continue
        except errors.OutOfMemoryError as error:  # Ray ends a process where a machine's memory runs low
            logging.getLogger(__name__).warning("A replica was ended while it answered: %s", error)
        except errors.RayError as error:
            # Ray's text names machines and processes, which the client must not see.
            logging.getLogger(__name__).error("A replica failed: %s", error)
            raise own_error(error, "the replica failed: the server's log says why") from error
    raise ClusterUnavailable(f"{ATTEMPTS} replicas ended while they answered: ask again")


async def _events(stream: Any) -> AsyncGenerator[Event, None]:
    """What a replica sends; told to stop where nobody waits for the rest."""
    ended = False
    try:
        async for event in stream:
            ended = not isinstance(event, Started | Piece)
            yield event
    finally:
        if not ended:
            stream.cancel()


class Said:
    """What of an answer the asker has, so that another replica's goes on from there."""

    def __init__(self) -> None:
        self._started, self._text, self._again = False, "", ""

    def new(self, event: Event) -> list[Event]:
        """What of an event the asker does not have. Raises ClusterUnavailable where the text is another than theirs."""
        if isinstance(event, Started):
            first, self._started, self._again = not self._started, True, ""
            return [event] if first else []
        if isinstance(event, Piece):
            self._again += event.text
            self._require(self._again[: len(self._text)] == self._text[: len(self._again)])
            more = self._again[len(self._text) :]
            self._text += more
            return [Piece(more)] if more else []
        if isinstance(event, Finished):
            self._require(event.answer.text.startswith(self._text))
        return [event]

    def _require(self, goes_on: bool) -> None:
        if not goes_on:
            raise ClusterUnavailable(
                "the replica that was answering ended, and another one goes on differently: ask again"
            )
