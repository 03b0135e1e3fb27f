"""A planned request on its way through the scheduler, and what comes back from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from blendserve.blend.blender import Blender
from blendserve.core import Answer, BlendReport, ChunkKV, Explanation, TokenIds
from blendserve.engine.prefix_cache import PrefixKV
from blendserve.engine.request import Plan
from blendserve.fetch.copies import Hold
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


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One request. Filled by batching.py; `emit` is called on the model's thread, with the last event Finished or Failed.

    cost: tokens that are expected to run through the model; what is not known yet counts as missing.
    prefix_kv: gives the KV of the prompt's prefix; called on the model's thread; None = the store's.
    missed: told, on the model's thread, of the chunks that the store did not have, with KV of those that have some now.
    cancelled: set by whoever no longer wants it; nothing is emitted after that.
    """

    tenant: str
    plan: Plan
    blender: Blender
    emit: Callable[[Event], None]
    cost: float = 0.0
    prefix_kv: Callable[[], PrefixKV] | None = None
    missed: Callable[[Sequence[TokenIds], Mapping[TokenIds, ChunkKV]], None] | None = None
    hold: Hold | None = None  # of KV that is kept for it; closed when its prefill ends, or it is cancelled
    queued: Clock = field(default_factory=Clock)  # since this was made
    cancelled: bool = False

    def release(self) -> None:
        """It reads no more stored KV; idempotent."""
        if self.hold:
            self.hold.close()


class Observer(Protocol):
    """Told on the model's thread how requests fare, by the method that answers them, with seconds of one request.

    dequeued: so long it was queued. step: so many requests make a token. token: since the last one; the first: since the
    request came.
    """

    def dequeued(self, method: str, seconds: float) -> None: ...

    def prefilled(self, report: BlendReport, loading: float) -> None: ...

    def step(self, batch: int) -> None: ...

    def token(self, method: str, seconds: float, first: bool) -> None: ...
