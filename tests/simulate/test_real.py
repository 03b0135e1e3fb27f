"""The check against real engines: one real node with a tiny reader finds chunks where the simulated one does."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blendserve.bench.servers import Server, binary
from blendserve.config import changed
from blendserve.simulate import draw, real
from blendserve.simulate.cache import Cache
from blendserve.simulate.cluster import Cluster
from blendserve.simulate.config import SimulateConfig
from blendserve.simulate.node import Node
from blendserve.simulate.real import RealConfig, as_run, errors, serve, settings
from tests.bench.conftest import write_shape

CONSTANTS = dict.fromkeys(
    (
        *("per_pass", "per_row", "per_pair", "per_loaded", "per_fetched", "fixed", "per_answer_token"),
        *("per_stored", "delay"),
    ),
    1e-5,
)
ABOUT = {"prefix_tokens": 8, "question_tokens": 4, "raw_bytes": 10}


def small(**changes: Any) -> SimulateConfig:
    config = RealConfig(nodes=1, pool=20, chunk_tokens=10, memory=5, near=9, requests=40, **changes)
    return settings(config, {**CONSTANTS, "node_rate": 1e9}, ABOUT)


@pytest.mark.skipif(binary() is None, reason="there is no valkey-server here")
def test_a_real_node_finds_what_a_simulated_one_finds(tmp_path: Path) -> None:
    """Each of 25 requests, over a store that has all and over one that has nothing."""
    sizes = {"pool": 16, "chunk_tokens": 16, "request_chunks": 3, "memory": 4, "near": 7, "requests": 25}
    config = RealConfig(model=write_shape(tmp_path), nodes=1, **sizes)
    with Server() as server:
        node = Node({**config.model_dump(mode="json"), "url": server.url})
        base = settings(config, {**CONSTANTS, "node_rate": 1e9}, node.about())
        node.precompute("full")
        for store in ("full", "empty"):
            known = changed(base, tiers=changed(base.tiers, precomputed=store == "full").model_dump())
            ((_, chunks),) = draw.requests(known, 1)
            node.open(store)
            found = []
            for asked in chunks.tolist():
                told = node.ask(asked)
                node.flush()  # copies are made in the background: here, before the next request
                found.append(told["found"])
                assert len(told["hot"]) <= config.memory
            simulated = Cluster(known, 1, "round_robin").run(draw.requests(known, 1), config.requests)
            assert found == simulated.found.tolist()
        node.close()


class FakeNode:
    """What a node tells, by a simulated one's tiers."""

    def __init__(self, memory: int, near: int) -> None:
        self._memory, self._near = Cache(memory), Cache(near)

    def take(self, order: list[Any]) -> dict[str, Any]:
        what, chunks, *_ = order
        assert what == "ask"
        found = [0, 0, 0, 0]
        for chunk in chunks:
            near, memory = self._near.use(chunk), self._memory.use(chunk)
            found[0 if memory else 1 if near else 2] += 1
            if near and not memory:
                self._memory.offer(chunk)
        for chunk in chunks:
            if chunk not in self._near:
                self._near.offer(chunk)
                self._memory.offer(chunk)
        return {
            "ttft": 0.0,
            "behind": 0.0,
            "found": found,
            "waited": 0.25,
            "hot": [c for c in range(20) if c in self._memory],
        }


@pytest.mark.parametrize("rate", [0.0, 2000.0])
def test_requests_are_served_as_they_are_simulated(rate: float) -> None:
    config = small()
    config = changed(config, requests=changed(config.requests, rate=rate).model_dump())
    blocks = list(draw.requests(config, 1))
    nodes: list[Any] = [FakeNode(5, 9)]
    waits, trace = serve(nodes, config, "chunks", *blocks[0])
    simulated = Cluster(config, 1, "chunks").run(blocks, 40)
    assert waits == pytest.approx(0.25)
    assert (trace.found == simulated.found).all()
    assert (trace.ttft >= 0).all()
    assert (trace.left >= trace.came).all()


def test_a_node_that_fails_ends_the_run() -> None:
    class Broken:
        def take(self, order: list[Any]) -> dict[str, Any]:
            raise ValueError("gone")

    nodes: list[Any] = [Broken()]
    config = small()
    with pytest.raises(ValueError, match="gone"):
        serve(nodes, config, "round_robin", *next(draw.requests(config, 1)))
    assert threading.active_count() < 50


