"""The chunks that replicas have in memory, by their latest reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXPIRY_S = 10.0  # older reports are ignored


class CacheReports:
    """The latest report of each replica. Its age counts from its arrival here: clocks of other machines are not read."""

    def __init__(self) -> None:
        self._seen: dict[
            str, tuple[int, float]
        ] = {}  # replica -> version of its last report, and its arrival

    def cached_chunks(self, name: str, stats: Mapping[str, Any], now: float) -> frozenset[bytes]:
        """Keys of the chunks that a replica has in memory; none if its report is too old."""
        version = stats.get("version", 0)
        if self._seen.get(name, (None,))[0] != version:
            self._seen[name] = version, now
        is_recent = now - self._seen[name][1] <= EXPIRY_S
        return stats.get("cached_chunks", frozenset()) if is_recent else frozenset()

    def keep(self, names: set[str]) -> None:
        """Forget all replicas but these."""
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
