"""Measure the constants of a simulation on this machine: the engine's cost model, and timed requests.

Every constant is the least of several tries: other work on a machine only adds time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import ClassVar

import numpy as np
import yaml
from numpy.typing import NDArray

from blendserve.answer import Answer
from blendserve.bench.workload import make_workload
from blendserve.blend.cost import measure as measure_cost_model
from blendserve.config import Config, ModelConfig, StoreConfig
from blendserve.engine.engine import Engine
from blendserve.models.loader import load_model
from blendserve.provenance import machine
from blendserve.simulate.config import SimulateConfig
from blendserve.simulate.service_time import ServiceTime

Constants = dict[str, float]

MODEL = "smollm2-135m"
CHUNK_TOKENS = 64
REQUEST_CHUNKS = 4
DEADLINE_S = 30.0  # of the server on this machine
SETS = 5  # of chunks, each requested once
FETCHES = 2  # rounds of fetching every set: a fetch takes little time, so it needs more tries
QUESTION = "What do these passages say about it?"


class PlainLRU(StoreConfig):
    """A store that admits everything, as the simulation's caches do by default."""

    admission: ClassVar[str] = "always"


def pool_size(request_chunks: int) -> int:
    """Chunks that `CalibratedNode.measure` needs."""
    return (1 + SETS) * request_chunks + SETS


class CalibratedNode:
    """One model of one thread, with an engine for each run: caches of some chunks over a shared Valkey server."""

    def __init__(self, model: str, pool: int, chunk_tokens: int, url: str | None, seed: int = 0) -> None:
        """url: of the server; None: no shared store. Raises ModelError, InputError."""
        self.model = load_model(ModelConfig(name=model, threads=1))
        self.workload = make_workload(self.model, pool, chunk_tokens, None, seed)
        self.url = url
        self._chunk_tokens = chunk_tokens

    @property
    def prompt_shape(self) -> dict[str, int]:
        """Settings of the simulation that follow from the model and its prompts."""
        prompts = self.workload.prompts
        return {
            "prefix_tokens": len(prompts.prefix),
            "question_tokens": len(prompts.build(QUESTION, ()).suffix),
            "raw_bytes": self.model.decoder.kv_bytes_per_token,
        }

    def open(self, namespace: str, memory: int, disk: int) -> Engine:
        """An engine with empty caches over the server's namespace; sizes in chunks. Raises StoreError."""
        chunk_bytes = self._chunk_tokens * self.model.decoder.kv_bytes_per_token
        remote = {"location": self.url, "deadline_s": DEADLINE_S}
        store = PlainLRU(
            location="memory",
            cap_gb=(disk * chunk_bytes + 1) / 1e9,
            namespace=namespace,
            memory_bytes=memory * chunk_bytes,
            remote=remote if self.url else None,
        )
        return Engine.open(Config(store=store), model=self.model)

    def answer(self, engine: Engine, chunks: Sequence[int]) -> tuple[Answer, float]:
        """The answer to a request for chunks of the pool, and the seconds after its first token."""
        began = time.perf_counter()
        passages = [self.workload.passages[n] for n in chunks]
        answer = engine.answer(QUESTION, passages, method="blend", max_new_tokens=1)
        return answer, time.perf_counter() - began - answer.timings.ttft

    def measure(self, request_chunks: int, memory: int, disk: int) -> Constants:
        """Constants of the compute and links settings; without a server, none of its link. `hot`: TTFT from memory."""
        model = measure_cost_model(self.model.decoder, repeats=5)
        n = request_chunks
        tokens = self._chunk_tokens
        sets = [list(range(k * n, (k + 1) * n)) for k in range(1 + SETS)]
        with self.open("measure", memory, disk) as engine:
            self._least(engine, sets[:1])  # warms the process up
            (_, first_after), (hot, after) = self._least(engine, sets[1:]).tolist()
        link: Constants = {}
        if self.url:
            link, again_s = self._measure_link(sets, memory, disk)
            hot = min(hot, again_s)
        constants = {**asdict(model), **link}
        settings = configured(SimulateConfig(), constants, self.prompt_shape, tokens, n)
        fixed = hot - ServiceTime(settings).prefill([True] * n)
        stored_s = first_after - after - model.per_pass
        return {
            **constants,
            "hot": hot,
            "fixed": max(0.0, fixed),
            "per_answer_token": after,
            "per_stored": max(0.0, stored_s) / (n * tokens),
        }

    def _measure_link(self, sets: list[list[int]], memory: int, disk: int) -> tuple[Constants, float]:
        """Constants of the server's link, and the TTFT of a set from memory. The server has the sets."""
        n = len(sets[0])
        raw_bytes = self.model.decoder.kv_bytes_per_token
        ones = [[k] for k in range(len(sets) * n, len(sets) * n + SETS)]
        rounds = []
        for _ in range(1 + FETCHES):  # the first one stores what the others fetch
            with self.open("measure", memory, disk) as engine:
                self._least(engine, sets[:1])
                rounds.append([self._least(engine, sets[1:]), self._least(engine, ones)])
        ttft = np.min(rounds[1:], axis=0)[:, :, 0]  # [sets or ones, first or again]
        fetch_s, one_s = (ttft[:, 0] - ttft[:, 1]).tolist()
        chunk_bytes = self._chunk_tokens * raw_bytes
        per_byte = max(1e-12, (fetch_s - one_s) / ((n - 1) * chunk_bytes) if n > 1 else 0.0)
        return {
            "node_rate": 1 / per_byte,
            "per_fetched": per_byte * raw_bytes,  # the server is on this machine: cores move all bytes
            "delay": max(0.0, one_s - per_byte * chunk_bytes),
        }, float(ttft[0, 1])

    def _least(self, engine: Engine, requests: Sequence[Sequence[int]]) -> NDArray[np.float64]:
        """The least TTFT and seconds after it [2, 2]: of requests the first time, and again from memory."""
        times = []
        for chunks in requests:
            for _ in range(2):
                answer, after = self.answer(engine, chunks)
                times.append((answer.timings.ttft, after))
                engine.fetcher.flush()  # background copies are written
        least: NDArray[np.float64] = np.min(np.reshape(times, (-1, 2, 2)), axis=0)
        return least


def configured(
    config: SimulateConfig,
    constants: Constants,
    shape: dict[str, int],
    chunk_tokens: int | None = None,
    chunks: int | None = None,
) -> SimulateConfig:
    """The settings with measured constants, the model's prompt shape, and chunks of another size or number."""
    measured = {**constants, **shape, "stored_bytes": shape["raw_bytes"], "answer_tokens": 1}
    parts = config.model_dump()
    for name in ("compute", "links", "requests"):
        parts[name] |= {field: value for field, value in measured.items() if field in parts[name]}
    parts["requests"]["chunks"] = chunks or config.requests.chunks
    parts["corpus"]["chunk_tokens"] = chunk_tokens or config.corpus.chunk_tokens
    return SimulateConfig(**parts)


def calibrate(config: SimulateConfig, url: str | None) -> str:
    """YAML: the settings with the constants of this machine, for the bundled model on one thread."""
    node = CalibratedNode(MODEL, pool_size(REQUEST_CHUNKS), CHUNK_TOKENS, url)
    constants = node.measure(REQUEST_CHUNKS, memory=10, disk=14)
    found = configured(config, constants, node.prompt_shape).model_dump(mode="json")
    header = f"# `blendserve simulate --measure`: {MODEL}, one thread, {machine()['cpu']}"
    return f"{header}\n{yaml.safe_dump(found, sort_keys=False)}"
