"""The simulator against queueing theory, Che's approximation of LRU, Zipf's law, and sums by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.errors import ConfigError
from blendserve.simulate import draw
from blendserve.simulate.config import ComputeConfig, LinksConfig, SimulateConfig
from blendserve.simulate.link import Link
from tests.simulate.conftest import CHUNK, at, config, figures


@pytest.mark.parametrize(("rate", "places", "hits"), [(0.3, 0, 0.0), (0.8, 0, 0.0), (0.8, 200, 0.5)])
def test_one_server_is_an_m_d_1_queue_and_with_hits_and_misses_an_m_g_1_queue(
    rate: float, places: int, hits: float
) -> None:
    """Pollaczek and Khinchine: waiting is rate E[S^2] / 2 (1 - rate E[S]); here a miss needs 1 s and a hit 0.1 s."""
    settings = config(
        compute={"fixed": 0.1, "per_fetched": 0.009},
        corpus={"chunks": 400, "zipf": 0.0},
        requests={"number": 40_000, "rate": rate, "chunks": 1, "warm_up": 0.1},
        tiers={"memory_bytes": places * CHUNK},
    )
    found = figures(settings, 1, "round_robin")
    assert found["hit_rates"]["memory"] == pytest.approx(hits, abs=0.02)
    mean, second = (hits * 0.1**n + (1 - hits) for n in (1, 2))
    assert found["ttft"]["mean"] == pytest.approx(mean + rate * second / (2 * (1 - rate * mean)), rel=0.06)


@pytest.mark.parametrize("busy", [0.3, 0.7])
def test_one_core_for_all_nodes_is_an_m_m_1_queue_with_processor_sharing(busy: float) -> None:
    """A request stays 1 / (1 - busy) of its work on average, where no node ever has two of them."""
    nodes = 24
    settings = config(
        compute={"fixed": 1.0, "slowdown": tuple(range(1, nodes + 1))},
        requests={"number": 12_000, "rate": busy / nodes, "chunks": 1, "warm_up": 0.1},
        corpus={"chunks": 1},
    )
    assert figures(settings, nodes, "least_loaded")["ttft"]["mean"] == pytest.approx(1 / (1 - busy), rel=0.05)


@pytest.mark.parametrize("zipf", [0.6, 1.0])
def test_hits_are_those_of_che_s_approximation(zipf: float) -> None:
    """Under independent requests LRU of C places hits chunk i with 1 - exp(-p_i T), where those add up to C."""
    places, n = 60, 500
    settings = config(
        corpus={"zipf": zipf, "coherence": 0.0},
        requests={"number": 40_000, "chunks": 1, "warm_up": 0.2},
        tiers={"memory_bytes": places * CHUNK},
    )
    p = np.arange(1, n + 1) ** -zipf
    p /= p.sum()
    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - np.exp(-p * middle)).sum() < places else (low, middle)
    wanted = float((p * (1 - np.exp(-p * low))).sum())
    assert figures(settings, 1, "round_robin")["hit_rates"]["memory"] == pytest.approx(wanted, abs=0.012)


@pytest.mark.parametrize(("nodes", "slowdown"), [(2, (1.0,)), (2, (1.0, 1.6))])
def test_a_closed_loop_does_what_its_slowest_part_can(nodes: int, slowdown: tuple[float, ...]) -> None:
    compute, requests = {"fixed": 0.5, "slowdown": slowdown}, {"rate": 0.0, "clients": 2, "warm_up": 0.1}
    found = figures(config(compute=compute, requests=requests), nodes, "least_loaded")
    assert found["throughput"] == pytest.approx(nodes / (0.5 * slowdown[-1]), rel=0.02)
    assert found["ttft"]["mean"] == pytest.approx(
        2 * 0.5 * slowdown[-1], rel=0.02
    )  # behind the node's other client


def test_a_shared_store_is_a_limit_that_more_nodes_do_not_lift() -> None:
    settings = config(
        tiers={"memory_bytes": 0}, links={"store_rate": 10.0 * CHUNK}, requests={"rate": 0.0, "warm_up": 0.2}
    )
    found = [figures(settings, nodes, "least_loaded")["throughput"] for nodes in (1, 4)]
    assert found == pytest.approx([10 / 3, 10 / 3], rel=0.05)
    link = Link(LinksConfig(store_rate=100.0, node_rate=50.0, delay=1.0))
    assert link.fetch(0.0, 100.0) == pytest.approx(
        3.0
    )  # a second of delay, and the node receives more slowly
    assert link.fetch(0.0, 100.0) == pytest.approx(4.0)  # begins when the store has sent the first
    assert link.fetch(10.0, 100.0) == pytest.approx(3.0)


SLOW_LINK = {"links": {"node_rate": float(CHUNK)}}  # a second a chunk


@pytest.mark.parametrize(
    ("times", "compute", "parts", "ttft"),
    [
        # The first has half of its second before the other comes, which is alone for its last half.
        ([0.0, 0.5], {"fixed": 1.0, "slowdown": (1.0, 2.0)}, {}, [1.5, 1.5]),
        # Two have half of theirs before the third comes, and all three a third of a machine until the two are done.
        ([0.0, 0.0, 1.0], {"fixed": 1.0, "slowdown": (1.0, 2.0, 3.0)}, {}, [2.5, 2.5, 2.0]),
        # A node that waits for bytes slows no other down.
        ([0.0, 1.0], {"fixed": 1.0, "slowdown": (1.0, 3.0)}, SLOW_LINK, [2.0, 2.0]),
        # Work on bytes that come is hidden alone, and not beside another node's.
        ([0.0, 9.0], {"per_fetched": 0.005, "slowdown": (1.0, 3.0)}, SLOW_LINK, [1.0, 1.0]),
        ([0.0, 0.0], {"per_fetched": 0.005, "slowdown": (1.0, 3.0)}, SLOW_LINK, [1.5, 1.5]),
        # Machines of two nodes do not slow each other down; a single node may be slower than its settings.
        ([0.0, 0.0, 0.0], {"fixed": 1.0, "slowdown": (1.0, 1.5)}, {}, [1.5, 1.5, 1.0]),
        ([0.0, 9.0], {"fixed": 1.0, "slowdown": (1.2,)}, {}, [1.2, 1.2]),
    ],
)
def test_work_is_shared_by_hand(times: list[float], compute: Any, parts: Any, ttft: list[float]) -> None:
    nodes = 1 if len(compute["slowdown"]) == 1 else len(times)
    assert at(times, nodes, compute=compute, **parts).ttft.tolist() == pytest.approx(ttft)


@pytest.mark.parametrize("values", [(), (0.9, 1.0), (1.0, 2.0, 1.5)])
def test_a_machine_is_not_faster_with_more_to_do(values: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        ComputeConfig(slowdown=values)


@pytest.mark.parametrize(("n", "s"), [(1, 1.0), (2, 0.0), (7, 0.5), (50, 1.0), (50, 1.7)])
def test_zipf_is_zipf(n: int, s: float) -> None:
    law = np.arange(1, n + 1) ** -s
    law /= law.sum()
    draws = 200_000
    drawn = np.bincount(draw.Zipf(n, s).draw(np.random.default_rng(0), draws), minlength=n) / draws
    assert len(drawn) == n
    assert (np.abs(drawn - law) < 5 * np.sqrt(law / draws)).all()  # five standard deviations


def test_a_corpus_of_a_billion_needs_no_table() -> None:
    """The share of the first thousand: harmonic numbers, by Euler's constant."""
    drawn = draw.Zipf(10**9, 1.0).draw(np.random.default_rng(0), 40_000)
    assert 0 <= drawn.min() <= drawn.max() < 10**9
    wanted = (np.log(1000) + 0.5772) / (np.log(1e9) + 0.5772)
    assert abs((drawn < 1000).mean() - wanted) < 0.012


@given(
    chunks=st.integers(1, 40),
    wanted=st.integers(1, 12),
    topic=st.integers(1, 50),
    coherence=st.sampled_from([0.0, 0.5, 1.0]),
    zipf=st.sampled_from([0.0, 1.0, 1.4]),
    lifetime=st.sampled_from([0, 7]),
)
def test_requests_have_different_chunks_of_the_corpus(
    chunks: int, wanted: int, topic: int, **law: Any
) -> None:
    size, corpus = min(chunks, wanted), {"chunks": chunks, "topic_chunks": topic, **law}
    settings = SimulateConfig(corpus=corpus, requests={"number": 20, "chunks": size})
    ((times, asked),) = draw.requests(settings, 3)
    assert asked.shape == (20, size)
    assert 0 <= asked.min() <= asked.max() < chunks
    assert all(len(set(row)) == len(row) for row in asked.tolist())
    assert (np.diff(times) >= 0).all()
    ((again, same),) = draw.requests(settings, 5)
    assert (same == asked).all()  # whatever the number of nodes
    assert np.allclose(again * 5, times * 3)
