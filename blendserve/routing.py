"""Which of several replicas a request goes to: where most of its chunks are hot, within a bound on load.

1. Bounded load: a replica takes a request only while it would then have at most `slack` times its fair share of those
   running (consistent hashing with bounded loads, Mirrokni et al., 2018). They round that up; it is rounded down here, as
   with few requests a replica is one away from waiting while others are idle. The least loaded one always may: nothing
   waits for a favourite.
2. Chunk affinity: of those, the one with the most of the request's chunks hot, in any order; the less loaded of equals.
3. Where nobody has any, or equals have equal loads: rendezvous hashing (Thaler and Ravishankar, 1998) of the request's
   anchor, its chunk of the least hash. Two requests have the same anchor as often as their chunks are the same (MinHash:
   with their Jaccard similarity), so what is asked for together comes to one place. A replica that goes moves its own
   requests alone; one that comes takes its share and moves nothing else.

Pure, with no clock and no state: the caller reports cached chunks and load (ray/, simulate/).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass

import xxhash

SLACK = 1.5  # times the fair share; rounded down, less than that is little else than the least loaded


@dataclass(frozen=True, slots=True)
class Replica:
    """One that could take a request."""

    name: str
    hot: Set[bytes] = frozenset()  # keys of chunks in its memory, as far as is known
    load: int = 0  # requests that it answers or has queued


def choose(chunks: Collection[bytes], replicas: Sequence[Replica], slack: float = SLACK) -> str:
    """The name of the replica that a request for the chunks of these keys goes to. Raises ValueError for no replicas."""
    return ranked(chunks, replicas, slack)[0]


def ranked(chunks: Collection[bytes], replicas: Sequence[Replica], slack: float = SLACK) -> list[str]:
    """All names, the best first: those within the bound on load, and behind them the others."""
    if not replicas:
        raise ValueError("there is no replica to choose from")
    bound, wanted = load_bound([r.load for r in replicas], slack), frozenset(chunks)
    home = anchor(wanted)

    def rank(replica: Replica) -> tuple[bool, int, int, int, str]:
        hits = len(wanted & replica.hot)
        return (
            replica.load >= bound,
            -hits,
            replica.load if hits else 0,
            -weight(replica.name, home),
            replica.name,
        )

    return [replica.name for replica in sorted(replicas, key=rank)]


def load_bound(loads: Sequence[int], slack: float = SLACK) -> int:
    """The load that a replica may have at most with the next request; always more than the least load."""
    return bounded(sum(loads), min(loads), len(loads), slack)


def bounded(total: int, least: int, n: int, slack: float = SLACK) -> int:
    """The same of n replicas by the sum and the least of their loads."""
    return max(least + 1, math.floor(slack * (total + 1) / n))


def anchor(chunks: Iterable[bytes]) -> bytes:
    """The chunk of the least hash; nothing for none."""
    return min(chunks, key=lambda key: (xxhash.xxh3_64_intdigest(key), key), default=b"")


def weight(name: str, key: bytes) -> int:
    """How much a key belongs to a replica: that of the greatest weight is its home."""
    return xxhash.xxh3_64_intdigest(key, seed=xxhash.xxh3_64_intdigest(name.encode()))
