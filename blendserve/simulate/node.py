"""A real node: an engine process with a memory tier and a small store of its own, over a shared Valkey server.

It is told what to do by a line, and tells what came of it: what its machine takes, or one request. Used to measure the
simulator's constants, and to check the simulator.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Any

import torch

from blendserve.bench.child import run, say
from blendserve.bench.workload import make_workload
from blendserve.blend.cost import measure
from blendserve.config import Config, ReaderConfig, RemoteConfig, StoreConfig, TiersConfig
from blendserve.core import Passage
from blendserve.engine.engine import Engine
from blendserve.kernels.race import waited
from blendserve.models.loader import load_reader
from blendserve.registry import SHARED_STORE, STORES
from blendserve.simulate.config import ComputeConfig, CorpusConfig, RequestsConfig
from blendserve.simulate.work import Work
from blendserve.store import KVStore, LayeredStore, MemoryStore
from blendserve.store.base import LOCAL, REMOTE
from blendserve.store.policies import LRU, Always, Policies
from blendserve.store.tiers import Tier, tiers_for

Figures = dict[str, Any]
DEADLINE_S = 30.0  # nothing is to fail here
TIMED = 5  # sets of chunks that each constant is the least of
FETCHES = 2  # times that each of them is fetched: what that takes is a small difference
QUESTION = "What do these passages say about it?"


class Node:
    """One reader, and an engine for each run."""

    def __init__(self, task: Figures) -> None:
        """task: url, model, pool and chunk_tokens, chunks a request; memory and near, in chunks."""
        self._task = task
        self.reader = load_reader(ReaderConfig(model=task["model"], threads=1))
        workload = make_workload(self.reader, task["pool"], task["chunk_tokens"], None, task["seed"])
        self._passages = workload.passages
        self._ids, self._prompts = workload.chunks, workload.prompts
        self._engine: Engine | None = None
        self._memory: Tier | None = None

    def about(self) -> Figures:
        """What the simulator has to know of this reader and its prompts."""
        prompt = self._prompts.build(QUESTION, ())
        return {
            "prefix_tokens": len(self._prompts.prefix),
            "question_tokens": len(prompt.suffix),
            "raw_bytes": self.reader.adapter.kv_bytes_per_token,
        }

    def open(self, namespace: str) -> Figures:
        """Begin anew: an empty memory tier and store of its own, over what the server has in this namespace."""
        self.close()
        chunk = self.reader.adapter.kv_bytes_per_token * self._task["chunk_tokens"]
        near = MemoryStore(self._task["near"] * chunk + 1, LRU(), Always())
        tiers = TiersConfig(memory_bytes=self._task["memory"] * chunk)
        self._memory, *_ = tiers_for(tiers, Always(), torch.device("cpu"))
        store = LayeredStore(near, self._far(), [self._memory])
        config = Config(store=StoreConfig(namespace=namespace, tiers=tiers.model_dump()).model_dump())
        self._engine = Engine(config, self.reader, store)
        self._keys = list(map(self._engine.blender.key, self._ids))
        self._take_prefix(near, self._memory)
        return {}

    def _take_prefix(self, near: MemoryStore, memory: Tier) -> None:
        """What every prompt begins with is the engine's own before the first request, and has no place among chunks."""
        assert self._engine is not None
        self._engine.blender.precompute([])
        self._engine.blender.sample_link()
        self._engine.blender.wait_for_sample()
        self.flush()
        for key in list(near.keys()):
            near.delete(key)
        memory.clear()

    def close(self) -> None:
        """Release the stores; idempotent."""
        if self._engine is not None:
            self._engine.close()

    def precompute(self, namespace: str) -> Figures:
        """All chunks into the shared store, past the node's own."""
        config = Config(store=StoreConfig(namespace=namespace).model_dump())
        with Engine(config, self.reader, self._far()) as engine:
            engine.blender.precompute(self._ids)
        return {}

    def ask(self, chunks: list[int], tell_hot: bool = True) -> Figures:
        """One request -> seconds to the first token, seconds behind it, chunks by tier, chunks in memory now.

        waited: share of its time for which the process's threads stood in line for a core.
        """
        engine = self._engine
        assert engine is not None
        assert self._memory is not None
        stood, began = waited(), time.perf_counter()
        passages = tuple(Passage(self._passages[n].text) for n in chunks)
        answer = engine.answer(QUESTION, passages, method="blend", max_new_tokens=1)
        took, tiers, report = time.perf_counter() - began, answer.report.tiers, answer.report
        return {
            "ttft": answer.timings.ttft,
            "behind": took - answer.timings.ttft,
            "waited": (waited() - stood) / took,
            "found": [
                tiers.get("memory", 0),
                tiers.get(LOCAL, 0),
                tiers.get(REMOTE, 0),
                report.chunks_missing,
            ],
            "hot": [n for n, key in enumerate(self._keys) if key in self._memory] if tell_hot else [],
        }

    def measure(self) -> Figures:
        """What this machine takes: the engine's cost model, and requests timed.

        The least of some tries counts everywhere: others' work on a machine only ever adds time.
        """
        model = measure(self.reader.adapter, repeats=5)
        size, n = self._task["chunk_tokens"], self._task["request_chunks"]
        sets = [list(range(k * n, (k + 1) * n)) for k in range(1 + TIMED)]
        ones = [[k] for k in range((1 + TIMED) * n, (1 + TIMED) * n + TIMED)]
        self.open("measure")
        missed = [self._timed(chunks) for chunks in sets][1:]  # the first one also warms the process
        for chunks in ones:
            self._timed(chunks)
        fetched, single = [], []
        for _ in range(FETCHES):
            self.open("measure")
            fetched += [self._timed(chunks, again=True) for chunks in sets][1:]
            single += [self._timed(chunks, again=True) for chunks in ones]
        stored = size * self.reader.adapter.kv_bytes_per_token
        several, one = (min(first) - min(again) for first, again, _ in map(_columns, (fetched, single)))
        per_byte = max(1e-12, (several - one) / ((n - 1) * stored)) if n > 1 else 1e-12
        behind = min(behind for *_, behind in fetched)
        known = self.about()
        compute = ComputeConfig(
            **asdict(model), raw_bytes=known["raw_bytes"], stored_bytes=known["raw_bytes"]
        )
        work = Work(
            compute.model_copy(update={"fixed": 0.0}),
            CorpusConfig(chunk_tokens=size),
            RequestsConfig(
                prefix_tokens=known["prefix_tokens"], question_tokens=known["question_tokens"], chunks=n
            ),
        )
        hot = min(again for _, again, _ in fetched)
        return {
            **asdict(model),
            "hot": hot,
            "fixed": max(0.0, hot - work.prefill([True] * n)),
            "per_answer_token": behind,
            "per_stored": max(0.0, min(b for *_, b in missed) - behind - model.per_pass) / (n * size),
            "node_rate": 1 / per_byte,
            "per_fetched": per_byte
            * known["raw_bytes"],  # the server is on this machine, too: cores move all bytes
            "delay": max(0.0, one - per_byte * stored),
            "missed_of_model": min(t for t, *_ in missed) / work.prefill([False] * n),
        }

    def _timed(self, chunks: list[int], again: bool = False) -> tuple[float, float, float]:
        """Seconds to the first token, the same asked again at once (0 unless asked for), and behind the last one's."""
        first = self.ask(chunks, tell_hot=False)
        self.flush()
        then = self.ask(chunks, tell_hot=False) if again else first
        return first["ttft"], then["ttft"] if again else 0.0, then["behind"]

    def flush(self) -> None:
        """Wait until all copies are made that are on their way."""
        assert self._engine is not None
        assert isinstance(self._engine.store, LayeredStore)
        self._engine.store.flush()

    def _far(self) -> KVStore:
        about = RemoteConfig(kind=SHARED_STORE, valkey={"url": self._task["url"], "deadline_s": DEADLINE_S})
        policies = Policies(LRU(), Always())
        store: KVStore = STORES.load(SHARED_STORE).from_config(about, None, False, policies)
        return store


def _columns(timed: list[tuple[float, float, float]]) -> list[tuple[float, ...]]:
    return list(zip(*timed, strict=True))


def main() -> None:
    """A task on stdin, and what is known then; then, line by line, [what to do, arguments] and what came of it."""
    node = Node(json.loads(sys.stdin.readline()))
    say(node.about())
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        say(getattr(node, what)(*arguments))


if __name__ == "__main__":
    run(main)
