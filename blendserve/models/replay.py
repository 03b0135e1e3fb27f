"""Decoding without its launches: one step over some caches captured in a CUDA graph, and replayed for each token.

    row b of every tensor is cache b: its token and position when it takes part, token 0 at position 0 when it does not

A step is one row through all layers, hundreds of kernels that take a GPU less time than it takes the host to launch them.
A graph has fixed addresses, so that a server would need one for every set of slots that can meet in a step. Instead there
is one for all slots: a row more costs next to nothing, as a step's time goes into reading the weights. What a cache that
takes no part writes goes to its last place, which nobody reads: no answer's last token is ever run.

The first steps are run plainly: whoever says "yes" does not wait for a capture, and what is compiled, verified or
allocated at a first time is done then. Where a step cannot be captured, it goes on plainly, and nobody tries again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from weakref import WeakSet

import torch
from torch import Tensor

from blendserve.kernels.cuda.graphs import Capture, CudaGraph, Replayed
from blendserve.models.forward import append, append_captured
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel

EAGER = 4  # steps before the capture, which costs about as much as three of them
WORTH = 16  # tokens of an answer, at least, for which a capture may pay
MOST_CACHES = 16  # each attends by itself, in use or not

Step = Callable[[int, int], Tensor]  # position, token -> logits [V] for the next

_failed: WeakSet[DecoderModel] = WeakSet()

log = logging.getLogger(__name__)


def is_worthwhile(adapter: DecoderModel, new_tokens: int, n_caches: int = 1) -> bool:
    """Whether steps may be captured. A mixture of experts cannot be: what it launches depends on the row."""
    can = adapter.device.type == "cuda" and not adapter.family.experts and adapter not in _failed
    return can and new_tokens >= WORTH and n_caches <= MOST_CACHES


class ReplayedSteps:
    """Steps over caches, keys and values [B, L, K, T, D]: plainly at first, then by replay. For one thread."""

    @torch.inference_mode()
    def __init__(
        self,
        adapter: DecoderModel,
        keys: Tensor,
        values: Tensor,
        used: int = 0,
        capture: Capture = CudaGraph,
    ) -> None:
        """used: tokens that the caches hold. What is behind them is cleared: a weight of 0 does not hide a NaN."""
        self._adapter, self._keys, self._values, self._capture = adapter, keys, values, capture
        self._rows = torch.zeros(
            3, len(keys), dtype=torch.long, device=adapter.device
        )  # token, position, slot
        self._graph: Replayed | None = None
        self._made = 0
        for part in (keys, values):
            part[:, :, :, used:] = 0

    @torch.inference_mode()
    def __call__(self, rows: Sequence[tuple[int, int, int]], plain: Callable[[], Tensor]) -> Tensor:
        """Run (cache, position, token) of each row -> logits [len(rows), V], which hold until the next call.

        `plain` does the same where nothing is captured.
        """
        self._made += 1
        if self._made <= EAGER or self._adapter in _failed:
            return plain()
        self._set(rows)
        if self._graph is None:
            self._graph = self._captured()
        return plain() if self._graph is None else self._graph()[[cache for cache, _, _ in rows]]

    def _set(self, rows: Sequence[tuple[int, int, int]]) -> None:
        n, last = len(self._keys), self._keys.shape[3] - 1
        now = [[0] * n, [0] * n, [last] * n]
        for cache, at, token in rows:
            now[0][cache], now[1][cache], now[2][cache] = token, at, at
        self._rows.copy_(torch.tensor(now))

    def _captured(self) -> Replayed | None:
        try:
            return self._capture(self._step, self._adapter.device)
        except RuntimeError as error:  # CUDA's errors are such
            _failed.add(self._adapter)
            log.warning("decoding goes on without a CUDA graph: %s", str(error).splitlines()[0])
            return None

    def _step(self) -> Tensor:
        return append_captured(self._adapter, self._keys, self._values, *self._rows)


def decoding_steps(adapter: DecoderModel, cache: KVCache, used: int, new_tokens: int) -> Step:
    """The steps of one answer over its cache, which holds `used` tokens; on a GPU, out of a graph where that pays."""
    pays = is_worthwhile(adapter, new_tokens)
    return replayed_steps(adapter, cache, used) if pays else plain_steps(adapter, cache)


def plain_steps(adapter: DecoderModel, cache: KVCache) -> Step:
    """One request's steps, each launched kernel by kernel."""
    return lambda at, token: append(adapter, cache, at, (token,))[0]


def replayed_steps(adapter: DecoderModel, cache: KVCache, used: int, capture: Capture = CudaGraph) -> Step:
    """The same by replay; nothing is made before the first one."""
    steps: list[ReplayedSteps] = []

    def step(at: int, token: int) -> Tensor:
        if not steps:
            steps.append(ReplayedSteps(adapter, cache.keys[None], cache.values[None], used, capture))
        return steps[0]([(0, at, token)], lambda: append(adapter, cache, at, (token,)))[0]

    return step
