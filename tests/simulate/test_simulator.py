"""A simulated cluster against queueing theory, Che's approximation of LRU, Zipf's law, the engine, and a real node."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.support.valkey import Server, binary
from blendserve.blend.cost import count_work
from blendserve.blend.layout import lay_out
from blendserve.blend.policies import make_policy
from blendserve.config import BlendConfig
from blendserve.core import Chunk, Prompt
from blendserve.kv import ChunkKV
from blendserve.routing import Replica, ranked
from blendserve.simulate import workload
from blendserve.simulate.cache import ChunkDirectory, key_of
from blendserve.simulate.calibrate import CalibratedNode, configured, pool_size
from blendserve.simulate.cluster import Cluster, SimulationResult
from blendserve.simulate.config import ROUTINGS, LinksConfig, Routing, SimulateConfig
from blendserve.simulate.metrics import summary
from blendserve.simulate.routing import Loads, make_router, name_of
from blendserve.simulate.service_time import ServiceTime, StoreLink
from blendserve.store.view import TensorView
from tests.bench.conftest import write_shape
from tests.endurance import validate_simulator as validation
from tests.endurance.validate_simulator import ServingNode, ValidationConfig

CHUNK = 1000  # bytes: a token has ten
FREE = dict.fromkeys(("per_pass", "per_row", "per_pair", "per_loaded", "fixed", "per_answer_token"), 0.0)


def config(**parts: Any) -> SimulateConfig:
    defaults: dict[str, dict[str, Any]] = {
        "compute": {**FREE, "raw_bytes": 10, "stored_bytes": 10},
        "corpus": {"chunks": 500, "chunk_tokens": 100, "topic_chunks": 1},
        "requests": {"number": 400, "chunks": 3},
        "tiers": {"memory_bytes": 20 * CHUNK},
        "links": {"delay": 0.0, "node_rate": 0.0},
    }
    return SimulateConfig(**{n: {**part, **parts.pop(n, {})} for n, part in defaults.items()}, **parts)


def run(settings: SimulateConfig, nodes: int, routing: Routing) -> SimulationResult:
    return Cluster(settings, nodes, routing).run(workload.requests(settings, nodes), settings.requests.number)


def figures(settings: SimulateConfig, nodes: int, routing: Routing) -> dict[str, Any]:
    return summary(settings, run(settings, nodes, routing), nodes)


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


@pytest.mark.parametrize("zipf", [0.6, 1.0])
def test_hits_are_those_of_che_s_approximation(zipf: float) -> None:
    """Under independent requests LRU of C places hits chunk i with 1 - exp(-p_i T), where those add up to C."""
    places = 60
    settings = config(
        corpus={"zipf": zipf, "coherence": 0.0},
        requests={"number": 40_000, "chunks": 1, "warm_up": 0.2},
        tiers={"memory_bytes": places * CHUNK},
    )
    p = np.arange(1, 501) ** -zipf
    p /= p.sum()
    times = np.geomspace(1.0, 1e6, 5_000)
    time = np.interp(places, [(1 - np.exp(-p * t)).sum() for t in times], times)
    wanted = float((p * (1 - np.exp(-p * time))).sum())
    assert figures(settings, 1, "round_robin")["hit_rates"]["memory"] == pytest.approx(wanted, abs=0.012)


def test_a_shared_store_is_a_limit_that_more_nodes_do_not_lift() -> None:
    rates: Any = {"links": {"store_rate": 10.0 * CHUNK}, "requests": {"rate": 0.0, "warm_up": 0.2}}
    settings = config(tiers={"memory_bytes": 0}, **rates)
    found = [figures(settings, nodes, "least_loaded")["throughput"] for nodes in (1, 4)]
    assert found == pytest.approx([10 / 3, 10 / 3], rel=0.05)
    link = StoreLink(LinksConfig(store_rate=100.0, node_rate=50.0, delay=1.0))
    # A second of delay, and the node receives more slowly; the next begins when the store has sent the first.
    assert [link.fetch(at, 100.0) for at in (0.0, 0.0, 10.0)] == pytest.approx([3.0, 4.0, 3.0])


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
    """Requests for one chunk each, at these times, one node after the other."""
    nodes, requests = 1 if len(compute["slowdown"]) == 1 else len(times), np.arange(len(times))[:, None]
    settings = config(compute=compute, requests={"rate": 1.0}, **parts)
    done = Cluster(settings, nodes, "round_robin").run([(np.array(times), requests)], len(times))
    assert done.ttft.tolist() == pytest.approx(ttft)


@pytest.mark.parametrize(("n", "s"), [(1, 1.0), (2, 0.0), (7, 0.5), (50, 1.7), (10**9, 1.0)])
def test_zipf_is_zipf(n: int, s: float) -> None:
    """Of a billion, the first fifty; their harmonic number is by Euler's constant."""
    law = np.arange(1, min(n, 50) + 1) ** -s
    law /= law.sum() if n < 10**9 else np.log(n) + 0.57722
    drawn = workload.Zipf(n, s).draw(np.random.default_rng(0), draws := 200_000)
    assert 0 <= drawn.min() <= drawn.max() < n
    found = np.bincount(drawn[drawn < 50], minlength=len(law)) / draws
    assert (np.abs(found - law) < 5 * np.sqrt(law / draws)).all()  # five standard deviations


