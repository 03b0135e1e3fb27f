"""Methods over a store that holds earlier revisions of a prompt's passages in place of them: near-duplicates at work.

    passages -> edits.py -> what they were -> chunks -> a store in memory for each kind of edit -> the method, blend.near

Chunks that an edit left alone are there as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from blendserve.blend.blender import Blender
from blendserve.core import TokenIds
from blendserve.engine.engine import Engine
from blendserve.store import ChunkKey, MemoryStore, read_record


def revised_blender(engine: Engine, like: Blender, chunks: Sequence[TokenIds], prefix: ChunkKey) -> Blender:
    """As `like`, over a store of these chunks and the prefix alone, which knows what has text in common with others."""
    store = engine.config.store
    made = like.like(MemoryStore(store.cap_bytes), store.namespace)
    for key in (prefix, *(like.key(ids) for ids in chunks)):
        if (record := read_record(engine.store, key)) is not None:
            made.store.put(key, record, pin=True)
    made.precompute(chunks)
    made.near.refresh()
    return made
