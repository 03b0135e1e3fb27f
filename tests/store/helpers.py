"""Chunks to store, and how to look at them again."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import lmdb
import torch

from blendserve.core import ChunkKV
from blendserve.store import KVStore, LMDBStore, TieredStore, chunk_key
from blendserve.store.policies import Admission, Always
from blendserve.store.tiers import Tier

CAP = 10_000_000
BIG = 300  # tokens: a layer of 19,200 bytes, so on pages of its own

Change = Callable[[lmdb.Transaction], object]


def tiered(
    store: KVStore, admission: Admission | None = None, caps: tuple[int, ...] = (2_000, 9_000)
) -> KVStore:
    """The store behind two small tiers."""

    def copy(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return pair[0].clone(), pair[1].clone()

    tiers = [Tier(f"tier{n}", cap, admission or Always(), copy) for n, cap in enumerate(caps)]
    return TieredStore(store, tiers)


def key_of(n: int, namespace: str = "") -> bytes:
    return chunk_key("model", (1, 2), (n,), "float32", namespace)


def chunk(
    tokens: int = 5,
    layers: int = 3,
    kv_heads: int = 2,
    head_dim: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> ChunkKV:
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, kv_heads, tokens, head_dim)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return ChunkKV(keys, values)


def read(store: KVStore, key: bytes) -> ChunkKV | None:
    """A copy of the stored chunk."""
    with store.reading() as snapshot:
        view = snapshot.get(key)
        if view is None:
            return None
        layers = [[part.clone() for part in view.layer(l)] for l in range(view.n_layers)]
        keys, values = (torch.stack(parts) for parts in zip(*layers, strict=True))
        return ChunkKV(keys, values)


def same(a: ChunkKV | None, b: ChunkKV) -> bool:
    """Equal bit for bit, NaNs included."""
    if a is None or a.keys.dtype != b.keys.dtype or a.keys.shape != b.keys.shape:
        return False
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in ((a.keys, b.keys), (a.values, b.values))
    )


def filled(path: Path, n: int = 3) -> None:
    with LMDBStore(path, CAP) as store:
        for i in range(n):
            store.put(key_of(i), chunk(BIG, seed=i))


def tamper(path: Path, change: Change) -> None:
    """Change the closed store behind its back."""
    with lmdb.open(str(path), map_size=0) as env, env.begin(write=True) as txn:
        change(txn)


def header_name(n: int) -> bytes:
    return b"h" + key_of(n)


def layer_name(n: int, l: int) -> bytes:
    return b"l" + key_of(n) + struct.pack(">H", l)


def flip(name: bytes, at: int) -> Change:
    def change(txn: lmdb.Transaction) -> None:
        raw = bytearray(txn.get(name) or b"")
        raw[at] ^= 4
        txn.put(name, bytes(raw))

    return change
