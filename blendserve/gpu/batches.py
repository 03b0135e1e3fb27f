"""A server's decoding steps in one CUDA graph: all of its slots step at once, those in use for real.

    row b of every tensor is slot b: its token and position when it takes part, token 0 at position 0 when it does not

A graph has fixed addresses, so there would have to be one for every set of slots that can meet in a step. Instead there
is one for all: a row more costs next to nothing, as a step's time goes into reading the weights. What a slot that takes
no part writes goes to its last place, which nobody reads: no answer's last token is ever run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blendserve.gpu import graphs
from blendserve.models.adapter import Adapter, Projected

MOST_SLOTS = 16  # each attends by itself, in use or not

Plain = Callable[[], Tensor]


def worthwhile(adapter: Adapter, n_slots: int) -> bool:
    """Whether a server's steps may be captured."""
    return n_slots <= MOST_SLOTS and graphs.worthwhile(adapter, graphs.WORTH)


class BatchSteps:
    """The steps of slots, keys and values [slots, L, K, T, D]: plainly at first, then by replay. For one thread."""

    def __init__(
        self, adapter: Adapter, keys: Tensor, values: Tensor, capture: graphs.Capture | None = None
    ) -> None:
        """capture: makes the graph, by default CUDA's. The slots are cleared: a weight of 0 does not hide a NaN."""
        self._adapter, self._keys, self._values = adapter, keys, values
        self._capture = capture or graphs.CudaGraph
        self._rows = torch.zeros(
            3, len(keys), dtype=torch.long, device=adapter.device
        )  # token, position, place
        self._graph: graphs.Replayed | None = None
        self._made = 0
        for part in (keys, values):
            part.zero_()

    @torch.inference_mode()
    def __call__(self, rows: Sequence[tuple[int, int, int]], plain: Plain) -> Tensor:
        """Run (slot, position, token) of each row -> logits [B, V]; `plain` does the same where nothing is captured."""
        self._made += 1
        if self._made <= graphs.EAGER or graphs.has_failed(self._adapter):
            return plain()
        self._set(rows)
        if self._graph is None:
            self._graph = graphs.captured(self._step, self._adapter, self._capture)
        return plain() if self._graph is None else self._graph()[[slot for slot, _, _ in rows]]

    def _set(self, rows: Sequence[tuple[int, int, int]]) -> None:
        last = self._keys.shape[3] - 1
        now = [[0] * len(self._keys), [0] * len(self._keys), [last] * len(self._keys)]
        for slot, at, token in rows:
            now[0][slot], now[1][slot], now[2][slot] = token, at, at
        self._rows.copy_(torch.tensor(now))

    def _step(self) -> Tensor:
        return step_all(self._adapter, self._keys, self._values, *self._rows)


def step_all(
    adapter: Adapter, keys: Tensor, values: Tensor, token: Tensor, at: Tensor, place: Tensor
) -> Tensor:
    """Each slot's token [B] at its position [B], its KV written at its place [B] -> logits [B, V]."""
    ropes, slots = adapter.rope(at), torch.arange(len(keys), device=keys.device)
    hidden = adapter.embed(token)
    for l, spec in enumerate(adapter.specs):
        fresh = adapter.project(l, hidden)
        row = Projected(adapter.rotate(fresh.q, ropes[l]), adapter.rotate(fresh.k, ropes[l]), fresh.v)
        keys[:, l][slots, :, place] = row.k.transpose(0, 1)
        values[:, l][slots, :, place] = row.v.transpose(0, 1)
        attended = [
            graphs.attend_at(row.q[:, b : b + 1], keys[b, l], values[b, l], spec, at[b : b + 1])
            for b in range(len(keys))
        ]
        hidden = adapter.finish(l, hidden, torch.cat(attended))
    return adapter.logits(hidden)
