"""What a precompute run has done so far, and its report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PrecomputeReport:
    """What a precompute run did."""

    chunks: int  # distinct ones asked for, the prefix included
    computed: int
    skipped: int  # in the store already, or computed by others meanwhile
    tokens: int  # of the computed ones
    bytes: int
    seconds: float
    left: int = 0  # that others are computing


@dataclass(slots=True)
class PrecomputeRun:
    """A precompute run so far."""

    progress: Callable[[int, int], None] | None
    total: int = 0  # tokens of chunks that were missing
    there: int = 0  # of those, tokens that are stored by now
    start: float = field(default_factory=time.perf_counter)
    computed: int = 0
    tokens: int = 0
    bytes: int = 0

    def count(self, chunks: int, tokens: int, n_bytes: int) -> None:
        """What was computed here."""
        self.computed += chunks
        self.tokens += tokens
        self.bytes += n_bytes

    def step(self, tokens: int) -> None:
        """So many more are stored, by whomever."""
        self.there += tokens
        if self.progress and tokens:
            self.progress(self.there, self.total)

    def report(self, distinct: int, left: int) -> PrecomputeReport:
        skipped, seconds = distinct - self.computed - left, time.perf_counter() - self.start
        return PrecomputeReport(distinct, self.computed, skipped, self.tokens, self.bytes, seconds, left)
