"""Chunks of one store copied into another: what brings the shards of several machines together."""

from __future__ import annotations

from collections.abc import Callable

from blendserve.errors import CorruptRecord
from blendserve.store.base import KVStore
from blendserve.store.codecs.base import Undecodable


def merge(
    source: KVStore, into: KVStore, progress: Callable[[int, int], None] | None = None
) -> tuple[int, int]:
    """Copy what `into` lacks, as it is coded and pinned as precompute would -> (copied, skipped because damaged).

    Tables of codecs come first, so that at no time a chunk is there without them. Raises StoreFull; what was copied
    stays.
    """
    damaged = _merge_tables(source, into)
    keys = list(source.keys())
    there = into.present(keys)
    keys = [key for key in keys if key not in there]
    copied = 0
    for done, key in enumerate(keys, start=1):
        try:
            coded = source.coded(key)
            copied += coded is not None and into.put_coded(key, coded, pin=True)
        except CorruptRecord:
            damaged += 1
        if progress:
            progress(done, len(keys))
    return copied, damaged


def _merge_tables(source: KVStore, into: KVStore) -> int:
    """Copy the tables that `into` lacks; its own stay current -> how many were damaged."""
    there, damaged = {info.hash for info in into.all_tables()}, 0
    for info in source.all_tables():
        try:
            raw = None if info.hash in there else source.tables(info.hash)
        except Undecodable:
            damaged += 1
            continue
        if raw is not None:
            into.put_tables(info.codec, info.fingerprint, raw, current=False)
    return damaged
