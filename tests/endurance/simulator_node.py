"""A node of validate_simulator.py: a process that calls the methods of a `ServingNode` by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blendserve.config import Config, StoreConfig
from blendserve.engine.engine import Engine
from blendserve.simulate.calibrate import DEADLINE_S, Node
from blendserve.threads import limit_torch


class ServingNode(Node):
    """A node that fills the shared store, and says where it found a request's chunks."""

    engine: Engine  # since `begin`

    def begin(self, namespace: str, memory: int, disk: int) -> None:
        """Start with empty caches over the server's namespace; sizes in chunks."""
        if hasattr(self, "engine"):
            self.engine.close()
        self.engine = self.open(namespace, memory, disk)

    def precompute(self, namespace: str, with_chunks: bool = True) -> None:
        """Store all chunks on the server, or none."""
        store = StoreConfig(location=self.url or "", namespace=namespace, deadline_s=DEADLINE_S)
        with Engine.open(Config(store=store.model_dump()), model=self.model) as engine:
            engine.blender.writer.precompute(self.workload.chunks if with_chunks else [])

    def request(self, chunks: list[int], cached: bool = True) -> dict[str, Any]:
        """Answer one request -> TTFT, chunks by tier, and the chunks in memory if `cached`."""
        answer, _ = self.answer(self.engine, chunks)
        tiers = answer.report.tiers
        hot = self.engine.fetcher.resident() if cached else frozenset()
        in_pool = enumerate(self.workload.chunks if hot else ())
        return {
            "ttft": answer.timings.ttft,
            "found": [
                *(tiers.get(t, 0) for t in ("memory", "local", "remote")),
                answer.report.chunks_missing,
            ],
            "hot": [n for n, ids in in_pool if self.engine.blender.key(ids) in hot],
        }


def start_node(task: tuple[str, int, int, str, int]) -> tuple[dict[str, int], Callable[[list[Any]], Any]]:
    """A process with one thread."""
    limit_torch(1)
    node = ServingNode(*task)
    return node.prompt_shape, lambda order: getattr(node, order[0])(*order[1:])
