"""Bytes on their way from the shared store: one queue for what it gives to all, and each node's own rate."""

from __future__ import annotations

from blendserve.simulate.config import LinksConfig


class Link:
    """The shared store sends whole answers in the order in which they were asked for, at its own rate.

    A node fetches for one request at a time, so nothing shares its own rate. What is written goes the other way, in the
    background: it is counted, and takes nobody's time.
    """

    def __init__(self, links: LinksConfig) -> None:
        self._delay = links.delay
        self._store = 1 / links.store_rate if links.store_rate else 0.0
        self._node = 1 / links.node_rate if links.node_rate else 0.0
        self._free = 0.0  # when all is sent that was asked for

    def fetch(self, now: float, n_bytes: float) -> float:
        """Seconds until so many bytes, asked for now, are there. Times must not go back."""
        begins = max(now + self._delay, self._free)
        self._free = begins + n_bytes * self._store
        return max(self._free, begins + n_bytes * self._node) - now