LAWS = st.fixed_dictionaries({
    "chunks": st.integers(1, 40),
    "topic_chunks": st.integers(1, 50),
    "coherence": st.sampled_from([0.0, 0.5, 1.0]),
    "zipf": st.sampled_from([0.0, 1.0, 1.4]),
    "lifetime": st.sampled_from([0, 7]),
})  # fmt: skip


@given(LAWS, st.integers(1, 12))
def test_requests_have_different_chunks_of_the_corpus(corpus: Any, wanted: int) -> None:
    size = min(corpus["chunks"], wanted)
    settings = SimulateConfig(corpus=corpus, requests={"number": 20, "chunks": size})
    ((times, asked),) = workload.requests(settings, 3)
    assert asked.shape == (20, size)
    assert 0 <= asked.min() <= asked.max() < corpus["chunks"]
    assert all(len(set(row)) == len(row) for row in asked.tolist())
    assert (np.diff(times) >= 0).all()
    ((again, same),) = workload.requests(settings, 5)
    assert (same == asked).all()  # whatever the number of nodes
    assert np.allclose(again * 5, times * 3)


TIERS = st.fixed_dictionaries({
    "memory_bytes": st.just(5 * CHUNK),
    "disk_bytes": st.sampled_from([0, 8 * CHUNK]),
    "remote_bytes": st.sampled_from(["all", 0, 30 * CHUNK]),
    "precomputed": st.booleans(),
    "admission": st.sampled_from(["always", "tinylfu"]),
})  # fmt: skip


@given(
    st.integers(1, 4),
    st.sampled_from(ROUTINGS),
    TIERS,
    st.sampled_from([0.0, 5.0]),
    st.sampled_from([(1.0,), (1.0, 1.7)]),
    st.integers(0, 3),
)
def test_nothing_is_lost(
    nodes: int, routing: Routing, tiers: Any, rate: float, slowdown: tuple[float, ...], seed: int
) -> None:
    settings = config(
        tiers=tiers,
        corpus={"chunks": 60},
        requests={"number": 120, "rate": rate, "warm_up": 0.0},
        compute={"fixed": 0.1, "per_row": 0.001, "slowdown": slowdown},
        links={"store_rate": 1e5, "node_rate": 2e5},
        seed=seed,
    )
    result = run(settings, nodes, routing)
    assert (result.found.sum(axis=1) == settings.requests.chunks).all()
    assert (result.ttft >= 0.1 - 1e-9).all()
    assert (result.finished_at >= result.arrived_at + result.ttft - 1e-9).all()
    found = summary(settings, result, nodes)
    assert sum(found["hit_rates"].values()) == pytest.approx(1.0)
    assert found["bytes"]["from_store"] == result.found[:, 2].sum() * CHUNK
    assert result.sent <= result.found[:, 3].sum()
    if tiers["precomputed"] and tiers["remote_bytes"] == "all":
        assert not result.found[:, 3].any()


