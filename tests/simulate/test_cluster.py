"""A simulated cluster by what must not matter, its router and work against the engine's, and against a real node."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from blendserve.bench.servers import Server, binary
from blendserve.blend.layout import lay_out
from blendserve.blend.policies.base import make_policy
from blendserve.blend.work import work_of
from blendserve.config import BlendConfig
from blendserve.core import Chunk, ChunkKV, Prompt
from blendserve.routing import Replica, choose
from blendserve.simulate import draw, real
from blendserve.simulate.cache import Cache, key_of
from blendserve.simulate.cluster import Cluster
from blendserve.simulate.config import ROUTINGS, ComputeConfig, CorpusConfig, RequestsConfig, Routing
from blendserve.simulate.figures import summary
from blendserve.simulate.node import Node
from blendserve.simulate.real import RealConfig
from blendserve.simulate.routing import ROUTERS, Holders, Loads, name_of
from blendserve.simulate.work import Work
from blendserve.store.memory import MemoryChunk
from tests.bench.conftest import write_shape
from tests.golden import research
from tests.simulate.conftest import CHUNK, config, run


def test_the_numbers_are_the_recorded_ones() -> None:
    """To the last digits, which sums of many numbers may differ in by CPU."""
    assert research.same(research.simulation(), research.golden("simulate"), 1e-12)


@given(chunks=st.lists(st.integers(0, 9), max_size=60), places=st.integers(0, 6))
def test_a_tier_is_lru_and_tells_what_comes_and_goes(chunks: list[int], places: int) -> None:
    told: set[int] = set()
    tier = Cache(places, None, 0, lambda _, c: told.add(c), lambda _, c: told.remove(c))
    plain: list[int] = []
    for chunk in chunks:
        assert tier.use(chunk) == (chunk in plain)
        tier.offer(chunk)
        plain = [*(c for c in plain if c != chunk), chunk][-places:] if places else []
        assert told == set(plain) == {c for c in range(10) if c in tier}
        assert len(tier) == len(plain)


TIERS: dict[str, list[Any]] = {
    "memory_bytes": [5 * CHUNK],
    "disk_bytes": [0, 8 * CHUNK],
    "remote_bytes": ["all", 0, 30 * CHUNK],
    "precomputed": [True, False],
    "admission": ["always", "tinylfu"],
}


@given(
    nodes=st.integers(1, 4),
    routing=st.sampled_from(ROUTINGS),
    tiers=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in TIERS.items()}),
    rate=st.sampled_from([0.0, 5.0]),
    slowdown=st.sampled_from([(1.0,), (1.0, 1.7)]),
    seed=st.integers(0, 3),
)
def test_nothing_is_lost_and_the_same_seed_is_the_same(
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
    trace, again = run(settings, nodes, routing), run(settings, nodes, routing)
    assert (trace.found.sum(axis=1) == settings.requests.chunks).all()
    assert (trace.ttft >= 0.1 - 1e-9).all()
    assert (trace.left >= trace.came + trace.ttft - 1e-9).all()
    found = summary(settings, trace, nodes)
    assert sum(found["hit_rates"].values()) == pytest.approx(1.0)
    assert found["bytes"]["from_store"] == trace.found[:, 2].sum() * CHUNK
    assert trace.sent <= trace.found[:, 3].sum()
    if tiers["precomputed"] and tiers["remote_bytes"] == "all":
        assert not trace.found[:, 3].any()
    for part in ("came", "ttft", "left", "node", "found"):
        assert (getattr(trace, part) == getattr(again, part)).all()


def test_one_node_is_one_node_however_it_is_routed_to() -> None:
    settings = config(compute={"fixed": 0.1}, requests={"rate": 6.0}, links={"node_rate": 1e5})
    first, *others = (run(settings, 1, routing) for routing in ROUTINGS)
    assert all((first.ttft == other.ttft).all() and (first.found == other.found).all() for other in others)


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


@given(moves=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=60))
def test_the_least_loaded_node_is_found(moves: list[tuple[int, bool]]) -> None:
    loads = Loads(5, 1.25)
    for node, comes in moves:
        loads.add(node, 1 if comes or not loads.at[node] else -1)
        assert loads.at[loads.least()] == min(loads.at)
        assert loads.total == sum(loads.at)


@given(
    found=st.lists(st.booleans(), min_size=1, max_size=6),
    size=st.integers(1, 40),
    prefix=st.integers(1, 9),
    question=st.integers(1, 9),
    ratio=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
def test_work_is_counted_as_the_engine_counts_it(
    found: list[bool], size: int, prefix: int, question: int, ratio: float
) -> None:
    """The engine looks at a layout token by token."""
    stored = {
        n: MemoryChunk(ChunkKV(torch.zeros(1, 1, n, 2), torch.zeros(1, 1, n, 2))) for n in (prefix, size)
    }
    prompt = Prompt((1,) * prefix, tuple(Chunk((2,) * size) for _ in found), (3,) * question)
    views = [stored[size] if there else None for there in found]
    layout = lay_out(prompt, stored[prefix], views, behind_prefix=True)
    wanted = work_of(layout, make_policy(BlendConfig(ratio=ratio)), 1).row()
    requests = RequestsConfig(prefix_tokens=prefix, question_tokens=question, chunks=len(found))
    work = Work(ComputeConfig(ratio=ratio), CorpusConfig(chunk_tokens=size), requests)
    assert torch.allclose(torch.tensor(work.counts(found)).double(), torch.tensor(wanted).double(), rtol=1e-6)


NAMES = ("pass", "row", "pair", "loaded", "fetched", "answer_token", "stored")
CONSTANTS = {**dict.fromkeys((*(f"per_{name}" for name in NAMES), "fixed", "delay"), 1e-5), "node_rate": 1e9}


@pytest.mark.skipif(binary() is None, reason="there is no valkey-server here")
def test_a_real_node_finds_what_a_simulated_one_finds(tmp_path: Path) -> None:
    """Each of 25 requests, over a store that has all and over one that has nothing."""
    sizes = {"pool": 16, "chunk_tokens": 16, "request_chunks": 3, "memory": 4, "near": 7, "requests": 25}
    config = RealConfig(model=write_shape(tmp_path), nodes=1, **sizes)
    with Server() as server:
        node = Node({**config.model_dump(mode="json"), "url": server.url})
        base = real.settings(config, CONSTANTS, node.about())
        node.precompute("full")
        for store in ("full", "empty"):
            known = real.over(base, store)
            ((_, chunks),) = draw.requests(known, 1)
            node.open(store)
            found = []
            for asked in chunks.tolist():
                found.append(node.ask(asked)["found"])
                node.flush()  # copies are made in the background: here, before the next request
            simulated = Cluster(known, 1, "round_robin").run(draw.requests(known, 1), config.requests)
            assert found == simulated.found.tolist()
        node.close()


class FakeNode:
    """A node that has every chunk in its own store, and needs half a second for each request."""

    about: ClassVar[Any] = {"prefix_tokens": 8, "question_tokens": 4, "raw_bytes": 10}

    def take(self, order: list[Any]) -> dict[str, Any]:
        told = {"ttft": 0.5, "behind": 0.1, "waited": 0.25, "hot": []}
        return (
            {**CONSTANTS, "hot": 0.25}
            if order == ["measure"]
            else {**told, "found": [0, len(order[1]), 0, 0]}
        )


def test_a_node_is_compared_with_the_simulated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and in every run of the plan: it needs twice its least time."""
    monkeypatch.setattr(real, "nodes_of", lambda _: nullcontext([FakeNode()]))
    found = real.compare(RealConfig(nodes=1, pool=20, chunk_tokens=10, memory=5, near=9, requests=40), print)
    for alone in found["alone"].values():
        assert (alone["same_places"], alone["ttft_real"]) == (0.0, 0.5)
        assert alone["error_of_mean"] == pytest.approx(alone["ttft_simulated"] / 0.5 - 1)
    runs = [(told["store"], told["routing"]) for told in found["runs"]]
    every = [("full", routing) for routing in ("round_robin", "prefix", "chunks")]
    assert runs == [*every, ("empty", "round_robin"), ("closed", "chunks")]
    for told in found["runs"]:
        assert (told["waited"], told["slowdown"]) == (0.25, (2.0,))
        hits = told["simulated"]["hit_rates"]
        assert told["error_simulated"]["hit_rates"] == {**hits, "disk": hits["disk"] - 1}
        mean = {name: told[name]["ttft"]["mean"] for name in ("real", "simulated", "apart")}
        assert told["error_apart"]["ttft"]["mean"] == pytest.approx(mean["apart"] / mean["real"] - 1)
        assert mean["apart"] < mean["simulated"] < mean["real"]


def test_a_node_that_fails_ends_the_run_and_its_threads() -> None:
    class Broken(FakeNode):
        def take(self, order: list[Any]) -> dict[str, Any]:
            raise ZeroDivisionError

    config = real.settings(RealConfig(nodes=1, pool=20, requests=40), CONSTANTS, FakeNode.about)
    nodes: list[Any] = [Broken()]
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        real.serve(nodes, config, "round_robin", *next(draw.requests(config, 1)))
    assert threading.active_count() == before
