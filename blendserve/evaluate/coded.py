"""KV through a codec: a copy of the run's raw chunks in memory for each codec that a method names.

All codecs see the same KV, which is computed once. Method `exact` reuses nothing: the whole context is prefilled, its KV
before RoPE is coded and decoded chunk by chunk, and the question attends to all of it. Its loss is the codec's alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch

from blendserve.blend.blender import Blender
from blendserve.blend.chunk_kv import ChunkComputer
from blendserve.core import ChunkKV, Prompt
from blendserve.engine.codec_fit import writing_codec
from blendserve.engine.engine import Engine
from blendserve.errors import ConfigError
from blendserve.models.model import DecoderModel
from blendserve.registry import CODECS
from blendserve.store import ChunkKey, ChunkRecord, KVStore, MemoryStore, read_record
from blendserve.store.codecs.base import ChunkShape, Codec
from blendserve.store.view import decode

Sizes = dict[str, int]

_KEY = bytes(28)  # a header's length does not depend on its key


@dataclass(frozen=True)
class CodedStore:
    """The run's chunks in one codec."""

    codec: Codec
    store: KVStore

    def blender(self, raw: Blender, namespace: str) -> Blender:
        """A blender like `raw` over the coded chunks."""
        made = raw.over(self.store, namespace)
        made.writer.codec = self.codec
        return made

    def fill(self, source: KVStore, chunks: Iterable[ChunkKey]) -> None:
        """Code the chunks of the source. Missing chunks are skipped."""
        keys = list(chunks)
        known = self.store.contains(keys)
        for key in (key for key in keys if key not in known):
            if (record := read_record(source, key)) is not None:
                self.store.put(key, ChunkRecord.encode(key, decode(record), self.codec), pin=True)

    def drop(self, keys: Iterable[ChunkKey]) -> None:
        """Delete these chunks."""
        self.store.delete(keys)

    def sizes(self, keys: Iterable[ChunkKey]) -> Sizes:
        """Bytes of these chunks' records, coded and uncoded."""
        records = (read_record(self.store, key) for key in keys)
        return total_size(size(record) for record in records if record is not None)

    def round_trip(self, kv: ChunkKV) -> tuple[ChunkKV, Sizes]:
        """KV encoded and decoded, and its size."""
        segments = self.codec.encode(kv)
        record = ChunkRecord.from_segments(_KEY, ChunkShape.of(kv), self.codec.coding, segments)
        return decode(record, self.store.blobs.get), size(record)


def coded_store(engine: Engine, word: str) -> CodedStore:
    """The store of a codec (as in `store.codec`), with the tables that the engine's store has for its model.

    Raises ConfigError where the engine's store is coded itself, TablesMissing.
    """
    if engine.config.store.codec != CODECS.default:
        raise ConfigError(
            f"methods that name a codec need uncoded KV in the store: set store.codec to {CODECS.default}, "
            f"not {engine.config.store.codec}",
            setting="store.codec",
        )
    config = engine.config.replace("store.codec", word)
    codec = writing_codec(config, engine.reader, engine.prompts, engine.store)
    store = MemoryStore(engine.config.store.cap_bytes)
    if (raw := engine.store.blobs.get(codec.coding.tables)) is not None:
        store.blobs.put(codec.coding.codec, engine.reader.fingerprint, raw)
    return CodedStore(codec, store)


def exact_context(
    adapter: DecoderModel, prompt: Prompt, coded: CodedStore | None
) -> tuple[Prompt, ChunkKV, Sizes]:
    """The prompt with its whole context as prefix, that prefix's exact KV, and the chunks' size.

    The chunks go through the codec one by one, the prompt's own prefix does not. coded: None = no codec.
    """
    context = prompt.ids[: len(prompt) - len(prompt.suffix)]
    kv = ChunkComputer(adapter, ()).compute([context])[0]
    sizes: Sizes = {}
    if coded is not None:
        ends = [*(span.start for span in prompt.spans), len(context)]
        decoded = [coded.round_trip(_span(kv, a, b)) for a, b in pairwise(ends) if b > a]
        parts = [_span(kv, 0, ends[0]), *(part for part, _ in decoded)]
        kv = ChunkKV(*(torch.cat([getattr(part, x) for part in parts], dim=2) for x in ("keys", "values")))
        sizes = total_size(size for _, size in decoded)
    return Prompt(context, (), prompt.suffix), kv, sizes


def size(record: ChunkRecord) -> Sizes:
    """Bytes of a chunk's record, header included, and of its uncoded KV."""
    return {"bytes": record.n_bytes + len(record.header_bytes()), "raw_bytes": record.raw_bytes}


def total_size(sizes: Iterable[Sizes]) -> Sizes:
    """The sums."""
    found = list(sizes)
    return {name: sum(size[name] for size in found) for name in ("bytes", "raw_bytes")}


def _span(kv: ChunkKV, start: int, stop: int) -> ChunkKV:
    return ChunkKV(kv.keys[:, :, start:stop], kv.values[:, :, start:stop], ids=kv.ids[start:stop])
