"""Nodes that share a machine: against queueing theory, a count in small pieces, by hand, and machines of their own."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.errors import ConfigError
from blendserve.simulate.cluster import Cluster, Trace
from blendserve.simulate.config import ComputeConfig, Routing
from blendserve.simulate.figures import summary
from blendserve.simulate.machine import Machine
from tests.simulate.test_cluster import CHUNK, config, run


def at(times: list[float], nodes: int, **parts: Any) -> Trace:
    """Requests for one chunk each, at these times, by turns."""
    chunks = np.arange(len(times))[:, None]
    return Cluster(config(**parts), nodes, "round_robin").run([(np.array(times), chunks)], len(times))


def test_work_is_shared_by_hand() -> None:
    """Two of one second: the first has half of it before the second comes, which is alone for its last half."""
    trace = at([0.0, 0.5], 2, compute={"fixed": 1.0, "slowdown": (1.0, 2.0)}, requests={"rate": 1.0})
    assert trace.ttft.tolist() == pytest.approx([1.5, 1.5])
    assert trace.left.tolist() == pytest.approx([1.5, 2.0])


def test_who_waits_for_bytes_slows_nobody_down() -> None:
    """A second of work before a fetch of one: the second node has the machine while the first one waits."""
    parts: dict[str, Any] = {"links": {"node_rate": float(CHUNK)}, "requests": {"rate": 1.0}}
    trace = at([0.0, 1.0], 2, compute={"fixed": 1.0, "slowdown": (1.0, 3.0)}, **parts)
    assert trace.ttft.tolist() == pytest.approx([2.0, 2.0])


def test_cores_that_fetch_are_busy() -> None:
    """Half a second of work for bytes that take one: hidden alone, and three times as long beside another node's."""
    compute: dict[str, Any] = {"per_fetched": 0.5 / 100, "slowdown": (1.0, 3.0)}
    parts: dict[str, Any] = {"links": {"node_rate": float(CHUNK)}, "requests": {"rate": 1.0}}
    assert at([0.0, 9.0], 2, compute=compute, **parts).ttft.tolist() == pytest.approx([1.0, 1.0])
    assert at([0.0, 0.0], 2, compute=compute, **parts).ttft.tolist() == pytest.approx([1.5, 1.5])


def test_machines_do_not_slow_each_other_down() -> None:
    trace = at([0.0] * 4, 4, compute={"fixed": 1.0, "slowdown": (1.0, 1.5)}, requests={"rate": 1.0})
    assert trace.ttft.tolist() == pytest.approx([1.5] * 4)
    trace = at([0.0] * 3, 3, compute={"fixed": 1.0, "slowdown": (1.0, 1.5)}, requests={"rate": 1.0})
    assert trace.ttft.tolist() == pytest.approx([1.5, 1.5, 1.0])  # the third has a machine to itself


@pytest.mark.parametrize("busy", [0.3, 0.7])
def test_one_core_for_all_is_a_queue_with_processor_sharing(busy: float) -> None:
    """M/G/1-PS: a request stays 1 / (1 - busy) of its work on average, where no node ever has two of them."""
    nodes = 24
    settings = config(
        compute={"fixed": 1.0, "slowdown": tuple(range(1, nodes + 1))},
        requests={"number": 12_000, "rate": busy / nodes, "chunks": 1, "warm_up": 0.1},
        corpus={"chunks": 1},
    )
    mean = summary(settings, run(settings, nodes, "least_loaded"), nodes)["ttft"]["mean"]
    assert mean == pytest.approx(1 / (1 - busy), rel=0.05)


@given(
    gaps=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=6),
    works=st.lists(st.floats(0.1, 3.0), min_size=6, max_size=6),
    slowdown=st.lists(st.floats(1.0, 4.0), min_size=6, max_size=6).map(sorted),
)
def test_who_is_done_when(gaps: list[float], works: list[float], slowdown: list[float]) -> None:
    """Against what is left of each, counted from one change to the next."""
    times = np.cumsum(gaps).tolist()
    machine, now = Machine(slowdown), 0.0
    ends, left, wanted = dict[int, float](), dict[int, float](), dict[int, float]()
    for node, time in enumerate([*times, inf]):
        while machine.due <= time and machine.due < inf:
            due = machine.due
            ends[machine.take()] = due
        while left and (then := now + min(left.values()) * slowdown[len(left) - 1]) <= time:
            passed = min(left.values())
            done = [n for n, work in left.items() if work <= passed]
            left = {n: work - passed for n, work in left.items() if n not in done}
            wanted |= dict.fromkeys(done, then)
            now = then
        if time < inf:
            left = {n: work - (time - now) / slowdown[len(left) - 1] for n, work in left.items()}
            left[node], now = works[node], time
            machine.add(time, node, works[node])
    assert ends == pytest.approx(wanted)


@pytest.mark.parametrize("routing", ["round_robin", "chunks"])
@pytest.mark.parametrize("full", [True, False])
def test_where_nothing_is_slower_a_machine_is_as_many(routing: Routing, full: bool) -> None:
    """With all that an answer is made of: fetching, a disk, decoding, tokens, and chunks that are stored behind it."""
    parts: dict[str, Any] = {
        "tiers": {"memory_bytes": 8 * CHUNK, "disk_bytes": 12 * CHUNK, "precomputed": full},
        "requests": {"number": 300, "rate": 2.0},
        "corpus": {"chunks": 60},
        "links": {"node_rate": 1e5, "disk_rate": 1e4, "disk_delay": 0.01},
    }
    compute = {
        "fixed": 0.05,
        "per_row": 1e-3,
        "per_decoded": 1e-4,
        "per_answer_token": 1e-3,
        "per_pass": 0.01,
    }
    apart, shared = (
        run(config(compute={**compute, "slowdown": slowdown}, **parts), 4, routing)
        for slowdown in ((1.0,), (1.0, 1.0))
    )
    assert (apart.found == shared.found).all()
    assert (apart.node == shared.node).all()
    np.testing.assert_allclose(apart.ttft, shared.ttft)
    np.testing.assert_allclose(apart.left, shared.left)
    slower = run(config(compute={**compute, "slowdown": (1.0, 1.5)}, **parts), 4, routing)
    assert slower.ttft.mean() > 1.05 * apart.ttft.mean()


def test_a_closed_loop_has_what_the_machine_can_do() -> None:
    settings = config(
        compute={"fixed": 0.5, "slowdown": (1.0, 1.6)},
        requests={"rate": 0.0, "clients": 1, "warm_up": 0.1},
    )
    figures = summary(settings, run(settings, 2, "least_loaded"), 2)
    assert figures["throughput"] == pytest.approx(2 / (0.5 * 1.6), rel=0.02)


def test_a_node_by_itself_may_be_slower_than_its_settings() -> None:
    slow = at([0.0, 9.0], 1, compute={"fixed": 1.0, "slowdown": (1.2,)}, requests={"rate": 1.0})
    assert slow.ttft.tolist() == pytest.approx([1.2, 1.2])


@pytest.mark.parametrize("values", [(), (0.9, 1.0), (1.0, 2.0, 1.5)])
def test_a_machine_is_not_faster_with_more_to_do(values: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="slowdown"):
        ComputeConfig(slowdown=values)
