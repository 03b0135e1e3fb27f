"""The clock of a store: the module `time`, or a clock that a test advances."""

from __future__ import annotations

from typing import Protocol


class TimeSource(Protocol):
    """The functions of the module `time` that a store calls."""

    def time_ns(self) -> int:
        """Nanoseconds since 1970: recency and leases, which processes compare."""

    def monotonic(self) -> float:
        """Seconds since any moment: pauses within one process."""
