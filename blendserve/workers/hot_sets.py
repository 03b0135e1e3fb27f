"""What replicas have said of their memory, until that is too old."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXPIRY_S = 10.0  # what a replica has not said again for so long counts as not said


class HotSets:
    """Of all replicas. Clocks of other machines are not asked: what counts is when their word changed here."""

    def __init__(self) -> None:
        self._told: dict[
            str, tuple[int, float]
        ] = {}  # replica -> number of what it said last, and since when

    def of(self, name: str, stats: Mapping[str, Any], now: float) -> frozenset[bytes]:
        """The chunks that it has, as it said lately."""
        number = stats.get("told", 0)
        if self._told.get(name, (None,))[0] != number:
            self._told[name] = number, now
        fresh = now - self._told[name][1] <= EXPIRY_S
        return stats.get("hot", frozenset()) if fresh else frozenset()

    def keep(self, names: set[str]) -> None:
        """Forget the others."""
        self._told = {name: told for name, told in self._told.items() if name in names}
