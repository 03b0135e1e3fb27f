"""KDN level choice: which chunks the link brings and the CPU computes, and at which level, from what was measured.

    chunk        0        1        2        3        4        5
    link       =====>   =====>   =====>   ==>
    CPU                                             <=====   <=====

Of a level and a number k of fetched chunks:

    seconds = max(round trip + bytes of the first k / rate + decoding them, computing the others + decoding)

Bytes of chunks in transit come first. With some, all that is left may be computed, and is held against what it saves
without them.
The plan is the fastest way, at the finest of the levels that are nearly as fast. With a wanted time to first token, it is
the finest level that arrives in time. If no way beats what the stored KV saves, nothing is fetched. If all arrive soon,
they come at a time, so that layers come as the prefill needs them, and no chunk is computed. CacheGen (SIGCOMM 2024,
section 5.3) chooses a level for each chunk by the throughput of the last one, and computes no chunk while it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

SAME = 1.05  # a level that is faster by less is not faster
WORTH = 0.75  # of what the current level would take: for less than this, what has arrived is given up
SOONER = 0.9  # of the time of the link, in which a chunk is to be computed: estimates err
PARALLEL = 2.0  # times what one chunk saves: if all arrive in less, they come at a time
MIN_SPEEDUP = 0.95  # of fetching over computing, which is exact


@dataclass(frozen=True, slots=True)
class PendingChunk:
    """A chunk that is still to come."""

    sizes: Mapping[str, int]  # bytes that are still to come, by level, the finest first
    n_tokens: int
    saved_s: float | None = None  # as of ChunkRequest
    compute_s: float | None = None


@dataclass(frozen=True, slots=True)
class LinkState:
    """What a plan rests on."""

    rate: float | None  # bytes a second; None: unknown
    last_rate: float | None = None  # of the last chunk that came whole
    round_trip_s: float = 0.0
    decode_s: Callable[[str], float] = lambda level: 0.0  # a token at a level
    n_pending: int = 0  # bytes of chunks in transit
    wanted_s: float = 0.0  # time in which all are to arrive; 0: as soon as possible
    spent_s: float = 0.0  # of the request so far
    may_compute: bool = True  # chunks while others are in transit
    may_run_parallel: bool = True  # bring all at a time


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with the chunks that are still to come."""

    level: str
    n_fetched: int  # the first chunks; the others are computed
    is_parallel: bool = False  # all at a time
    n_skipped: int = 0  # the first chunks, which are neither fetched nor computed now
    seconds: float = 0.0  # until all are here, decoded; 0 if unknown


LevelPlanner = Callable[[Sequence[PendingChunk], LinkState, "str | None"], Plan]


def plan(todo: Sequence[PendingChunk], link: LinkState, current: str | None = None) -> Plan:
    """Split chunks, which have the same levels, between the link (from the front) and the CPU (from the back).

    current: the level that they come by already; it is kept unless another one saves a quarter, and none is skipped.
    """
    levels = tuple(todo[0].sizes)
    n = len(todo)
    if link.rate is None:
        return Plan(current or min(levels, key=lambda level: sum(c.sizes[level] for c in todo)), n)
    ways = {level: min(_ways(todo, link, level)) for level in levels}
    best = min(seconds for seconds, _ in ways.values())
    if current is not None and ways[current][0] * WORTH <= best:
        return Plan(current, n, seconds=ways[current][0])
    in_time = max(SAME * best, link.wanted_s - link.spent_s)
    level = next(level for level, (seconds, _) in ways.items() if seconds <= in_time)
    seconds, n_computed = ways[level]
    saved = [c.saved_s for c in todo if c.saved_s is not None]
    more_s = seconds - link.n_pending / link.rate
    if current is None and len(saved) == n and more_s >= MIN_SPEEDUP * sum(saved):
        return Plan(level, 0, n_skipped=n, seconds=seconds)
    one_s = max((c.saved_s or 0.0 for c in todo if c.compute_s is not None), default=0.0)
    is_quick = sum(c.sizes[level] for c in todo) / link.rate < PARALLEL * one_s
    if link.may_run_parallel and is_quick and n > 1:
        return Plan(level, n, is_parallel=True, seconds=seconds)
    return Plan(level, n - n_computed, seconds=seconds)


def _ways(todo: Sequence[PendingChunk], link: LinkState, level: str) -> Iterator[tuple[float, int]]:
    """(seconds, chunks that are computed) of each split at this level."""
    assert link.rate
    n_bytes = sum(c.sizes[level] for c in todo)
    n_tokens = sum(c.n_tokens for c in todo)
    n_todo = len(todo)
    compute_s = 0.0
    for n_computed in range(n_todo + (link.n_pending > 0)):
        decode_s = link.decode_s(level) * n_tokens
        link_s = link.round_trip_s + (link.n_pending + n_bytes) / link.rate + decode_s
        yield (max(link_s, (compute_s + decode_s) / SOONER) if n_computed else link_s), n_computed
        last = todo[-1 - n_computed] if n_computed < n_todo else None
        if not last or last.compute_s is None or not link.may_compute:
            return
        compute_s += last.compute_s
        n_bytes -= last.sizes[level]
        n_tokens -= last.n_tokens
