"""The process that is measured beside others: it loads a reader, and runs one request for each line that it is asked.

A process of its own, since libgomp reads how to wait when it is loaded, and threads are counted at the start.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from blendserve.bench.child import run, say
from blendserve.bench.config import CrowdedConfig
from blendserve.bench.decode import Decoded, prefilled, run_generate, run_ours
from blendserve.bench.harness import Harness
from blendserve.bench.machine import where
from blendserve.bench.workload import check_room, make_workload
from blendserve.evaluate.methods import TRANSFORMERS, MethodSpec
from blendserve.models.loader import load_reader
from blendserve.threads import SETTLED
from blendserve.timing import Clock

DECODE = "decode"
Request = Callable[[], "Taken"]


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds of one request; None = not part of it."""

    ttft: float | None = None
    per_token: float | None = None


def main() -> None:
    """A task on stdin and what is there on stdout; then, line by line, a request's name and what it took."""
    task = json.loads(sys.stdin.readline())
    config = CrowdedConfig(**task["config"])
    reader = load_reader(config.reader)
    workload = make_workload(reader, config.chunks, config.chunk_tokens, config.suffix_tokens, config.seed)
    ids, n = workload.prompt.ids, config.new_tokens
    check_room(reader, len(ids) + n, f"the prompt and {n} new tokens")
    with Harness(reader, workload, config.variants, Path(task["folder"])) as harness:
        harness.precompute()
        done = prefilled(reader.adapter, ids, n)
        requests: dict[str, Request] = {
            DECODE: lambda: _decoded(run_ours(reader.adapter, done, len(ids), n)),
            **{v.name: partial(_first_token, harness, v, n) for v in config.variants},
        }
        for request in requests.values():  # for warmth
            request()
        say({**where(config, reader), "cpus": asdict(SETTLED.cpus), "names": list(requests)})
        for line in sys.stdin:
            say(asdict(requests[json.loads(line)]()))


def _first_token(harness: Harness, variant: MethodSpec, n: int) -> Taken:
    """To the first token; transformers, whose generate is one call, also to the n-th."""
    if variant.kind != TRANSFORMERS:
        return Taken(ttft=harness.run(variant).ttft)
    clock = Clock(harness.reader.adapter.device)
    ids = harness.workload.draw().ids
    tokenised = clock.elapsed()
    run = run_generate(harness.reader.adapter, ids, n)
    return Taken(tokenised + run.seconds[0], run.per_token)


def _decoded(run: Decoded) -> Taken:
    return Taken(per_token=run.per_token)


if __name__ == "__main__":
    run(main)
