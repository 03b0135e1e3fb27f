"""`blendserve bench store`: chunk KV into LMDB and out of it, checksums verified, from warm and cold pages.

A put is one transaction and waits for the disk. A get reads every layer of a chunk through the map and checks it; it
copies nothing. Only the shape of the model matters: its weights are not loaded, and the KV is noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from pydantic import Field

from blendserve.bench.fixture import SPARE_BYTES, scratch
from blendserve.bench.harness import Case, Column, Group, Metrics, SampleLog, ms, table
from blendserve.bench.page_cache import drop
from blendserve.bench.runner import Bench, BenchConfig
from blendserve.config import Positive
from blendserve.core import ChunkKV
from blendserve.models.loader import read_configuration
from blendserve.store import ChunkKey, ChunkRecord, KVStore, LMDBStore, chunk_key
from blendserve.store.codecs.raw import Raw
from blendserve.store.view import RecordView
from blendserve.threads import limit_torch
from blendserve.timing import Clock


class StoreConfig(BenchConfig):
    """Records of chunk KV, written and read."""

    chunks: Positive = Field(24, description="Number of chunks to write and read.")
    chunk_tokens: Positive = Field(512, description="Length of a chunk, in tokens.")


def groups(config: StoreConfig, log: SampleLog) -> Iterator[Group]:
    labels = {"chunks": config.chunks, "chunk_tokens": config.chunk_tokens}
    if log.done(labels):
        return
    limit_torch(config.threads)
    chunk = noise(config)
    keys = [chunk_key("bench", (), (n,), str(chunk.keys.dtype), "") for n in range(config.chunks)]
    n_bytes = chunk.n_bytes * len(keys)
    records = len(keys) * (chunk.keys.shape[0] + 1)  # a header and the layers of each chunk
    with scratch(config.folder) as folder:
        _filled(folder / "read", keys, chunk)
        trouble = drop(folder / "read" / "data.mdb")
        cases = [
            Case({"operation": "put"}, partial(_put, config.folder, keys, chunk)),
            Case({"operation": "get"}, partial(_get, folder / "read", keys, n_bytes, warm=True)),
        ]
        if not trouble:
            cold = partial(_get, folder / "read", keys, n_bytes, warm=False)
            cases.append(Case({"operation": "get_cold"}, cold, partial(drop, folder / "read" / "data.mdb")))
        facts = {"bytes": n_bytes, "records": records, "no_cold_reads": trouble or "measured"}
        yield Group(labels, cases, facts)


def noise(config: StoreConfig) -> ChunkKV:
    """A chunk in the shape of the model's KV. Raises ModelError."""
    shape, dtype = read_configuration(config.reader)
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    size = (shape.num_hidden_layers, shape.num_key_value_heads, config.chunk_tokens, head_dim)
    generator = torch.Generator().manual_seed(config.seed)
    keys, values = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
    return ChunkKV(keys, values)


def _put(parent: Path | None, keys: list[ChunkKey], chunk: ChunkKV) -> Metrics:
    """Into a new store, the last commit included."""
    with scratch(parent) as folder:
        return _rate(chunk.n_bytes * len(keys), lambda: _filled(folder, keys, chunk))


def _filled(folder: Path, keys: list[ChunkKey], chunk: ChunkKV) -> float:
    """-> seconds of the puts alone"""
    with LMDBStore(folder, chunk.n_bytes * len(keys) + SPARE_BYTES) as store:
        clock, codec = Clock(), Raw()
        for key in keys:
            store.put(key, ChunkRecord.encode(key, chunk, codec), pin=True)
        return clock.elapsed()


def _get(folder: Path, keys: list[ChunkKey], n_bytes: int, warm: bool) -> Metrics:
    with LMDBStore(folder, n_bytes + SPARE_BYTES) as store:
        if warm:
            _read(store, keys)  # maps the pages
        return _rate(n_bytes, lambda: _read(store, keys))


def _read(store: KVStore, keys: list[ChunkKey]) -> float:
    """Every layer of every chunk, checked -> seconds."""
    clock = Clock()
    with store.snapshot() as snapshot:
        for key in keys:
            record = snapshot.get(key)
            assert record is not None
            view = RecordView(record)
            for l in range(view.n_layers):
                view.layer(l)
    return clock.elapsed()


def _rate(n_bytes: int, call: Callable[[], float]) -> Metrics:
    seconds = call()
    return {"time_s": seconds, "gb_per_s": n_bytes / seconds / 1e9}


TABLE = table("Store", ms("ms", "time_s"), Column("GB/s", "gb_per_s"))
BENCH = Bench(StoreConfig, groups, (TABLE,), tiny={"chunk_tokens": 64})
