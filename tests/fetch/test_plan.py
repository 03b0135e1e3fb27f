"""The split between link and CPU by brute force, CacheGen's rule by example, and the link estimator by adding up."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.delivery import cachegen_plan, fixed_plan
from blendserve.errors import StoreUnavailable
from blendserve.fetch.link import (
    DEAD_LINK_S,
    MAX_PROBE_BYTES,
    MIN_PROBE_BYTES,
    PROBE_PAUSE,
    PROBE_S,
    STALL_FIRST,
    SURE_S,
    LinkEstimator,
    StallDetector,
)
from blendserve.fetch.plan import MIN_SPEEDUP, PARALLEL, SAME, SOONER, WORTH, LinkState, PendingChunk, plan
from blendserve.store.base import ReadTime
from tests.support.waiting import ManualClock

RATES, SECONDS = st.floats(1e3, 1e10), st.floats(0, 10)
LEVELS = ("raw", "int8", "small")
DECODE_S = st.fixed_dictionaries({level: st.floats(0, 0.01) for level in LEVELS})


@st.composite
def candidates(draw: st.DrawFn) -> list[PendingChunk]:
    found = []
    for n in range(draw(st.integers(1, 4))):
        sizes = {level: draw(st.integers(1, 10**8)) for level in LEVELS}
        compute_s = draw(SECONDS) if n else draw(st.none() | SECONDS)  # the prefix is never computed
        found.append(PendingChunk(sizes, draw(st.integers(1, 500)), draw(SECONDS), compute_s))
    return found


def seconds(todo: list[PendingChunk], link: LinkState, level: str, k: int) -> float:
    """The link brings the first k, the CPU computes the others."""
    assert link.rate
    computing = [c.compute_s for c in todo[k:]]
    if None in computing:
        return float("inf")
    decoding = sum(c.n_tokens for c in todo[:k]) * link.decode_s(level)
    bringing = link.round_trip_s + (link.n_pending + sum(c.sizes[level] for c in todo[:k])) / link.rate
    if k == len(todo):
        return bringing + decoding
    return max(bringing + decoding, (sum(s or 0.0 for s in computing) + decoding) / SOONER)


@given(candidates(), st.none() | RATES, DECODE_S, st.integers(0, 10**8), SECONDS, SECONDS, st.data())
def test_a_plan_is_the_finest_of_the_fastest_or_of_those_in_time(
    todo: list[PendingChunk],
    rate: float | None,
    decode_s: dict[str, float],
    pending: int,
    wanted: float,
    spent: float,
    data: st.DataObject,
) -> None:
    """The current level is given up only for much; of an unknown link the fewest bytes are asked for."""
    current = data.draw(st.sampled_from([None, *LEVELS]))
    may_run_parallel = data.draw(st.booleans())
    link = LinkState(
        rate, None, 0.01, decode_s.__getitem__, pending, wanted, spent, may_run_parallel=may_run_parallel
    )
    found, n = plan(todo, link, current), len(todo)
    if rate is None:
        assert (found.n_fetched, found.n_skipped, found.is_parallel) == (n, 0, False)
        assert found.level == (current or min(LEVELS, key=lambda level: sum(c.sizes[level] for c in todo)))
        return
    fetched = range(0 if pending else 1, n + 1)  # with some in transit, all others may be computed
    every = {(level, k): seconds(todo, link, level, k) for level, k in product(LEVELS, fetched)}
    best = {level: min(every[level, k] for k in fetched) for level in LEVELS}
    if current and best[current] * WORTH <= min(best.values()):
        assert (found.level, found.n_skipped) == (current, 0)
        return
    in_time = max(SAME * min(best.values()), wanted - spent)
    assert found.level == next(level for level in LEVELS if best[level] <= in_time)
    saved = sum(c.saved_s or 0.0 for c in todo)
    if current is None and best[found.level] - pending / rate >= MIN_SPEEDUP * saved:
        assert (found.n_skipped, found.n_fetched) == (n, 0)
        return
    assert found.n_skipped == 0
    longest = max((c.saved_s or 0.0 for c in todo if c.compute_s is not None), default=0.0)
    is_quick = sum(c.sizes[found.level] for c in todo) / rate < PARALLEL * longest
    assert found.is_parallel == (may_run_parallel and n > 1 and is_quick)
    if found.is_parallel:
        assert found.n_fetched == n
    else:
        assert every[found.level, found.n_fetched] == pytest.approx(best[found.level])


@pytest.mark.parametrize(
    ("last", "wanted", "current", "level", "skipped"),
    [
        (None, 0.0, None, "1", 0),  # the first chunk: the level in the middle
        (1e9, 0.4, None, "0", 0),
        (1e6, 0.4, None, "0", 1),  # computing, .5 s, is quicker than the 1 s of the smallest level
        (3e6, 0.4, None, "2", 0),  # and slower than .33 s of it
        (1e6, 0.4, "0", "0", 0),
    ],
)
def test_cachegens_plan_looks_at_the_last_chunk_alone(
    last: float | None, wanted: float, current: str | None, level: str, skipped: int
) -> None:
    todo = [PendingChunk({str(n): 10 ** (8 - n) for n in range(3)}, 1, saved_s=0.5)]
    found = cachegen_plan(todo, LinkState(1e9, last, wanted_s=wanted), current)
    assert (found.level, found.n_skipped) == (level, skipped)
    assert fixed_plan(todo, LinkState(None)).level == "0"


# The link


def moved(link: LinkEstimator, clock: ManualClock, n_bytes: int, seconds: float) -> None:
    with link.transfer():
        clock.advance(seconds)
        link.arrived(n_bytes)


@given(
    st.lists(
        st.tuples(st.integers(1, 10**6), st.floats(0.001, 1.0), st.floats(0, 100)), min_size=1, max_size=30
    )
)
def test_the_rate_is_bytes_over_seconds_of_transfer(pieces: list[tuple[int, float, float]]) -> None:
    """Each transfer brings a piece at its end; pauses between them do not count."""
    clock = ManualClock()
    link = LinkEstimator(clock, window_s=1e9)
    assert link.rate is None
    for n_bytes, s, pause in pieces:
        moved(link, clock, n_bytes, s)
        clock.advance(pause)
    expected = sum(n for n, _, _ in pieces) / sum(s for _, s, _ in pieces)
    assert link.rate == pytest.approx(expected, rel=1e-4)
    link.forget_rate()
    assert link.rate is None


def test_a_round_trip_is_no_part_of_the_rate_and_decoding_is_a_running_mean() -> None:
    clock = ManualClock()
    link = LinkEstimator(clock)
    link.probe_now(lambda n_bytes: ReadTime(0.5, 1.5, 1000))
    assert link.round_trip_s == 0.5
    assert link.rate == pytest.approx(1000)
    moved(link, clock, 3000, 1.5)
    assert link.rate == pytest.approx(3000)  # the window holds the last transfer alone
    with link.transfer():
        clock.advance(1.5)  # a third is the round trip
        assert link.rate == pytest.approx(1500)  # silence counts
    assert link.decode_s("raw") == 0.0
    for seconds_, mean in ((1.0, 0.1), (3.0, 0.2)):
        link.record_decoding("raw", seconds_, 10)
        assert link.decode_s("raw") == pytest.approx(mean)


@pytest.mark.parametrize("round_trip_s", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("rate", [1e6, 1e8, 1e11])
@pytest.mark.parametrize("chunk_bytes", [10**5, 10**9])
def test_the_first_probes_grow_until_one_shows_the_rate(
    round_trip_s: float, rate: float, chunk_bytes: int
) -> None:
    """A first transfer is slower: the connection has to get going. A small chunk shows what it can."""
    link, asked = LinkEstimator(ManualClock()), list[int]()

    def probe(n_bytes: int) -> ReadTime:
        asked.append(n_bytes)
        n = min(n_bytes, chunk_bytes)
        slow = 0.1 if len(asked) == 1 else 0.0
        return ReadTime(round_trip_s, round_trip_s + slow + n / rate, n)

    link.probe_now(probe)
    assert asked == [MIN_PROBE_BYTES << n for n in range(len(asked))]
    assert asked[-1] <= MAX_PROBE_BYTES
    if chunk_bytes < MIN_PROBE_BYTES:
        assert len(asked) == 1
        return
    assert link.rate == pytest.approx(rate, rel=1e-3)
    sure_s = max(SURE_S, round_trip_s)
    assert asked[-1] / rate >= sure_s or asked[-1] == MAX_PROBE_BYTES
    assert all(n / rate < sure_s for n in asked[1:-1])


@pytest.mark.parametrize(
    ("seconds", "down", "pause_s"),
    [(0.0, False, PROBE_S), (4.0, False, 4.0 * PROBE_PAUSE), (4.0, True, DEAD_LINK_S)],
)
def test_probes_use_a_fiftieth_of_a_link_and_a_dead_one_is_tried_each_minute(
    seconds: float, down: bool, pause_s: float
) -> None:
    clock, asked = ManualClock(), list[int]()
    link, began = LinkEstimator(clock), clock.now

    def probe(n_bytes: int) -> ReadTime:
        asked.append(n_bytes)
        clock.advance(seconds)
        if down:
            raise StoreUnavailable("the network is down")
        return ReadTime(0.0, max(seconds, 1e-3), n_bytes)

    for later_s, n in ((0.0, 1), (pause_s - 0.5, 1), (pause_s + 0.5, 2)):
        clock.advance(began + later_s - clock.now)
        link.probe_later(probe)
        link.wait()
        assert len(asked) == n
    assert asked[1] == 2 * asked[0]


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("bytes_first", [False, True])
def test_a_stall_is_the_patience_without_a_byte(hidden: bool, bytes_first: bool) -> None:
    """More before the first byte, and beside a prefill. A look after a long suspension is a quarter of it."""
    clock = ManualClock()
    link = LinkEstimator(clock)
    stall, looks = StallDetector(link), 0
    for _ in range(5 * bytes_first):
        clock.advance(100.0)
        link.arrived(1)
        assert not stall.is_stalled(1.0, hidden)
    while not stall.is_stalled(1.0, hidden):
        clock.advance(100.0)  # the process was suspended
        looks += 1
    assert looks == 4 * (STALL_FIRST if hidden or not bytes_first else 1) + 1
    link.arrived(1)
    assert not stall.is_stalled(1.0, hidden)
