"""`blendserve bench store`: chunk KV into LMDB and out of it, checksums verified, from warm and cold pages.

A put is one transaction, with its wait for the disk. A get reads every layer of a chunk through the map and checks it; it
copies nothing. Only the reader's shape matters, so its weights are not loaded and the KV is noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from blendserve.bench.config import StoreBenchConfig
from blendserve.bench.figures import Figures, Update, spread
from blendserve.bench.harness import SPARE_BYTES, scratch
from blendserve.bench.machine import where
from blendserve.bench.pagecache import drop
from blendserve.config import ReaderConfig
from blendserve.core import ChunkKV
from blendserve.models.loader import read_configuration
from blendserve.store import ChunkKey, KVStore, LMDBStore, chunk_key
from blendserve.threads import limit_torch
from blendserve.timing import Clock

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a reader's KV looks like."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, reader: ReaderConfig, say: Say = lambda text: None) -> KVShape:
        """Raises ModelError."""
        config, dtype = read_configuration(reader, say)
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(config.num_hidden_layers, config.num_key_value_heads, dim, dtype)


def measure(
    config: StoreBenchConfig, say: Say = lambda text: None, update: Update = lambda done, total: None
) -> Figures:
    """Everything that the bench prints. Raises InputError, ModelError, StoreError."""
    limit_torch(config.threads)
    shape = KVShape.of(config.reader, say)
    chunk = noise(shape, config.chunk_tokens, config.seed)
    keys = [chunk_key("bench", (), (n,), str(shape.dtype), "") for n in range(config.chunks)]
    payload = chunk.n_bytes * len(keys)
    seconds: dict[str, list[float]] = {"put": [], "get": [], "get_cold": []}
    trouble = ""
    for done in range(config.repeats + 1):  # the first round is for warmth
        with scratch(config.folder) as folder:
            took, trouble = _round(folder, keys, chunk, payload)
        for name, value in took.items() if done else ():
            seconds[name].append(value)
        update(done + 1, config.repeats + 1)
    records = len(keys) * (shape.n_layers + 1)
    return {
        "bench": "store",
        **where(config),
        "shape": {"layers": shape.n_layers, "kv_heads": shape.n_kv_heads, "head_dim": shape.head_dim},
        "chunks": len(keys),
        "bytes": payload,
        "records": records,  # a header and the layers of each chunk
        "gigabytes_per_second": {n: spread([payload / s / 1e9 for s in v]) for n, v in seconds.items() if v},
        "records_per_second": {n: spread([records / s for s in v]) for n, v in seconds.items() if v},
        "cold": {"done": not trouble, "why": trouble},
    }


def noise(shape: KVShape, tokens: int, seed: int) -> ChunkKV:
    """KV that nobody computed."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.n_layers, shape.n_kv_heads, tokens, shape.head_dim)
    keys, values = (torch.randn(size, generator=generator).to(shape.dtype) for _ in range(2))
    return ChunkKV(keys, values)


def put_all(store: KVStore, keys: list[ChunkKey], chunk: ChunkKV) -> float:
    """-> seconds, the last commit included."""
    clock = Clock()
    for key in keys:
        store.put(key, chunk, pin=True)
    return clock.elapsed()


def get_all(store: KVStore, keys: list[ChunkKey]) -> float:
    """Every layer of every chunk, checked -> seconds."""
    clock = Clock()
    with store.reading() as snapshot:
        for key in keys:
            view = snapshot.get(key)
            assert view is not None
            for l in range(view.n_layers):
                view.layer(l)
    return clock.elapsed()


def _round(folder: Path, keys: list[ChunkKey], chunk: ChunkKV, payload: int) -> tuple[dict[str, float], str]:
    """Seconds of putting all, getting all warm and, if that can be done, cold; else why it cannot."""
    with LMDBStore(folder, payload + SPARE_BYTES) as store:
        took = {"put": put_all(store, keys, chunk)}
        get_all(store, keys)  # maps the pages
        took["get"] = get_all(store, keys)
    trouble = drop(folder / "data.mdb")
    if not trouble:
        with LMDBStore(folder, payload + SPARE_BYTES) as store:
            took["get_cold"] = get_all(store, keys)
    return took, trouble
