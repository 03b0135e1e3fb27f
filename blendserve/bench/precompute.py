"""`blendserve bench precompute`: chunk KV into LMDB, writes included, against plain prefill of the same chunks.

transformers runs each chunk alone, as a user's loop would, and stores nothing. blendserve computes it after the prefix,
writes it and waits for the disk; the prefix's own KV costs time and is not among the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from blendserve.bench.fixture import SPARE_BYTES, forward, make_blender, scratch
from blendserve.bench.harness import Case, Column, Group, Metrics, SampleLog, ratio, table
from blendserve.bench.runner import Bench, BenchConfig, open_model
from blendserve.bench.workload import make_workload
from blendserve.config import Positive
from blendserve.store import LMDBStore
from blendserve.timing import Clock


class PrecomputeConfig(BenchConfig):
    """Chunks into a store."""

    chunks: Positive = Field(12, description="Number of chunks to store.")
    chunk_tokens: Positive = Field(512, description="Length of a chunk, in tokens.")


def groups(config: PrecomputeConfig, log: SampleLog) -> Iterator[Group]:
    model = open_model(config, log)
    workload = make_workload(model, config.chunks, config.chunk_tokens, None, config.seed)
    chunks = workload.chunks
    device = model.decoder.device
    n_tokens = sum(map(len, chunks))
    n_bytes = n_tokens * model.decoder.kv_bytes_per_token

    def transformers() -> Metrics:
        clock = Clock(device)
        for ids in chunks:
            forward(model.decoder, ids)
        return {"tokens_per_s": n_tokens / clock.elapsed()}

    def blendserve() -> Metrics:
        with scratch(config.folder) as folder, LMDBStore(folder, n_bytes + SPARE_BYTES) as store:
            blender = make_blender(model, workload.prompts, store)
            clock = Clock(device)
            blender.writer.precompute(chunks)
            return {"tokens_per_s": n_tokens / clock.elapsed()}

    cases = [Case({"engine": run.__name__}, run) for run in (transformers, blendserve)]
    labels = {"chunks": config.chunks, "chunk_tokens": config.chunk_tokens}
    yield Group(labels, cases, lambda: {"bytes_stored": n_bytes})


SPEEDUP = ratio("x transformers", "tokens_per_s", engine="transformers")  # of rates
TABLE = table("Precompute", Column("tokens/s", "tokens_per_s", digits=0), SPEEDUP)
BENCH = Bench(PrecomputeConfig, groups, (TABLE,), tiny={"chunks": 5, "chunk_tokens": 30})
