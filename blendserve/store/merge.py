"""Copies the chunks of one store into another, such as the shards that several machines precomputed."""

from __future__ import annotations

from blendserve.errors import CorruptBlob, CorruptRecord
from blendserve.store.base import KVStore, Progress, read_record


def merge(source: KVStore, into: KVStore, progress: Progress | None = None) -> tuple[int, int]:
    """Copy the records that `into` lacks, pinned as precompute pins them -> (copied, skipped because damaged).

    Blobs are copied first, so that no chunk lacks its tables. Raises StoreFull; copied chunks stay.
    """
    copied = 0
    damaged = _merge_blobs(source, into)
    keys = list(source.keys())
    present = into.contains(keys)
    keys = [key for key in keys if key not in present]
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
    """Copy the blobs that `into` lacks; its own stay current -> number of damaged ones."""
    present = {info.hash for info in into.blobs.list()}
    damaged = 0
    for info in source.blobs.list():
        try:
            if info.hash not in present and (raw := source.blobs.get(info.hash)) is not None:
                into.blobs.put(info.kind, info.owner, raw, current=False)
        except CorruptBlob:
            damaged += 1
    return damaged
