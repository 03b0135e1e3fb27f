"""A node of validate_simulator.py: a task on stdin, then orders, a JSON line each; answers are JSON lines on stdout."""

from __future__ import annotations

import json
import sys

from blendserve.bench.child import run, say
from blendserve.simulate.calibrate import Node


def main() -> None:
    task = json.loads(sys.stdin.readline())
    node = Node(*(task[name] for name in ("model", "pool", "chunk_tokens", "url", "seed")))
    caches = task["memory"], task["disk"]
    say(node.prompt_shape)
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        more = {"open": caches, "measure": (task["request_chunks"], *caches)}.get(order, ())
        say(getattr(node, order)(*arguments, *more) or {})


if __name__ == "__main__":
    run(main)
