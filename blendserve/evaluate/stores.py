"""The KV that the methods read for one prompt: raw, through codecs, and of the passages before an edit.

All codecs see the same KV, which is computed once. Method `exact` reuses nothing: the whole context is prefilled, its KV
before RoPE is coded and decoded chunk by chunk, and the question attends to all of it. Its loss is the codec's alone.

Correction priors are fitted as `precompute` fits them, and kept in the folder of the run, so that a resumed run uses the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from blendserve import console
from blendserve.blend.blender import Blender
from blendserve.blend.chunk_kv import ChunkComputer
from blendserve.blend.priors import Priors
from blendserve.config import KVContext
from blendserve.core import Prompt, TokenIds
from blendserve.engine.codec_fit import writing_codec
from blendserve.engine.engine import Engine
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import ConfigError
from blendserve.evaluate.methods import OWN_CONTEXT, MethodSpec
from blendserve.evaluate.run_dir import RunDir
from blendserve.kv import ChunkKV
from blendserve.registry import CODECS, CORRECTIONS
from blendserve.store import ChunkKey, ChunkRecord, KVStore, MemoryStore, read_record
from blendserve.store.codecs.base import Codec
from blendserve.store.view import decode

Sizes = dict[str, int]

_KEY = bytes(28)  # a header's length does not depend on its key


def codec_for(engine: Engine, word: str) -> Codec:
    """A codec (as in `store.codec`), with the tables that the engine's store has for its model.

    Raises ConfigError where the engine's store is coded itself, TablesMissing.
    """
    if engine.config.store.codec != CODECS.default:
        raise ConfigError(
            f"methods that name a codec need uncoded KV in the store: set store.codec to {CODECS.default}, "
            f"not {engine.config.store.codec}",
            setting="store.codec",
        )
    config = engine.config.replace("store.codec", word)
    return writing_codec(config, engine.model, engine.prompts, engine.store)


def coded_copy(engine: Engine, codec: Codec | None, keys: Iterable[ChunkKey]) -> KVStore:
    """A store in memory with these chunks of the engine's, coded; as they are without a codec. Misses are skipped."""
    store = MemoryStore(engine.config.store.cap_bytes)
    if codec and (tables := engine.store.blobs.get(codec.coding.tables)) is not None:
        store.blobs.put(codec.coding.codec, engine.model.fingerprint, tables)
    for key in keys:
        if (record := read_record(engine.store, key)) is not None:
            coded = ChunkRecord.encode(key, decode(record), codec) if codec else record
            store.put(key, coded, pin=True)
    return store


def sizes_of(records: Iterable[ChunkRecord | None]) -> Sizes:
    """Bytes of records, headers included, and of their uncoded KV."""
    found = [record for record in records if record is not None]
    n_bytes = sum(record.n_bytes + len(record.header_bytes()) for record in found)
    return {"bytes": n_bytes, "raw_bytes": sum(record.raw_bytes for record in found)}


