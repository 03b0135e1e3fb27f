"""Methods over coded KV: what was stored as it was computed is coded by each codec that a method names.

    the run's store, uncoded -> encode -> a store in memory for each codec -> the method, which decodes as it loads

So all codecs see the same KV, which is computed once. `exact` has no reuse in it: the prompt's whole context is
prefilled, its KV before RoPE is coded and decoded chunk by chunk, and the question is run over that by full attention.
What it loses is the codec's own loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from blendserve.blend.blender import Blender
from blendserve.blend.chunk_kv import ChunkComputer
from blendserve.config import changed
from blendserve.core import ChunkKV, Prompt, TokenIds
from blendserve.engine.calibration import writing_codec
from blendserve.engine.engine import Engine
from blendserve.errors import ConfigError
from blendserve.evaluate.folder import Line
from blendserve.evaluate.methods import MethodSpec
from blendserve.models.adapter import Adapter
from blendserve.models.loader import Say
from blendserve.registry import CODECS
from blendserve.store import ChunkKey, ChunkRecord, KVStore, MemoryStore, read_record
from blendserve.store.codecs.base import ChunkShape, Codec
from blendserve.store.view import decode

_KEY = bytes(28)  # headers are as long under any key


@dataclass(frozen=True)
class CodedStore:
    """What one codec makes of the run's chunks."""

    codec: Codec
    store: KVStore

    def blender(self, raw: Blender, namespace: str) -> Blender:
        """As `raw`, over coded chunks."""
        made = raw.like(self.store, namespace)
        made.codec = self.codec
        return made

    def fill(self, source: KVStore, chunks: Mapping[ChunkKey, TokenIds], prefix: ChunkKey) -> None:
        """Code these chunks, and keep the prefix as it is. Those that are not in the source are passed over."""
        there = self.store.contains((prefix, *chunks))
        for key in (key for key in (prefix, *chunks) if key not in there):
            if (record := read_record(source, key)) is not None:
                coded = record if key == prefix else ChunkRecord.encode(key, decode(record), self.codec)
                self.store.put(key, coded, pin=True)

    def drop(self, keys: Iterable[ChunkKey]) -> None:
        self.store.delete(keys)

    def through(self, kv: ChunkKV) -> tuple[ChunkKV, Line]:
        """KV as it comes out of the codec, and what it takes meanwhile."""
        segments = self.codec.encode(kv)
        record = ChunkRecord.from_segments(_KEY, ChunkShape.of(kv), self.codec.coding, segments)
        return decode(record, self.store.blobs.get), size(record)


def coded_store(engine: Engine, word: str, say: Say = lambda text: None) -> CodedStore:
    """For the engine's reader; tables are the engine's store's, which keeps those that are fitted for it.

    Raises ConfigError where the engine's store is coded itself, TablesMissing.
    """
    if engine.config.store.codec != CODECS.default:
        raise ConfigError(
            f"methods that name a codec need uncoded KV to begin with: set store.codec to {CODECS.default}, "
            f"not {engine.config.store.codec}",
            setting="store.codec",
        )
    config = changed(engine.config, store=changed(engine.config.store, codec=word).model_dump())
    codec = writing_codec(config, engine.reader, engine.prompts, engine.store, say)
    store = MemoryStore(engine.config.store.cap_bytes)
    raw = engine.store.blobs.get(codec.coding.tables)
    if raw is not None:
        store.blobs.put(codec.coding.codec, engine.reader.fingerprint, raw)
    return CodedStore(codec, store)


def exact_context(adapter: Adapter, prompt: Prompt, by: CodedStore | None) -> tuple[Prompt, ChunkKV, Line]:
    """The prompt with all of its context as a prefix, that prefix's exact KV through a codec, and what it takes.

    Chunks are coded apart, as they are stored, and the prefix is not; by: None = as it was computed.
    """
    context = prompt.ids[: len(prompt) - len(prompt.suffix)]
    kv = ChunkComputer(adapter, ()).compute([context])[0]
    taken: Line = {}
    if by is not None:
        ends = [*(span.start for span in prompt.spans), len(context)]
        coded = [by.through(_span(kv, a, b)) for a, b in pairwise(ends) if b > a]
        parts = [_span(kv, 0, ends[0]), *(part for part, _ in coded)]
        kv = ChunkKV(*(torch.cat([getattr(part, x) for part in parts], dim=2) for x in ("keys", "values")))
        taken = summed(line for _, line in coded)
    return Prompt(context, (), prompt.suffix), kv, taken


def size(record: ChunkRecord) -> Line:
    """Bytes of a chunk's records, as stored and uncoded."""
    return {"bytes": record.n_bytes + len(record.header_bytes()), "raw_bytes": record.raw_bytes}


def summed(lines: Iterable[Line]) -> Line:
    """Of several chunks."""
    found = list(lines)
    return {name: sum(line[name] for line in found) for name in ("bytes", "raw_bytes")}


def sizes_of(by: CodedStore, keys: Iterable[ChunkKey]) -> Line:
    """Of these chunks in the codec's store."""
    return summed(size(record) for key in keys if (record := read_record(by.store, key)) is not None)


def needed(variants: Iterable[MethodSpec]) -> list[str]:
    """The codecs that methods name, each once."""
    return list(dict.fromkeys(v.codec for v in variants if v.codec is not None))


def _span(kv: ChunkKV, start: int, stop: int) -> ChunkKV:
    return ChunkKV(kv.keys[:, :, start:stop], kv.values[:, :, start:stop], ids=kv.ids[start:stop])
