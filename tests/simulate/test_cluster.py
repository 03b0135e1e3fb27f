"""A simulated cluster, against queueing theory, Che's approximation of LRU, counts by hand and what must not matter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blendserve.routing import Replica, choose
from blendserve.simulate import draw
from blendserve.simulate.cache import Cache, key_of
from blendserve.simulate.cluster import Cluster, Trace
from blendserve.simulate.config import ROUTINGS, LinksConfig, Routing, SimulateConfig
from blendserve.simulate.figures import simulate, summary
from blendserve.simulate.link import Link
from blendserve.simulate.routing import ROUTERS, Holders, Loads, name_of

CHUNK = 1000  # bytes: a token has ten
FREE = dict.fromkeys(("per_pass", "per_row", "per_pair", "per_loaded", "fixed", "per_answer_token"), 0.0)


def config(**parts: Any) -> SimulateConfig:
    """Small, without any cost but those named."""
    compute = {**FREE, "raw_bytes": 10, "stored_bytes": 10, **parts.pop("compute", {})}
    corpus = {"chunks": 500, "chunk_tokens": 100, "topic_chunks": 1, **parts.pop("corpus", {})}
    requests = {"number": 400, "chunks": 3, **parts.pop("requests", {})}
    return SimulateConfig(
        corpus=corpus,
        requests=requests,
        tiers={"memory_bytes": 20 * CHUNK, **parts.pop("tiers", {})},
        links={"delay": 0.0, "node_rate": 0.0, **parts.pop("links", {})},
        compute=compute,
        **parts,
    )


def run(settings: SimulateConfig, nodes: int, routing: Routing) -> Trace:
    return Cluster(settings, nodes, routing).run(draw.requests(settings, nodes), settings.requests.number)


@pytest.mark.parametrize("busy", [0.3, 0.8])
def test_waiting_is_that_of_a_queue_with_one_server(busy: float) -> None:
    """M/D/1 (Pollaczek and Khinchine): a request waits busy / (2 (1 - busy)) of a service on average."""
    settings = config(compute={"fixed": 1.0}, requests={"number": 60_000, "rate": busy, "warm_up": 0.1})
    mean = summary(settings, run(settings, 1, "round_robin"), 1)["ttft"]["mean"]
    assert mean == pytest.approx(1 + busy / (2 * (1 - busy)), rel=0.06)


def test_a_closed_loop_does_what_its_slowest_part_can() -> None:
    settings = config(compute={"fixed": 0.5}, requests={"rate": 0.0, "clients": 2, "warm_up": 0.0})
    figures = summary(settings, run(settings, 2, "least_loaded"), 2)
    assert figures["throughput"] == pytest.approx(2 / 0.5, rel=0.02)
    assert figures["ttft"]["worst"] == pytest.approx(2 * 0.5)  # behind the other client of its node


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
    hits = summary(settings, run(settings, 1, "round_robin"), 1)["hit_rates"]["memory"]
    assert hits == pytest.approx(wanted, abs=0.012)


@given(chunks=st.lists(st.integers(0, 9), max_size=60), places=st.integers(0, 6))
def test_a_tier_is_lru(chunks: list[int], places: int) -> None:
    """Against a list, and who is told of what comes and goes knows what is there."""
    told: set[int] = set()
    tier = Cache(places, None, 0, lambda _, c: told.add(c), lambda _, c: told.remove(c))
    plain: list[int] = []
    for chunk in chunks:
        assert tier.use(chunk) == (chunk in plain)
        tier.offer(chunk)
        plain = [*(c for c in plain if c != chunk), chunk][-places:] if places else []
        assert told == set(plain) == {c for c in range(10) if c in tier}
        assert len(tier) == len(plain)


@given(
    nodes=st.integers(1, 4),
    routing=st.sampled_from(ROUTINGS),
    disk=st.sampled_from([0, 8]),
    remote=st.sampled_from(["all", 0, 30]),
    full=st.booleans(),
    admission=st.sampled_from(["always", "tinylfu"]),
    rate=st.sampled_from([0.0, 5.0]),
    slowdown=st.sampled_from([(1.0,), (1.0, 1.7)]),
    seed=st.integers(0, 3),
)
def test_nothing_is_lost_and_the_same_seed_is_the_same(
    nodes: int,
    routing: Routing,
    disk: int,
    remote: Any,
    full: bool,
    admission: str,
    rate: float,
    slowdown: tuple[float, ...],
    seed: int,
) -> None:
    tiers = {
        **{"memory_bytes": 5 * CHUNK, "disk_bytes": disk * CHUNK, "precomputed": full},
        "remote_bytes": remote if remote == "all" else remote * CHUNK,
    }
    settings = config(
        tiers={**tiers, "admission": admission},
        corpus={"chunks": 60},
        requests={"number": 120, "rate": rate, "warm_up": 0.0},
        compute={"fixed": 0.1, "per_row": 0.001, "slowdown": slowdown},
        links={"store_rate": 1e5, "node_rate": 2e5},
        seed=seed,
    )
    trace, again = run(settings, nodes, routing), run(settings, nodes, routing)
    assert (trace.found.sum(axis=1) == settings.requests.chunks).all()
    assert (trace.ttft >= 0.1 - 1e-9).all()
    assert (trace.left >= trace.came + trace.ttft - 1e-9).all()
    figures = summary(settings, trace, nodes)
    assert sum(figures["hit_rates"].values()) == pytest.approx(1.0)
    assert figures["bytes"]["from_store"] == trace.found[:, 2].sum() * CHUNK
    if full and remote == "all":
        assert not trace.found[:, 3].any()
        assert not trace.sent
    else:
        assert trace.sent <= trace.found[:, 3].sum()
    for part in ("came", "ttft", "left", "node", "found"):
        assert (getattr(trace, part) == getattr(again, part)).all()


def test_one_node_is_one_node_however_it_is_routed_to() -> None:
    settings = config(compute={"fixed": 0.1}, requests={"rate": 6.0}, links={"node_rate": 1e5})
    first, *others = (run(settings, 1, routing) for routing in ROUTINGS)
    assert all((first.ttft == other.ttft).all() and (first.found == other.found).all() for other in others)


def test_a_shared_store_is_a_limit_that_more_nodes_do_not_lift() -> None:
    settings = config(
        tiers={"memory_bytes": 0},
        links={"store_rate": 10.0 * CHUNK},
        requests={"rate": 0.0, "warm_up": 0.2},
    )
    per_second = [
        summary(settings, run(settings, nodes, "least_loaded"), nodes)["throughput"] for nodes in (1, 4)
    ]
    assert per_second == pytest.approx([10 / 3, 10 / 3], rel=0.05)


def test_a_link_gives_each_its_turn() -> None:
    link = Link(LinksConfig(store_rate=100.0, node_rate=50.0, delay=1.0))
    assert link.fetch(0.0, 100.0) == pytest.approx(3.0)  # a second of delay, and the node takes it slower
    assert link.fetch(0.0, 100.0) == pytest.approx(4.0)  # begins when the store has sent the first
    assert link.fetch(10.0, 100.0) == pytest.approx(3.0)


@example(hot=[{0}, set(), {0, 1}], loads=[0, 2, 1, 0, 0, 0], chunks={0, 1})  # told apart by the bound alone
@given(
    hot=st.lists(st.sets(st.integers(0, 11)), min_size=1, max_size=6),
    loads=st.lists(st.integers(0, 4), min_size=6, max_size=6),
    chunks=st.sets(st.integers(0, 11), min_size=1, max_size=5),
)
def test_chunk_affinity_is_the_rule_that_replicas_are_chosen_by(
    hot: list[set[int]], loads: list[int], chunks: set[int]
) -> None:
    """By an index from chunks, and by looking at every replica. Where nobody may or has any, only the bound is common."""
    n = len(hot)
    known, holders = Loads(n, 1.25), Holders()
    for node in range(n):
        known.add(node, loads[node])
        for chunk in hot[node]:
            holders.came(node, chunk)
    chosen = ROUTERS["chunks"](known, holders).choose(sorted(chunks))
    replicas = [Replica(name_of(i), {key_of(c) for c in hot[i]}, loads[i]) for i in range(n)]
    assert loads[chosen] < known.bound()
    if any(hot[i] & chunks and loads[i] < known.bound() for i in range(n)):
        assert name_of(chosen) == choose([key_of(c) for c in chunks], replicas, slack=1.25)


@pytest.mark.parametrize("routing", ["prefix", "chunks"])
def test_what_belongs_together_meets_where_it_is(routing: Routing) -> None:
    """Topics that one node's memory holds a share of: affinity finds more than taking turns."""
    settings = config(
        corpus={"chunks": 400, "topic_chunks": 4, "coherence": 1.0, "zipf": 0.5},
        requests={"number": 3000, "rate": 0.5},
        compute={"fixed": 0.5},
        tiers={"memory_bytes": 60 * CHUNK},
    )
    hits = {
        name: summary(settings, run(settings, 8, name), 8)["hit_rates"]["memory"]
        for name in ("round_robin", routing)
    }
    assert hits[routing] > 1.5 * hits["round_robin"]


@given(moves=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=60))
def test_least_loaded_is(moves: list[tuple[int, bool]]) -> None:
    loads = Loads(5, 1.25)
    for node, comes in moves:
        loads.add(node, 1 if comes or not loads.at[node] else -1)
        assert loads.at[loads.least()] == min(loads.at)
        assert loads.total == sum(loads.at)


def test_figures_of_every_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    from blendserve.simulate.figures import show

    settings = config(nodes=(1, 3), routing=("round_robin", "chunks"))
    seen: list[tuple[int, int]] = []
    figures = simulate(settings, lambda done, total: seen.append((done, total)))
    assert [(cell["nodes"], cell["routing"]) for cell in figures["cells"]] == [
        *((1, "round_robin"), (1, "chunks"), (3, "round_robin"), (3, "chunks"))
    ]
    assert seen[-1] == (1600, 1600)
    show(figures)
    assert "3 chunks" in capsys.readouterr().out