class PromptStores:
    """Blenders for the methods of a run, over the stores of one prompt at a time."""

    def __init__(
        self, engine: Engine, methods: Sequence[MethodSpec], evicts: bool, is_plain: bool = False
    ) -> None:
        """evicts: chunks of finished prompts may leave the engine's store. is_plain: prompts are plain ones.

        Raises ConfigError, TablesMissing.
        """
        self._engine = engine
        self._methods = methods
        self._evicts = evicts
        self._is_plain = is_plain
        self._raw = {context: self._over_context(context) for context in {m.kv_context for m in methods}}
        self._codecs = {word: codec_for(engine, word) for word in {m.codec for m in methods} if word}
        self._made: dict[tuple[str | None, ...], Blender] = {}  # by KV context, codec and edit

    def blender(self, method: MethodSpec) -> Blender:
        """The blender over the method's KV; within `holding`."""
        return self._made.get(_kv_of(method)) or self._raw[method.kv_context]

    def sizes(self, method: MethodSpec, prompt: Prompt) -> Sizes:
        """Bytes of the prompt's chunks in the method's codec, coded and uncoded; within `holding`."""
        blender = self.blender(method)
        keys = [blender.key(chunk.ids) for chunk in prompt.chunks if len(chunk)]
        return sizes_of(read_record(blender.store, key) for key in keys)

    def exact_context(self, method: MethodSpec, prompt: Prompt) -> tuple[Prompt, ChunkKV, Sizes]:
        """Prepare method `exact` -> the prompt with its context as prefix, the prefix's KV, and the chunks' size.

        The chunks go through the codec one by one, the prompt's own prefix does not.
        """
        context = prompt.ids[: len(prompt) - len(prompt.suffix)]
        exact = Prompt(context, (), prompt.suffix)
        sizes = Sizes()
        kv = ChunkComputer(self._engine.model.decoder, ()).compute([context])[0]
        if method.codec is not None:
            ends = [0, len(prompt.prefix), *(span.stop for span in prompt.spans if len(span))]
            prefix, *chunks = [kv.tokens(a, b) for a, b in pairwise(ends)]
            records = [ChunkRecord.encode(_KEY, chunk, self._codecs[method.codec]) for chunk in chunks]
            parts = [prefix, *(decode(record, self._engine.store.blobs.get) for record in records)]
            kv = ChunkKV.joined(parts)
            sizes = sizes_of(records)
        return exact, kv, sizes

    @contextmanager
    def holding(
        self,
        chunks: Sequence[TokenIds],
        methods: Sequence[MethodSpec],
        previous: Callable[[str], Sequence[TokenIds]],
    ) -> Iterator[None]:
        """Compute and store a prompt's chunks in every form that the methods read, and keep them in the block.

        A plain prompt is searched for these chunks alone. previous: kind of edit -> the chunks before it.
        """
        keys = dict[ChunkKey, None]()
        try:
            for context in dict.fromkeys(m.kv_context for m in methods):
                keys |= dict.fromkeys(self._raw[context].key(ids) for ids in chunks if ids)
                self._raw[context].writer.precompute(chunks)
            for kv, method in {_kv_of(m): m for m in methods}.items():
                if method.codec or self._is_plain:
                    self._made[kv] = made = self._copied(method, keys)
                    made.finder.refresh()
                elif method.edit:
                    before = previous(method.edit)
                    self._made[kv] = made = self._copied(
                        method, map(self._raw[method.kv_context].key, before)
                    )
                    made.writer.precompute(before)
                    made.finder.refresh()
            yield
        finally:
            self._made.clear()
            if self._evicts:
                self._engine.store.pin(keys, pinned=False)

    def fit_priors(self, chunks: Callable[[], Sequence[TokenIds]], run_dir: RunDir, half: str) -> None:
        """Give the blender of each KV context its priors, where a method uses them; from their file in the run's folder.

        The priors are fitted on `chunks` if the file is missing, damaged or of another version.
        """
        blends = [m for m in self._methods if m.kind == "blend"]
        for context in {m.kv_context for m in blends if CORRECTIONS.load(m.blend.correction).uses_prior}:
            blender = self._raw[context]
            name = f"priors-{context}-{half}.safetensors"
            try:
                priors: Priors | None = Priors.from_bytes((run_dir.path / name).read_bytes(), blender.model)
            except (OSError, ValueError):
                with console.progress("Fitting the correction prior", "tokens") as update:
                    priors = blender.priors.fit(chunks(), update)
                if priors is not None:
                    data = priors.to_bytes()
                    run_dir.write(name, data)
                    priors = Priors.from_bytes(data, blender.model)  # rounded, as a resumed run reads them
            blender.priors.use(priors)

    def _copied(self, method: MethodSpec, keys: Iterable[ChunkKey]) -> Blender:
        """A blender over a copy in memory of these chunks, in the method's codec."""
        store = coded_copy(self._engine, self._codecs[method.codec] if method.codec else None, keys)
        return self._raw[method.kv_context].over(store, self._engine.config.store.namespace)

    def _over_context(self, context: KVContext) -> Blender:
        """The engine's own, or one over the same store with another KV context."""
        engine = self._engine
        if context == OWN_CONTEXT:
            return engine.blender
        before = PromptBuilder(engine.model.tokenizer, engine.config.prompt, context).kv_context
        about = engine.model.decoder, engine.model.fingerprint, engine.store, engine.prompts.prefix, before
        return Blender(*about, engine.config.store.namespace, tokenizer=engine.model.tokenizer)


def _kv_of(method: MethodSpec) -> tuple[str | None, ...]:
    return method.kv_context, method.codec, method.edit
