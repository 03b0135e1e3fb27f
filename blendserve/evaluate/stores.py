"""The KV that the methods read for one prompt: raw, through codecs, and of the passages before an edit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from blendserve.blend.blender import Blender
from blendserve.config import KVContext, PromptConfig, changed
from blendserve.core import ChunkKV, Prompt, TokenIds
from blendserve.engine.engine import Engine
from blendserve.engine.prompt import PromptBuilder
from blendserve.evaluate.coded import Sizes, coded_store, exact_context
from blendserve.evaluate.methods import MethodSpec
from blendserve.store import ChunkKey, MemoryStore, read_record

PreviousChunks = Callable[[str], Sequence[TokenIds]]
"""kind of edit -> the chunks before it"""


class PromptStores:
    """Blenders for the methods of a run, over the stores of one prompt at a time."""

    def __init__(self, engine: Engine, methods: Sequence[MethodSpec], evicts: bool) -> None:
        """evicts: chunks of finished prompts may leave the engine's store. Raises ConfigError, TablesMissing."""
        self._engine, self._evicts = engine, evicts
        self._namespace = engine.config.store.namespace
        self.raw = {context: self._blender(context) for context in {m.kv_context for m in methods}}
        self._coded = {
            codec: coded_store(engine, codec) for codec in dict.fromkeys(m.codec for m in methods) if codec
        }
        self._over_coded: dict[tuple[KVContext | None, str], Blender] = {}
        self._edited: dict[tuple[KVContext | None, str], Blender] = {}

    def blender(self, method: MethodSpec) -> Blender:
        """The blender over the method's KV; of an edit, within `holding`."""
        raw = self.raw[method.kv_context]
        if method.edit is not None:
            return self._edited[method.kv_context, method.edit]
        if method.codec is None:
            return raw
        key = method.kv_context, method.codec
        if key not in self._over_coded:
            self._over_coded[key] = self._coded[method.codec].blender(raw, self._namespace)
        return self._over_coded[key]

    def sizes(self, method: MethodSpec, prompt: Prompt) -> Sizes:
        """Bytes of the prompt's chunks in the method's codec, coded and uncoded; empty without a codec."""
        if method.codec is None:
            return {}
        raw = self.raw[method.kv_context]
        return self._coded[method.codec].sizes(raw.key(chunk.ids) for chunk in prompt.chunks if len(chunk))

    def exact_context(self, method: MethodSpec, prompt: Prompt) -> tuple[Prompt, ChunkKV, Sizes]:
        """For method `exact`: the prompt with its context as prefix, the prefix's KV, and the chunks' size."""
        coded = self._coded[method.codec] if method.codec else None
        return exact_context(self._engine.reader.adapter, prompt, coded)

    @contextmanager
    def holding(
        self, prompt: Prompt, methods: Sequence[MethodSpec], previous: PreviousChunks
    ) -> Iterator[None]:
        """Compute and store the prompt's KV in every form that the methods read, and keep it in the block."""
        chunks, keys = [chunk.ids for chunk in prompt.chunks], dict[ChunkKey, TokenIds]()
        store = self._engine.store
        try:
            for context in dict.fromkeys(m.kv_context for m in methods):
                keys |= {self.raw[context].key(ids): ids for ids in chunks if ids}
                self.raw[context].writer.precompute(chunks)
            for coded in self._coded.values():
                coded.fill(store, keys)
            for context, edit in dict.fromkeys((m.kv_context, m.edit) for m in methods):
                if edit:
                    self._edited[context, edit] = self._before_edit(context, previous(edit))
            yield
        finally:
            self._edited.clear()
            for coded in self._coded.values():
                coded.drop(keys)
            if self._evicts:
                store.pin(keys, pinned=False)

    def _before_edit(self, context: KVContext | None, chunks: Sequence[TokenIds]) -> Blender:
        """A blender over a store in memory with these chunks, and an index of near-duplicates."""
        raw = self.raw[context]
        made = raw.over(MemoryStore(self._engine.config.store.cap_bytes), self._namespace)
        for key in map(raw.key, chunks):
            if (record := read_record(self._engine.store, key)) is not None:
                made.store.put(key, record, pin=True)
        made.writer.precompute(chunks)
        made.near.refresh()
        return made

    def _blender(self, context: KVContext | None) -> Blender:
        """The engine's own, or one over the same store with another KV context."""
        engine = self._engine
        if context is None:
            return engine.blender
        prompt: PromptConfig = changed(engine.config.prompt, kv_context=context)
        before = PromptBuilder(engine.reader.tokenizer, prompt).kv_context
        about = engine.reader.adapter, engine.reader.fingerprint, engine.store, engine.prompts.prefix, before
        return Blender(*about, self._namespace)
