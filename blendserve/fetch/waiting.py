"""Compute the last chunks of a prompt while the link brings the first ones, until both meet.

    chunk        0        1        2        3        4        5
    link       =====>   =====>   =====>   ==>
    this thread decoded  decoded                    <=====   <=====

The prefill begins when everything that is missing is in transit: it goes from layer to layer, and so do transfers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from blendserve.core import ChunkKV
from blendserve.store import ChunkKey
from blendserve.store.request_reads import Coming

if TYPE_CHECKING:
    from blendserve.fetch.fetcher import ChunkRequest, Compute

POLL_S = 0.005


class ComputeWhileWaiting:
    """Computes or decodes some of a prompt's chunks while others come. A store.base.Meanwhile."""

    def __init__(self, compute: Compute | None) -> None:
        self._compute = compute
        self._candidates: dict[ChunkKey, ChunkRequest] = {}
        self._coming: Coming | None = None
        self.computed: dict[ChunkKey, ChunkKV] = {}

    def expect(self, requests: Iterable[ChunkRequest], compares_cost: bool) -> None:
        """Add candidates; none where the store does not compare costs."""
        if self._compute and compares_cost:
            self._candidates |= {r.key: r for r in requests if r.compute_s is not None}

    @property
    def waited(self) -> float:
        """Seconds in which a thread waited for the link, in the prefill, too."""
        return self._coming.waited if self._coming else 0.0

    def __call__(self, coming: Coming) -> None:
        self._coming = coming
        while coming.wait(0.0):
            left = {key: request.compute_s or 0.0 for key, request in self._candidates.items()}
            if key := coming.withdraw(left):
                assert self._compute
                self.computed[key] = self._compute(self._candidates.pop(key))
            elif coming.begin():
                return
            elif not coming.decode():
                coming.wait(POLL_S)
