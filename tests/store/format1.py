"""Records as blendserve wrote them in format 1. Frozen: nothing here follows the package.

header   magic 4 | version 2 | dtype 1 | codec 1 | L 4 | K 4 | D 4 | C 4 | bytes of a layer 8
         | checksum of each layer 8 * L | checksum of the chunk's key and all of the above 8   little-endian
layer    keys [K, C, D], values [K, C, D], contiguous                            checksums are xxh3-64
"""

from __future__ import annotations

import struct
from pathlib import Path

import lmdb
import torch
import xxhash

from blendserve.core import ChunkKV

DTYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


def encode(key: bytes, kv: ChunkKV) -> tuple[bytes, list[bytes]]:
    """A chunk's header record and its layers'."""
    n_layers, n_kv_heads, n_tokens, head_dim = kv.keys.shape
    layers = [
        b"".join(part[l].contiguous().view(torch.uint8).numpy().tobytes() for part in (kv.keys, kv.values))
        for l in range(n_layers)
    ]
    sizes = (n_layers, n_kv_heads, head_dim, n_tokens, len(layers[0]))
    fields = struct.pack("<4sHBBIIIIQ", b"BSKV", 1, DTYPES[kv.keys.dtype], 0, *sizes)
    seeds = [xxhash.xxh3_64_intdigest(key + fields + struct.pack("<I", l)) for l in range(n_layers)]
    sums = [xxhash.xxh3_64_intdigest(raw, seed) for raw, seed in zip(layers, seeds, strict=True)]
    body = fields + struct.pack(f"<{n_layers}Q", *sums)
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(key + body)), layers


def entry(key: bytes, kv: ChunkKV, used: int = 1, pinned: bool = False) -> bytes:
    """A chunk's entry in the ledger."""
    body = struct.pack("<QQIB", used, kv.n_bytes, kv.n_tokens, pinned)
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(key + body))


def make_store(path: Path, chunks: dict[bytes, ChunkKV]) -> None:
    """An LMDB store of format 1, with one hit and one miss counted."""
    path.mkdir()
    with lmdb.open(str(path), map_size=1 << 28) as env, env.begin(write=True) as txn:
        mark = b"BLKV" + struct.pack("<H", 1)
        txn.put(b"m:format", mark + xxhash.xxh3_64_digest(mark))
        total = struct.pack("<Q", sum(kv.n_bytes for kv in chunks.values()))
        txn.put(b"m:bytes", total + struct.pack("<Q", xxhash.xxh3_64_intdigest(total)))
        for used, (key, kv) in enumerate(chunks.items(), start=1):
            header, layers = encode(key, kv)
            txn.put(b"h" + key, header)
            for l, raw in enumerate(layers):
                txn.put(b"l" + key + struct.pack(">H", l), raw)
            txn.put(b"u" + key, entry(key, kv, used))
            txn.put(b"o" + struct.pack(">Q", used) + key, b"")
        tag, counts = next(iter(chunks))[:8], struct.pack("<5Q", 1, 1, 0, 0, 0)
        txn.put(b"c" + tag, counts + struct.pack("<Q", xxhash.xxh3_64_intdigest(tag + counts)))
