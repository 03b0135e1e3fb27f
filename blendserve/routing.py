"""Chooses the replica for a request: the one with most of the request's chunks in memory, within a bound on load.

1. Bounded load: a replica is eligible if its load with this request stays within `slack` times the average (consistent
   hashing with bounded loads, Mirrokni et al., 2018). The paper rounds the bound up. We round it down: with few requests,
   one more request on a replica leaves others idle. The least loaded replica is always eligible.
2. Chunk affinity: the eligible replica with most of the request's chunks in memory; of equals, the less loaded one.
3. No replica has a chunk, or equals have equal loads: rendezvous hashing (Thaler and Ravishankar, 1998) of the request's
   anchor, the chunk with the smallest hash. Two requests share an anchor with the probability of their Jaccard
   similarity (MinHash), so requests for the same chunks go to one replica. A replica that leaves moves its own requests
   alone; a new one takes its share and moves no others.

Pure, with no clock and no state: the caller reports cached chunks and load (ray/, simulate/).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass

import xxhash

SLACK = 1.5  # times the average load; less, rounded down, would nearly always choose the least loaded replica


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica that may get a request."""

    name: str
    cached_chunks: Set[bytes] = frozenset()  # keys of chunks in its memory, by its last report
    load: int = 0  # running and queued requests


def ranked(chunks: Collection[bytes], replicas: Sequence[Replica], slack: float = SLACK) -> list[str]:
    """Names of replicas, the best one for a request with these chunk keys first. Replicas above the load bound come last.

    replicas: at least one.
    """
    loads = [replica.load for replica in replicas]
    wanted = frozenset(chunks)
    bound = bounded(sum(loads), min(loads), len(loads), slack)
    home = anchor(wanted)

    def rank(replica: Replica) -> tuple[bool, int, int, int, str]:
        hits = len(wanted & replica.cached_chunks)
        return (
            replica.load >= bound,
            -hits,
            replica.load if hits else 0,
            -weight(replica.name, home),
            replica.name,
        )

    return [replica.name for replica in sorted(replicas, key=rank)]


def bounded(total: int, least: int, n: int, slack: float = SLACK) -> int:
    """The largest load of one of n replicas with the next request, from the sum and the minimum of their loads."""
    return max(least + 1, math.floor(slack * (total + 1) / n))


def anchor(chunks: Iterable[bytes]) -> bytes:
    """The chunk with the smallest hash; b"" without chunks."""
    return min(chunks, key=lambda key: (xxhash.xxh3_64_intdigest(key), key), default=b"")


def weight(name: str, key: bytes) -> int:
    """The weight of a key at a replica, for rendezvous hashing: the largest weight wins."""
    return xxhash.xxh3_64_intdigest(key, seed=xxhash.xxh3_64_intdigest(name.encode()))
