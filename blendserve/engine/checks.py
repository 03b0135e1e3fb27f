"""Checks of served answers, while the server is idle: a share of requests, drawn before anything is known of them.

A check holds token ids in memory until it ran; it keeps none. It measures the ratio that served and its neighbours.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

from blendserve.blend.blender import Blender
from blendserve.blend.policies import make_policy
from blendserve.config import BlendConfig
from blendserve.core import Answer, Steps, TokenIds
from blendserve.engine.request import Observer, PreparedRequest
from blendserve.engine.verify import Verifier, with_end
from blendserve.errors import StoreError
from blendserve.models.loader import LoadedModel
from blendserve.quality.controller import Controller
from blendserve.quality.target import Loss
from blendserve.store import ChunkKey

MAX_PENDING = 64  # answers; of more, which ones stay is drawn


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A served answer that waits for its check."""

    request: PreparedRequest
    controller: Controller
    blender: Blender
    answer: TokenIds  # with an end token if it ended with one
    keys: frozenset[ChunkKey]


class Checks:
    """The checks of one model. Call `offer` and `steps` on the model's thread, `forget` on any."""

    def __init__(
        self, model: LoadedModel, config: BlendConfig, observer: Observer, seed: int | None = None
    ) -> None:
        self._model, self._config, self._observer = model, config, observer
        self._rng = random.Random(seed)
        self._pending: list[Pending] = []
        self._lock = threading.Lock()  # of `_pending`
        self._offered = 0  # since none was pending

    def draws(self, request: PreparedRequest) -> bool:
        """Whether the answer to this request will be checked."""
        return request.controller is not None and self._rng.random() < self._config.check

    def offer(self, request: PreparedRequest, blender: Blender, answer: Answer) -> bool:
        """A drawn request was answered -> whether one more check is pending."""
        tokens = answer.token_ids
        if answer.stop_sequence is None:
            tokens = with_end(self._model, tokens, request.decode)
        if not tokens or request.controller is None:
            return False
        keys = frozenset(blender.key(chunk.ids) for chunk in request.prompt.chunks)
        pending = Pending(request, request.controller, blender, tokens, keys)
        with self._lock:
            self._offered = self._offered + 1 if self._pending else 1
            if len(self._pending) < MAX_PENDING:
                self._pending.append(pending)
                return True
            if (at := self._rng.randrange(self._offered)) < MAX_PENDING:
                self._pending[at] = pending
        self._observer.checked("dropped", None, 0.0)
        return False

    def forget(self, keys: Collection[ChunkKey]) -> None:
        """Drop checks of answers over chunks that were deleted."""
        gone = frozenset(keys)
        with self._lock:
            self._pending = [pending for pending in self._pending if not pending.keys & gone]

    def steps(self) -> Steps[None]:
        """Check one pending answer."""
        with self._lock:
            pending = self._pending.pop() if self._pending else None
        if pending is None:
            return
        start, request = time.perf_counter(), pending.request
        ratios = pending.controller.checked_ratios
        served = None if request.blend.method == "prefix" else make_policy(request.blend).ratio
        decode = request.decode.with_values(max_new_tokens=len(pending.answer))
        about = pending.blender, request.prompt, decode
        verifier = Verifier(self._model, *about, in_short_steps=True)
        losses: dict[float, Loss] = {}
        try:
            for ratio in ratios:
                blend = request.blend.with_values(method=self._config.method, ratio=ratio)
                done = yield from verifier.prefill(blend)
                if done.missing:
                    raise StoreError("a chunk of the prompt has been evicted")
                answer = pending.answer if ratio == served else None
                losses[ratio] = (yield from verifier.verify(done, answer)).loss
        except StoreError:
            self._observer.checked("lost", None, time.perf_counter() - start)
            return
        pending.controller.add(served, losses)
        loss = losses.get(served) if served is not None else None
        self._observer.checked("done", loss, time.perf_counter() - start)
