"""Chunks of one store copied into another: what brings the shards of several machines together."""

from __future__ import annotations

from blendserve.errors import CorruptBlob, CorruptRecord
from blendserve.store.base import KVStore, Progress, read_record


def merge(source: KVStore, into: KVStore, progress: Progress | None = None) -> tuple[int, int]:
    """Copy what `into` lacks, as it is coded and pinned as precompute would -> (copied, skipped because damaged).

    Blobs come first, so that no chunk is there without its tables. Raises StoreFull; what was copied stays.
    """
    damaged = _merge_blobs(source, into)
    keys = list(source.keys())
    there = into.contains(keys)
    keys = [key for key in keys if key not in there]
    copied = 0
    for done, key in enumerate(keys, start=1):
        try:
            record = read_record(source, key)
            copied += record is not None and into.put(key, record, pin=True)
        except CorruptRecord:
            damaged += 1
        if progress:
            progress(done, len(keys))
    return copied, damaged


def _merge_blobs(source: KVStore, into: KVStore) -> int:
    """Copy the blobs that `into` lacks; its own stay current -> how many were damaged."""
    there, damaged = {info.hash for info in into.blobs.list()}, 0
    for info in source.blobs.list():
        try:
            raw = None if info.hash in there else source.blobs.get(info.hash)
        except CorruptBlob:
            damaged += 1
            continue
        if raw is not None:
            into.blobs.put(info.kind, info.owner, raw, current=False)
    return damaged
