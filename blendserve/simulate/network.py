"""Transfers from the shared store: one queue at its own rate, and each node's own rate."""

from __future__ import annotations

from blendserve.simulate.config import LinksConfig


class StoreLink:
    """The shared store sends whole responses in order of request, at its own rate.

    A node fetches for one request at a time, so its own rate is never shared. Writes take no request's time.
    """

    def __init__(self, links: LinksConfig) -> None:
        self._delay = links.delay
        self._store = 1 / links.store_rate if links.store_rate else 0.0
        self._node = 1 / links.node_rate if links.node_rate else 0.0
        self._free_at = 0.0  # when the store has sent all requested bytes

    def fetch(self, now: float, n_bytes: float) -> float:
        """Seconds until bytes that are requested now have arrived. Times must not decrease."""
        begins = max(now + self._delay, self._free_at)
        self._free_at = begins + n_bytes * self._store
        return max(self._free_at, begins + n_bytes * self._node) - now
