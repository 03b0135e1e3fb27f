"""What the model's thread is at: a pass over the layers, a task by the way, requests that decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from blendserve.engine.generation import Generation
from blendserve.engine.queued import QueuedRequest
from blendserve.models.kv_cache import KVCache

SHORTER = 4  # times: how much shorter a request must be to go before what is left of a prefill


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Something for the model's thread to do by the way."""

    tenant: str
    run: Callable[[], None]


@dataclass(slots=True, eq=False)
class Pass:
    """What the model's thread is at: a request's prefill, or a background task."""

    request: QueuedRequest | None = None
    lent: float = 0.0  # cost of the requests that went before what was left of it

    def lends(self, request: QueuedRequest, done: float) -> bool:
        """Whether a request may go before the rest of a prefill, this share of which is `done`."""
        assert self.request is not None
        if self.request.tenant == request.tenant:
            return False
        cost = self.request.cost
        return SHORTER * request.cost <= cost * (1 - done) and self.lent + request.cost <= cost


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """A request that has a slot, from its first token to its last."""

    request: QueuedRequest
    cache: KVCache
    generation: Generation
