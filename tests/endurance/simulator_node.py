"""A node of validate_simulator.py: a worker process whose task says which store it opens, and which gets orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.support.worker import serve
from blendserve.simulate.calibrate import Node


def _start(task: dict[str, Any]) -> tuple[Any, Callable[[list[Any]], Any]]:
    node = Node(*(task[name] for name in ("model", "pool", "chunk_tokens", "url", "seed")))
    caches = task["memory"], task["disk"]

    def answer(request: list[Any]) -> Any:
        order, *arguments = request
        more = {"open": caches, "measure": (task["request_chunks"], *caches)}.get(order, ())
        return getattr(node, order)(*arguments, *more) or {}

    return node.prompt_shape, answer


if __name__ == "__main__":
    serve(_start)
