"""A node of validate_simulator.py: a process that calls the methods of a `Node` by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.support.worker import serve
from blendserve.simulate.calibrate import Node


def start(task: dict[str, Any]) -> tuple[Any, Callable[[list[Any]], Any]]:
    node = Node(*(task[name] for name in ("model", "pool", "chunk_tokens", "url", "seed")))
    return node.prompt_shape, lambda order: getattr(node, order[0])(*order[1:]) or {}


if __name__ == "__main__":
    serve(start)
