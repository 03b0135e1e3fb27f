"""`blendserve bench store`: chunk KV into LMDB and out of it, checksums verified, from warm and cold pages.

A put is one transaction and waits for the disk. A get reads every layer of a chunk through the map and checks it; it
copies nothing. Only the shape of the model matters: its weights are not loaded, and the KV is noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from pydantic import Field

from blendserve.bench.fixture import SPARE_BYTES, scratch
from blendserve.bench.harness import Case, Column, Group, Metrics, SampleLog, ms, table
from blendserve.bench.page_cache import drop
from blendserve.bench.runner import Bench, BenchConfig
from blendserve.config import Positive
from blendserve.kv import ChunkKV
from blendserve.models.loader import read_configuration
from blendserve.store import ChunkKey, ChunkRecord, KVStore, LMDBStore, chunk_key
from blendserve.store.codecs.raw import Raw
from blendserve.store.view import RecordView
from blendserve.threads import limit_torch
from blendserve.timing import Clock


class StoreBenchConfig(BenchConfig):
    """Records of chunk KV, written and read."""

    chunks: Positive = Field(24, description="Number of chunks to write and read.")
    chunk_tokens: Positive = Field(512, description="Length of a chunk, in tokens.")


def groups(config: StoreBenchConfig, log: SampleLog) -> Iterator[Group]:
    limit_torch(config.threads)
    chunk = noise(config)
    keys = [chunk_key("bench", (), (n,), str(chunk.keys[0].dtype), "") for n in range(config.chunks)]
    n_bytes = chunk.n_bytes * len(keys)
    n_records = len(keys) * (chunk.n_layers + 1)  # a header and the layers of each chunk

    def put(folder: Path) -> Metrics:
        with LMDBStore(folder, n_bytes + SPARE_BYTES) as store:
            clock = Clock()
            codec = Raw()
            for key in keys:
                store.put(key, ChunkRecord.encode(key, chunk, codec), pin=True)
            return _rate(n_bytes, clock)

    def put_into_new() -> Metrics:
        with scratch(config.folder) as folder:
            return put(folder)

    def get(warm_up: bool) -> Metrics:
        with LMDBStore(file.parent, n_bytes + SPARE_BYTES) as store:
            for _ in range(warm_up):
                _read(store, keys)  # maps the pages
            clock = Clock()
            _read(store, keys)
            return _rate(n_bytes, clock)

    with scratch(config.folder) as folder:
        file = folder / "read" / "data.mdb"
        put(file.parent)
        trouble = drop(file)
        cases = [
            Case({"operation": "put"}, put_into_new),
            Case({"operation": "get"}, partial(get, warm_up=True)),
        ]
        if not trouble:
            cases.append(Case({"operation": "get_cold"}, partial(get, warm_up=False), partial(drop, file)))
        facts = {"bytes": n_bytes, "records": n_records, "no_cold_reads": trouble or "measured"}
        labels = {"chunks": config.chunks, "chunk_tokens": config.chunk_tokens}
        yield Group(labels, cases, lambda: facts)


def noise(config: StoreBenchConfig) -> ChunkKV:
    """A chunk in the shape of the model's KV. Raises ModelError."""
    shape, dtype = read_configuration(config.model_settings)
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    size = (shape.num_hidden_layers, shape.num_key_value_heads, config.chunk_tokens, head_dim)
    generator = torch.Generator().manual_seed(config.seed)
    keys, values = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
    return ChunkKV(keys, values)


def _read(store: KVStore, keys: list[ChunkKey]) -> None:
    """Every layer of every chunk, with its checksum."""
    with store.snapshot() as snapshot:
        for key in keys:
            record = snapshot.get(key)
            assert record is not None
            view = RecordView(record)
            for l in range(view.n_layers):
                view.layer(l)


def _rate(n_bytes: int, clock: Clock) -> Metrics:
    seconds = clock.elapsed()
    return {"time_s": seconds, "gb_per_s": n_bytes / seconds / 1e9}


TABLE = table("Store", ms("ms", "time_s"), Column("GB/s", "gb_per_s"))
BENCH = Bench(StoreBenchConfig, groups, (TABLE,), tiny={"chunk_tokens": 64})
