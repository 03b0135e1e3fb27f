"""Small clusters without any cost but those that a test names."""

from __future__ import annotations

from typing import Any

import numpy as np

from blendserve.simulate import draw
from blendserve.simulate.cluster import Cluster, Trace
from blendserve.simulate.config import Routing, SimulateConfig
from blendserve.simulate.figures import summary

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


def run(settings: SimulateConfig, nodes: int, routing: Routing) -> Trace:
    return Cluster(settings, nodes, routing).run(draw.requests(settings, nodes), settings.requests.number)


def figures(settings: SimulateConfig, nodes: int, routing: Routing) -> dict[str, Any]:
    return summary(settings, run(settings, nodes, routing), nodes)


def at(times: list[float], nodes: int, **parts: Any) -> Trace:
    """Requests for one chunk each, at these times, one node after the other."""
    parts.setdefault("requests", {"rate": 1.0})
    chunks = np.arange(len(times))[:, None]
    return Cluster(config(**parts), nodes, "round_robin").run([(np.array(times), chunks)], len(times))