@example(hot=[{0}, set(), {0, 1}], loads=[0, 2, 1, 0, 0, 0], chunks={0, 1})  # told apart by the bound alone
@given(
    hot=st.lists(st.sets(st.integers(0, 11)), min_size=1, max_size=6),
    loads=st.lists(st.integers(0, 4), min_size=6, max_size=6),
    chunks=st.sets(st.integers(0, 11), min_size=1, max_size=5),
)
def test_chunk_affinity_is_the_rule_that_replicas_are_chosen_by(
    hot: list[set[int]], loads: list[int], chunks: set[int]
) -> None:
    """By an index from chunks, and by looking at every replica; where no replica has any, only the bound is common."""
    n = len(hot)
    known, directory = Loads(n, 1.25), ChunkDirectory()
    for node in range(n):
        known.add(node, loads[node])
        for chunk in hot[node]:
            directory.add(node, chunk)
    chosen = make_router("chunks", known, directory)(sorted(chunks))
    replicas = [Replica(name_of(i), {key_of(c) for c in hot[i]}, loads[i]) for i in range(n)]
    assert loads[chosen] < known.bound()
    if any(hot[i] & chunks and loads[i] < known.bound() for i in range(n)):
        assert name_of(chosen) == ranked([key_of(c) for c in chunks], replicas, slack=1.25)[0]


@given(
    st.lists(st.booleans(), min_size=1, max_size=6), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)  # fmt: skip
@example([True, True, True], 15, 1, 1, 0.3)  # 13.5 tokens: a half, which rounds by the order of the products
def test_work_is_counted_as_the_engine_counts_it(
    found: list[bool], size: int, prefix: int, question: int, ratio: float
) -> None:
    """The engine looks at a layout token by token."""
    kv = [ChunkKV(torch.zeros(1, 1, n, 2), torch.zeros(1, 1, n, 2)) for n in (prefix, size)]
    prompt = Prompt((1,) * prefix, tuple(Chunk((2,) * size) for _ in found), (3,) * question)
    views = {i: TensorView(kv[1]) for i, there in enumerate(found) if there}
    wanted = count_work(lay_out(prompt, TensorView(kv[0]), views), make_policy(BlendConfig(ratio=ratio)), 1)
    requests = {"prefix_tokens": prefix, "question_tokens": question, "chunks": len(found)}
    settings = SimulateConfig(compute={"ratio": ratio}, corpus={"chunk_tokens": size}, requests=requests)
    assert ServiceTime(settings).counts(found) == pytest.approx(list(wanted), rel=1e-6)


NAMES = ("pass", "row", "pair", "loaded", "fetched", "answer_token", "stored")
CONSTANTS = {**dict.fromkeys((*(f"per_{name}" for name in NAMES), "fixed", "delay"), 1e-5), "node_rate": 1e9}


@pytest.mark.skipif(binary() is None, reason="there is no valkey-server here")
def test_a_real_node_finds_what_a_simulated_one_finds(tmp_path: Path) -> None:
    """Each of 25 requests, over a store that has all and over one that has nothing."""
    sizes = {"pool": 16, "chunk_tokens": 16, "request_chunks": 3, "requests": 25}
    config = ValidationConfig(model=write_shape(tmp_path), nodes=1, memory=4, disk=7, **sizes)
    with Server() as server:
        node = ServingNode(config.model, config.pool, config.chunk_tokens, server.url)
        base = validation.simulated(config, CONSTANTS, node.prompt_shape)
        for store in ("full", "empty"):
            node.precompute(store, with_chunks=store == "full")
            known = validation.over(base, store)
            ((_, chunks),) = workload.requests(known, 1)
            node.begin(store, config.memory, config.disk)
            found = []
            for wanted in chunks.tolist():
                found.append(node.request(wanted)["found"])
                node.engine.fetcher.flush()  # copies are made in the background: here, before the next request
            simulated = Cluster(known, 1, "round_robin").run(workload.requests(known, 1), config.requests)
            assert found == simulated.found.tolist()
        node.engine.close()


@pytest.mark.parametrize("served", [False, True])
def test_every_constant_is_measured(tmp_path: Path, served: bool) -> None:
    """Without a server, all but those of its link."""
    if served and binary() is None:
        pytest.skip("there is no valkey-server here")
    with Server() if served else nullcontext() as server:
        node = CalibratedNode(write_shape(tmp_path), pool_size(2), 16, server.url if server else None)
        constants = node.measure(2, memory=4, disk=7)
    assert constants.keys() == {*CONSTANTS, "hot"} - (
        set() if served else {"node_rate", "per_fetched", "delay"}
    )
    assert all(0 <= value < math.inf for value in constants.values())
    settings = configured(SimulateConfig(), constants, node.prompt_shape)
    assert settings.compute.per_row == constants["per_row"]
    assert settings.requests.prefix_tokens == node.prompt_shape["prefix_tokens"]
