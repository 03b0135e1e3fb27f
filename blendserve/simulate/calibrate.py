"""Measure the constants of a simulation on this machine: the engine's cost model, and timed requests.

Every constant is the least of several tries: other work on a machine only adds time.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import yaml

from blendserve.bench.workload import make_workload
from blendserve.blend.cost import measure as measure_cost_model
from blendserve.config import Config, ModelConfig, StoreConfig, changed
from blendserve.engine.engine import Engine
from blendserve.models.loader import load_model
from blendserve.provenance import machine
from blendserve.simulate.config import SimulateConfig
from blendserve.simulate.service_time import ServiceTime

Constants = dict[str, float]

MODEL, CHUNK_TOKENS, REQUEST_CHUNKS = "smollm2-135m", 64, 4
DEADLINE_S = 30.0  # of the server on this machine
SETS = 5  # of chunks, each requested once
FETCHES = 2  # rounds of fetching every set: a fetch takes little time, so it needs more tries
QUESTION = "What do these passages say about it?"


def pool_size(request_chunks: int) -> int:
    """Chunks that `Node.measure` needs."""
    return (1 + SETS) * request_chunks + SETS


class Node:
    """One model of one thread, with an engine for each run: caches of some chunks over a shared Valkey server."""

    def __init__(self, model: str, pool: int, chunk_tokens: int, url: str | None, seed: int = 0) -> None:
        """url: of the server; None: no shared store. Raises ModelError, InputError."""
        self.model = load_model(ModelConfig(name=model, threads=1))
        workload = make_workload(self.model, pool, chunk_tokens, None, seed)
        self._passages, self._ids, self._prompts = workload.passages, workload.chunks, workload.prompts
        self._url, self._chunk_tokens = url, chunk_tokens
        self._engine: Engine | None = None

    @property
    def prompt_shape(self) -> dict[str, int]:
        """Settings of the simulation that follow from the model and its prompts."""
        return {
            "prefix_tokens": len(self._prompts.prefix),
            "question_tokens": len(self._prompts.build(QUESTION, ()).suffix),
            "raw_bytes": self.model.decoder.kv_bytes_per_token,
        }

    def open(self, namespace: str, memory: int, disk: int) -> None:
        """Start with empty caches over the server's namespace; sizes in chunks. Raises StoreError."""
        self.close()
        chunk_bytes = self._chunk_tokens * self.model.decoder.kv_bytes_per_token
        remote = {"location": self._url, "admission": "always", "deadline_s": DEADLINE_S}
        store = StoreConfig(
            location="memory",
            cap_gb=(disk * chunk_bytes + 1) / 1e9,
            admission="always",
            namespace=namespace,
            memory_bytes=memory * chunk_bytes,
            remote=remote if self._url else None,
        )
        self._engine = Engine.open(Config(store=store.model_dump()), model=self.model)
        self._keys = [self._engine.blender.key(ids) for ids in self._ids]

    def close(self) -> None:
        """Close the engine; idempotent."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def precompute(self, namespace: str, with_chunks: bool = True) -> None:
        """Store all chunks on the server, or none."""
        store = StoreConfig(location=self._url or "", namespace=namespace, deadline_s=DEADLINE_S)
        with Engine.open(Config(store=store.model_dump()), model=self.model) as engine:
            engine.blender.writer.precompute(self._ids if with_chunks else [])

    def request(self, chunks: list[int], cached: bool = True) -> dict[str, Any]:
        """Answer one request -> TTFT and seconds after it, chunks by tier, and the chunks in memory if `cached`."""
        assert self._engine is not None
        began = time.perf_counter()
        passages = [self._passages[n] for n in chunks]
        answer = self._engine.answer(QUESTION, passages, method="blend", max_new_tokens=1)
        elapsed_s, tiers = time.perf_counter() - began, answer.report.tiers
        hot = self._engine.fetcher.resident() if cached else frozenset()
        return {
            "ttft": answer.timings.ttft,
            "after": elapsed_s - answer.timings.ttft,
            "found": [
                *(tiers.get(t, 0) for t in ("memory", "local", "remote")),
                answer.report.chunks_missing,
            ],
            "hot": [n for n, key in enumerate(self._keys) if key in hot],
        }

    def flush(self) -> None:
        """Wait until background copies are written."""
        assert self._engine is not None
        self._engine.fetcher.flush()

    def measure(self, request_chunks: int, memory: int, disk: int) -> Constants:
        """Constants of the compute and links settings; without a server, none of its link. `hot`: TTFT from memory."""
        model = measure_cost_model(self.model.decoder, repeats=5)
        n, tokens = request_chunks, self._chunk_tokens
        sets = [list(range(k * n, (k + 1) * n)) for k in range(1 + SETS)]
        self.open("measure", memory, disk)
        missed = [self._time(chunks) for chunks in sets][1:]  # the first set warms the process up
        hot, after = (min(again[part] for _, again in missed) for part in ("ttft", "after"))
        link: Constants = {}
        if self._url:
            link, again_s = self._measure_link(sets, memory, disk)
            hot = min(hot, again_s)
        constants = {**asdict(model), **link}
        settings = configured(SimulateConfig(), constants, self.prompt_shape, tokens, n)
        times = ServiceTime(changed(settings.compute, fixed=0.0), settings.corpus, settings.requests)
        stored_s = min(first["after"] for first, _ in missed) - after - model.per_pass
        return {
            **{**constants, "hot": hot, "fixed": max(0.0, hot - times.prefill([True] * n))},
            **{"per_answer_token": after, "per_stored": max(0.0, stored_s) / (n * tokens)},
        }

    def _measure_link(self, sets: list[list[int]], memory: int, disk: int) -> tuple[Constants, float]:
        """Constants of the server's link, and the TTFT of a set from memory."""
        n, raw_bytes = len(sets[0]), self.model.decoder.kv_bytes_per_token
        ones = [[k] for k in range(len(sets) * n, len(sets) * n + SETS)]
        for chunks in ones:
            self._time(chunks)
        several, single = [], []
        for _ in range(FETCHES):
            self.open("measure", memory, disk)
            several += [self._time(chunks) for chunks in sets][1:]
            single += [self._time(chunks) for chunks in ones]
        fetch_s, one_s = (
            min(first["ttft"] for first, _ in timed) - min(again["ttft"] for _, again in timed)
            for timed in (several, single)
        )
        per_byte = (
            max(1e-12, (fetch_s - one_s) / ((n - 1) * self._chunk_tokens * raw_bytes)) if n > 1 else 1e-12
        )
        return {
            "node_rate": 1 / per_byte,
            "per_fetched": per_byte * raw_bytes,  # the server is on this machine: cores move all bytes
            "delay": max(0.0, one_s - per_byte * self._chunk_tokens * raw_bytes),
        }, min(again["ttft"] for _, again in several)

    def _time(self, chunks: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
        """A request, and the same again from memory."""
        first = self.request(chunks, cached=False)
        self.flush()
        return first, self.request(chunks, cached=False)


def configured(
    config: SimulateConfig,
    constants: Constants,
    shape: dict[str, int],
    chunk_tokens: int | None = None,
    chunks: int | None = None,
) -> SimulateConfig:
    """The settings with measured constants, the model's prompt shape, and chunks of another size or number."""
    measured = {**constants, **shape, "stored_bytes": shape["raw_bytes"], "answer_tokens": 1}
    measured |= {"chunk_tokens": chunk_tokens or config.corpus.chunk_tokens}
    parts: dict[str, Any] = {}
    for name in ("compute", "links", "requests", "corpus"):
        section = getattr(config, name)
        values = {field: measured[field] for field in type(section).model_fields if field in measured}
        parts[name] = changed(section, **values, chunks=chunks if name == "requests" else None).model_dump()
    return changed(config, **parts)


def calibrate(config: SimulateConfig, url: str | None) -> str:
    """YAML: the settings with the constants of this machine, for the bundled model on one thread."""
    node = Node(MODEL, pool_size(REQUEST_CHUNKS), CHUNK_TOKENS, url)
    constants = node.measure(REQUEST_CHUNKS, memory=10, disk=14)
    node.close()
    found = configured(config, constants, node.prompt_shape).model_dump(mode="json")
    header = f"# `blendserve simulate --measure`: {MODEL}, one thread, {machine()['cpu']}"
    return f"{header}\n{yaml.safe_dump(found, sort_keys=False)}"
