"""The chunks that replicas have in memory, by their latest reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXPIRY_S = 10.0  # older reports are ignored


class CacheReports:
    """The age of each replica's report. It counts from the arrival here: clocks of other machines are not read."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}  # replica -> version of its report, and its arrival

    def cached_chunks(
        self, reports: Mapping[str, Mapping[str, Any]], now: float
    ) -> dict[str, frozenset[bytes]]:
        """Keys of the chunks in each replica's memory; none if its report is too old. Forgets other replicas."""
        before, self._seen = self._seen, {}
        for name, report in reports.items():
            version, known = report.get("version", 0), before.get(name)
            self._seen[name] = known if known and known[0] == version else (version, now)
        recent = {name for name, (_, arrival) in self._seen.items() if now - arrival <= EXPIRY_S}
        return {
            n: r.get("cached_chunks", frozenset()) if n in recent else frozenset() for n, r in reports.items()
        }
