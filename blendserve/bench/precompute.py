"""`blendserve bench precompute`: chunk KV into LMDB, writes included, against plain prefill of the same chunks.

transformers runs each chunk alone, as a user's loop would, and stores nothing. blendserve computes it after the prefix,
writes it and waits for the disk; the prefix's own KV costs time and is not among the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from pydantic import Field

from blendserve.bench.fixture import SPARE_BYTES, forward, make_blender, scratch
from blendserve.bench.harness import Case, Column, Group, Metrics, SampleLog, ratio, table
from blendserve.bench.runner import Bench, BenchConfig, open_reader
from blendserve.bench.workload import Workload, make_workload
from blendserve.config import Positive
from blendserve.core import TokenIds
from blendserve.models.loader import LoadedModel
from blendserve.store import LMDBStore
from blendserve.timing import Clock


class PrecomputeConfig(BenchConfig):
    """Chunks into a store."""

    chunks: Positive = Field(12, description="Number of chunks to store.")
    chunk_tokens: Positive = Field(512, description="Length of a chunk, in tokens.")
    repeats: Positive = Field(3, description="Number of measured rounds.")


def groups(config: PrecomputeConfig, log: SampleLog) -> Iterator[Group]:
    labels = {"chunks": config.chunks, "chunk_tokens": config.chunk_tokens}
    if log.done(labels):
        return
    reader = open_reader(config, log)
    workload = make_workload(reader, config.chunks, config.chunk_tokens, None, config.seed)
    chunks = workload.chunks
    cases = [
        Case({"engine": "transformers"}, partial(_plain, reader, chunks)),
        Case({"engine": "blendserve"}, partial(_precompute, reader, workload, config)),
    ]
    n_bytes = sum(map(len, chunks)) * reader.adapter.kv_bytes_per_token
    yield Group(labels, cases, {"bytes_stored": n_bytes})


def _plain(reader: LoadedModel, chunks: Sequence[TokenIds]) -> Metrics:
    """The model's own forward over one chunk after another."""
    clock = Clock(reader.adapter.device)
    for ids in chunks:
        forward(reader.adapter, ids)
    return {"tokens_per_s": sum(map(len, chunks)) / clock.elapsed()}


def _precompute(reader: LoadedModel, workload: Workload, config: PrecomputeConfig) -> Metrics:
    """Into a new store, from the first token to the last commit."""
    chunks = workload.chunks
    n_bytes = sum(map(len, chunks)) * reader.adapter.kv_bytes_per_token
    with scratch(config.folder) as folder, LMDBStore(folder, n_bytes + SPARE_BYTES) as store:
        blender = make_blender(reader, workload.prompts, store)
        clock = Clock(reader.adapter.device)
        blender.writer.precompute(chunks)
        return {"tokens_per_s": sum(map(len, chunks)) / clock.elapsed()}


SPEEDUP = ratio("x transformers", "tokens_per_s", engine="transformers")  # of rates
TABLE = table("Precompute", Column("tokens/s", "tokens_per_s", digits=0), SPEEDUP)
BENCH = Bench(PrecomputeConfig, groups, (TABLE,), tiny={"chunks": 5, "chunk_tokens": 30})
