"""A planned request on its way through the scheduler, and what comes back from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from blendserve.core import Answer, BlendReport, ChunkKV, Explanation, Steps, TokenIds
from blendserve.engine.generation import Generation
from blendserve.engine.prefill import Prefill
from blendserve.engine.request import Plan
from blendserve.fetch.copies import Hold
from blendserve.models.kv_cache import KVCache
from blendserve.timing import Clock


@dataclass(frozen=True, slots=True)
class Started:
    """Prefill is done."""

    cached: int  # tokens of the prompt whose KV was there already
    report: BlendReport
    explanation: Explanation


@dataclass(frozen=True, slots=True)
class Piece:
    """Some more of the text."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The whole answer."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a request that cannot be answered."""

    error: Exception


Event: TypeAlias = "Started | Piece | Finished | Failed"


PREEMPT_FACTOR = 4  # times: how much cheaper a request must be than the rest of the prefill that it preempts


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One request. Filled by batching.py; `emit` is called on the model's thread, with the last event Finished or Failed.

    cost: tokens that are expected to run through the model; what is not known yet counts as missing.
    prefill: begins the prefill into a slot.
    missed: told, on the model's thread, of the chunks that the store did not have, with KV of those that have some now.
    cancelled: set by whoever no longer wants it; nothing is emitted after that.
    """

    tenant: str
    plan: Plan
    prefill: Callable[[KVCache], Steps[Prefill]]
    emit: Callable[[Event], None]
    cost: float = 0.0
    missed: Callable[[Sequence[TokenIds], Mapping[TokenIds, ChunkKV]], None] | None = None
    hold: Hold | None = None  # of KV that is kept for it; closed when its prefill ends, or it is cancelled
    queued: Clock = field(default_factory=Clock)  # since this was made
    cancelled: bool = False

    def release(self) -> None:
        """It reads no more stored KV; idempotent."""
        if self.hold:
            self.hold.close()


@dataclass(frozen=True, slots=True, eq=False)
class BackgroundTask:
    """Work for the store that no request waits for."""

    tenant: str
    steps: Steps[None]


@dataclass(slots=True, eq=False)
class Prefilling:
    """A request whose prefill has begun."""

    request: QueuedRequest
    cache: KVCache
    steps: Steps[Prefill]
    layer: int = -1  # that is next, counted through all passes
    preempted_cost: float = 0.0  # of the requests that preempted it

    def is_preempted_by(self, request: QueuedRequest, n_layers: int) -> bool:
        """Whether a request may go before the rest of the pass that runs."""
        if self.request.tenant == request.tenant:
            return False
        cost, rest = self.request.cost, 1 - self.layer % n_layers / n_layers
        return PREEMPT_FACTOR * request.cost <= cost * rest and self.preempted_cost + request.cost <= cost


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """A request from its first token to its last."""

    request: QueuedRequest
    cache: KVCache
    generation: Generation


class Observer(Protocol):
    """Told on the model's thread how requests fare, by the method that answers them, with seconds of one request.

    dequeued: so long it was queued. step: so many requests make a token. token: since the last one; the first: since the
    request came.
    """

    def dequeued(self, method: str, seconds: float) -> None: ...

    def prefilled(self, report: BlendReport, loading: float) -> None: ...

    def step(self, batch: int) -> None: ...

    def token(self, method: str, seconds: float, first: bool) -> None: ...
