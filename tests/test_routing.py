"""The choice of a replica, against its own promises: a bound, a home, and nothing moved that need not be."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from blendserve.routing import Replica, choose, load_bound, ranked

CHUNKS = st.frozensets(st.integers(0, 40).map(lambda i: i.to_bytes(28, "big")), max_size=8)
NAMES = st.lists(st.text("abcdef", min_size=1, max_size=6), min_size=1, max_size=9, unique=True)


@st.composite
def clusters(draw: st.DrawFn) -> list[Replica]:
    return [Replica(name, draw(CHUNKS), draw(st.integers(0, 30))) for name in draw(NAMES)]


def cold(names: list[str]) -> list[Replica]:
    return [Replica(name) for name in names]


def key(i: int) -> bytes:
    return f"chunk {i}".encode()


@given(CHUNKS, clusters(), st.floats(1.0, 4.0))
def test_nobody_gets_more_than_a_bounded_share_however_hot_it_is(
    chunks: frozenset[bytes], replicas: list[Replica], slack: float
) -> None:
    loads = {r.name: r.load for r in replicas}
    load = loads[choose(chunks, replicas, slack)]
    fair = (sum(loads.values()) + 1) / len(loads)
    assert load + 1 <= math.ceil(slack * fair)


@given(CHUNKS, clusters())
def test_within_the_bound_nobody_has_more_of_the_chunks(
    chunks: frozenset[bytes], replicas: list[Replica]
) -> None:
    hits = {r.name: sum(chunk in r.hot for chunk in chunks) for r in replicas}
    bound = load_bound([r.load for r in replicas])
    assert hits[choose(chunks, replicas)] == max(hits[r.name] for r in replicas if r.load < bound)
    assert sorted(ranked(chunks, replicas)) == sorted(hits)  # each replica once


@given(CHUNKS, NAMES, st.randoms())
def test_the_same_chunks_have_one_home_in_any_order(
    chunks: frozenset[bytes], names: list[str], random: object
) -> None:
    shuffled = sorted(chunks, key=lambda _: random.random())  # type: ignore[attr-defined]
    others = sorted(names, key=lambda _: random.random())  # type: ignore[attr-defined]
    assert choose(shuffled, cold(others)) == choose(sorted(chunks), cold(names))


@given(st.lists(CHUNKS, max_size=20), NAMES.filter(lambda names: len(names) > 1))
def test_who_goes_moves_its_own_requests_alone(requests: list[frozenset[bytes]], names: list[str]) -> None:
    before = [choose(chunks, cold(names)) for chunks in requests]
    after = [choose(chunks, cold(names[1:])) for chunks in requests]
    assert all(a == b for a, b in zip(before, after, strict=True) if a != names[0])


def test_homes_are_spread() -> None:
    names = [f"replica {i}" for i in range(4)]
    counts = Counter(choose([key(i)], cold(names)) for i in range(4000))
    assert all(abs(counts[name] - 1000) < 5 * math.sqrt(4000 * 0.25 * 0.75) for name in names)
