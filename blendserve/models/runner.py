"""Decode a batch: one native call or the layer loop (forward.py), on a GPU a CUDA graph that is replayed for each token.

A step is one row through all layers, hundreds of kernels that take a GPU less time than it takes the host to launch them.
A graph has fixed addresses, so one graph runs the rows of all caches: a row more costs next to nothing, as a step's time
goes into reading the weights. A cache without a row in a step runs token 0 at position 0 and writes to its last place,
which is never read: no answer's last token is ever run.

The first steps are run plainly: a short answer does not wait for a capture, and what is compiled, verified or allocated
at a first time is done then. Where a step cannot be captured, decoding stays plain.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch import Tensor

from blendserve.kernels.cuda.graphs import Capture, CudaGraph, Replayed
from blendserve.models.forward import append_captured, decode_each
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.models.native import Row

EAGER_STEPS = 4  # before the capture, which costs about as much as three of them
MIN_NEW_TOKENS = 16  # of an answer for which a capture may pay
MAX_CACHES = 16  # of one graph: each attends by itself, in use or not

_failed: WeakSet[DecoderModel] = WeakSet()

log = logging.getLogger(__name__)


def is_capturable(adapter: DecoderModel, n_caches: int = 1) -> bool:
    """Whether steps may be captured. A mixture of experts cannot be: what it launches depends on the row."""
    return adapter.device.type == "cuda" and not adapter.family.experts and n_caches <= MAX_CACHES


class Runner:
    """Decoding steps over B caches. For one thread."""

    @torch.inference_mode()
    def __init__(
        self,
        adapter: DecoderModel,
        keys: Tensor,
        values: Tensor,
        n_used: int = 0,
        new_tokens: int = MIN_NEW_TOKENS,
        capture: Capture | None = None,
    ) -> None:
        """keys, values [B, L, K, T, D], of which `n_used` tokens are filled. new_tokens: of an answer, at most.

        capture: by default a CUDA graph, where that pays.
        """
        pays = new_tokens >= MIN_NEW_TOKENS and is_capturable(adapter, len(keys))
        self._adapter, self._keys, self._values = adapter, keys, values
        self._capture = capture or (CudaGraph if pays else None)
        self._caches = [KVCache.over(*pair) for pair in zip(keys, values, strict=True)]
        self._graph: Replayed | None = None
        self._n_steps = 0
        if self._capture:
            self._rows = torch.zeros(3, len(keys), dtype=torch.long, device=adapter.device)
            for part in (keys, values):
                part[:, :, :, n_used:] = 0  # a weight of 0 does not hide a NaN

    @classmethod
    def over(cls, adapter: DecoderModel, cache: KVCache, n_used: int, new_tokens: int) -> Runner:
        """Of one cache, for `step`."""
        return cls(adapter, cache.keys[None], cache.values[None], n_used, new_tokens)

    def step(self, at: int, token: int) -> Tensor:
        """Run a token of the only cache at its position, append its KV -> logits [V], valid until the next step."""
        return self.decode([(0, at, token)])[0]

    @torch.inference_mode()
    def decode(self, rows: Sequence[tuple[int, int, int]]) -> Tensor:
        """Run (cache, position, token) of each row -> logits [len(rows), V], valid until the next step."""
        self._n_steps += 1
        if self._capture and self._n_steps > EAGER_STEPS and self._adapter not in _failed:
            self._set(rows)
            self._graph = self._graph or self._captured(self._capture)
            if self._graph:
                return self._graph()[[b for b, _, _ in rows]]
        return decode_each(self._adapter, [Row(self._caches[b], at, token) for b, at, token in rows])

    def _set(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """Tokens, positions and places of all caches."""
        n, last = len(self._keys), self._keys.shape[3] - 1
        now = [[0] * n, [0] * n, [last] * n]
        for b, at, token in rows:
            now[0][b], now[1][b], now[2][b] = token, at, at
        self._rows.copy_(torch.tensor(now))

    def _captured(self, capture: Capture) -> Replayed | None:
        try:
            return capture(self._step, self._adapter.device)
        except RuntimeError as error:  # CUDA's errors are such
            _failed.add(self._adapter)
            log.warning("decoding goes on without a CUDA graph: %s", str(error).splitlines()[0])
            return None

    def _step(self) -> Tensor:
        return append_captured(self._adapter, self._keys, self._values, *self._rows)