def test_runs_differ_in_what_they_say() -> None:
    config, base = RealConfig(nodes=1, requests=40), small()
    assert as_run(config, base, "closed").requests.rate == 0
    assert as_run(config, base, "full").requests.rate > 0
    assert not as_run(config, base, "empty").tiers.precomputed


def test_a_node_alone_is_compared_request_by_request() -> None:
    class Again(FakeNode):
        """One that begins anew, and is twice as slow as the simulated one but in one repeat."""

        opened = 0

        def take(self, order: list[Any]) -> dict[str, Any]:
            if order[0] == "open":
                self.__init__(5, 9)  # type: ignore[misc]
                self.opened += 1
                self._times = iter(simulated.ttft * (1 if self.opened == 2 else 2))
                return {}
            return {**super().take(order), "ttft": next(self._times), "behind": 1.0}

    base = small()
    ((_, chunks),) = draw.requests(base, 1)
    simulated = Cluster(base, 1, "round_robin").run([(np.zeros(40), chunks)], 40)
    node: Any = Again(5, 9)
    found = real.one_by_one(node, base, "full")
    assert found["same_places"] == 1.0
    assert found["error_of_mean"] == pytest.approx(0.0)
    assert found["error_of_a_request"] == pytest.approx(0.0)
    assert found["error_of_whole"] == pytest.approx(simulated.left[-1] / (simulated.ttft.sum() + 40) - 1)


def test_slowdown_is_how_much_longer_a_request_takes_while_others_compute() -> None:
    """Nodes that take a second alone, and half as long again for each other that is asked at the same time."""
    asked: list[int] = []

    class Slow:
        def take(self, order: list[Any]) -> dict[str, Any]:
            return {"ttft": 1.0 + 0.5 * (len(asked) - 1)}

    nodes: list[Any] = [Slow() for _ in range(3)]

    def together(chosen: list[Any], order: list[Any], times: int) -> list[list[dict[str, Any]]]:
        asked[:] = map(nodes.index, chosen)
        firsts.append(asked[0])
        return [[node.take(order) for _ in range(times)] for node in chosen]

    firsts: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(real, "together", together)
        config = RealConfig(nodes=3)
        assert real.slowdown(nodes, config, 0.8) == pytest.approx([1.25, 1.875, 2.5])
        assert set(firsts) == {0, 1, 2}  # each is alone at times
        assert real.slowdown(nodes, config, 1.2) == pytest.approx(
            [1.0, 1.25, 2 / 1.2]
        )  # never faster than the least


def test_nodes_are_asked_at_once_and_each_in_turn() -> None:
    meeting = threading.Barrier(2)

    class Meets:
        def take(self, order: list[Any]) -> dict[str, Any]:
            meeting.wait(60)  # nobody passes alone
            return {"order": order}

    nodes: list[Any] = [Meets(), Meets()]
    assert real.together(nodes, ["ask"], 3) == [[{"order": ["ask"]}] * 3] * 2


def test_a_run_is_compared_with_sharing_and_without() -> None:
    base = small()
    base = changed(base, requests=changed(base.requests, rate=2000.0).model_dump())
    blocks, slow = list(draw.requests(base, 1)), real.slowed(base, [2.0])
    found = real.against(slow, "round_robin", blocks, Cluster(slow, 1, "round_robin").run(blocks, 40))
    assert found["error_simulated"]["ttft"]["mean"] == 0
    assert found["error_apart"]["ttft"]["mean"] < -0.4
    assert found["slowdown"] == (2.0,)


def test_the_plan_is_what_was_asked_for() -> None:
    everything = [("full", "round_robin"), ("full", "prefix"), ("full", "chunks")]
    assert real.plan(RealConfig()) == [*everything, ("empty", "round_robin"), ("closed", "chunks")]
    assert real.plan(RealConfig(runs=("closed", "alone"), routing=("prefix",))) == [("closed", "prefix")]


def test_errors_are_shares_of_what_is_real() -> None:
    def figures(scale: float) -> dict[str, Any]:
        ttft = dict.fromkeys(("mean", "p50", "p95"), scale)
        return {"hit_rates": {"memory": 0.5 * scale}, "ttft": ttft, "throughput": 3 * scale}

    off = errors(figures(1.0), figures(1.2))
    assert off["hit_rates"]["memory"] == pytest.approx(0.1)
    assert off["ttft"] == pytest.approx({"mean": 0.2, "p50": 0.2, "p95": 0.2})
    assert off["throughput"] == pytest.approx(0.2)
    assert json.dumps(off)
    assert np.isfinite(list(off["ttft"].values())).all()
