"""question -> retrieve -> store (load KV) -> blend (prefill) -> decode -> answer: the whole flow on one screen.

Nothing else knows all the stages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from blendserve.blend.blender import Blender, PrecomputeReport
from blendserve.blend.full import model_generate
from blendserve.blend.report import plain_report
from blendserve.config import BlendConfig, Config, DecodeConfig, changed
from blendserve.core import Answer, BlendReport, Document, Passage, Prompt, TokenIds
from blendserve.engine.gate import GateReport, verdict
from blendserve.engine.generation import generate
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import ConfigError, InputError, PromptTooLong, StoreError
from blendserve.models.loader import Reader, load_reader
from blendserve.paths import index_folder
from blendserve.registry import nearest
from blendserve.retrieve import Embedder, VectorIndex, read_manifest
from blendserve.store import KVStore, open_store, share_of
from blendserve.stream import AnswerStream
from blendserve.timing import Clock

BLEND_OPTIONS, DECODE_OPTIONS = set(BlendConfig.model_fields), set(DecodeConfig.model_fields)

Say = Callable[[str], None]
Progress = Callable[[int, int], None]

log = logging.getLogger(__name__)


class Engine:
    """Answers questions over passages whose KV is reused. Make one with `open` or `build`; safe to share by threads.

    with Engine.open("indexes/demo") as engine:
        print(engine.answer("What does the with statement do?").text)
    """

    def __init__(
        self, config: Config, reader: Reader, store: KVStore, index: VectorIndex | None = None
    ) -> None:
        self.config, self.reader, self.store, self.index = config, reader, store, index
        self._owns_store = True
        self.prompts = PromptBuilder(reader.tokenizer, config.prompt)
        self.blender = Blender(
            reader.adapter,
            reader.fingerprint,
            store,
            self.prompts.prefix,
            self.prompts.behind,
            config.store.namespace,
        )

    @classmethod
    def open(
        cls, index: str | Path | Config, config: Config | None = None, say: Say = lambda _: None
    ) -> Engine:
        """Open an index by folder or by name (indexes/<name>); with a Config alone, an engine without an index.

        Without an index, passages come with every question, and KV is kept in memory unless `store.path` is set.
        `say` is told what takes long. Raises IndexMissing, IndexMismatch, ModelError, StoreError.
        """
        if isinstance(index, Config):
            store = index.store if index.store.path else changed(index.store, kind="memory")
            reader = load_reader(index.reader, say)
            kept = open_store(store, Path(), device=reader.adapter.device)
            return cls(index, reader, kept)._ready(say)
        config = config or Config()
        folder = index_folder(index)
        read_manifest(folder)  # before anything heavy is loaded
        reader = load_reader(config.reader, say)
        count = _counter(reader, config)
        name, fingerprint = _identity(reader)
        found = VectorIndex.open(
            folder,
            Embedder.load(config.retrieve.embedder),
            reader=name,
            reader_fingerprint=fingerprint,
            count=count,
        )
        kept = open_store(config.store, folder / "kv", device=reader.adapter.device)
        return cls(config, reader, kept, found)._ready(say)

    @classmethod
    def build(
        cls,
        index: str | Path,
        documents: Iterable[Document | str | Mapping[str, Any]],
        config: Config | None = None,
        say: Say = lambda _: None,
        progress: Progress | None = None,
    ) -> Engine:
        """Build an index of these documents, in place of any that is there, and open it.

        `progress(windows embedded, windows in all)`. Raises CorpusError, ModelError, ConfigError.
        """
        config = config or Config()
        folder = index_folder(index)
        reader = load_reader(config.reader, say)
        name, fingerprint = _identity(reader)
        made = VectorIndex.create(
            folder,
            Embedder.load(config.retrieve.embedder),
            reader=name,
            reader_fingerprint=fingerprint,
            chunk_tokens=config.retrieve.chunk_tokens,
            count=_counter(reader, config),
            kind=config.retrieve.index,
        )
        made.add(documents, progress)
        made.save()
        kept = open_store(config.store, folder / "kv", device=reader.adapter.device)
        engine = cls(config, reader, kept, made)
        if config.store.path is None:  # what an index of the same name left behind may be evicted from now on
            ours = {engine.blender.key(ids) for ids in engine._chunks(made.passages)}
            ours.add(engine.blender.key(engine.prompts.prefix, ()))
            engine.store.unpin(set(engine.store.keys(config.store.namespace)) - ours)
        return engine._ready(say)

    def add(
        self, documents: Iterable[Document | str | Mapping[str, Any]], progress: Progress | None = None
    ) -> int:
        """Add documents to the index and save it -> how many were new. Their KV: `precompute`, or on demand.

        A document with a known id and new content replaces the old one, and the old one's KV goes with it.
        """
        index = self._index()
        before = index.passages
        added = index.add(documents, progress)
        index.save()
        now = set(index.passages)
        if gone := [p for p in before if p not in now]:
            self.blender.forget(self._chunks(gone), self._chunks(index.passages))
        return added

    def delete(self, *doc_ids: str) -> int:
        """Remove documents with their passages, vectors and KV -> how many were there.

        KV goes first, so that a kill in between leaves nothing behind that no document explains.
        """
        index = self._index()
        kept = [p for p in index.passages if p.doc_id not in doc_ids]
        self.blender.forget(
            self._chunks([p for p in index.passages if p.doc_id in doc_ids]), self._chunks(kept)
        )
        deleted = index.delete(*doc_ids)
        index.save()
        return deleted

    def precompute(
        self,
        passages: Sequence[Passage] | None = None,
        shard: tuple[int, int] = (0, 1),
        progress: Progress | None = None,
    ) -> PrecomputeReport:
        """Compute and store the KV of the index's passages, or of these; what is stored already is skipped.

        shard (i, n): only the i-th of n shares, for as many processes to compute side by side, each on its own GPU or
        machine; they may write to one store. A chunk's share depends on its tokens alone. Raises StoreError; what was
        stored stays; ModelUnsupported for a reader that fails the gate.
        """
        self.gate.require()
        return self.blender.precompute(self._shard(passages, shard), progress)

    def missing(self, passages: Sequence[Passage] | None = None, shard: tuple[int, int] = (0, 1)) -> int:
        """How many chunks `precompute` with the same arguments would still have to compute."""
        return len(self.blender.missing(self._shard(passages, shard)))

    def answer(
        self, question: str, passages: Sequence[Passage | str] | None = None, **options: Any
    ) -> Answer:
        """Answer a question; see `stream` for the options and errors."""
        return self.stream(question, passages, **options).answer()

    def stream(
        self,
        question: str,
        passages: Sequence[Passage | str] | None = None,
        top_k: int | None = None,
        **options: Any,
    ) -> AnswerStream:
        """Answer a question piece by piece.

        question: text. passages: the caller's own, in his order; default: the index's `top_k` nearest.
        options: any field of BlendConfig (method, policy, ratio, correction, ...) or DecodeConfig (max_new_tokens,
        temperature, top_p, seed, stop), for this question only.

        The first token is ready when this returns. Raises InputError, PromptTooLong, ConfigError; ModelUnsupported when a
        reader that fails the gate is told to blend (by itself it then answers by its own full prefill).
        """
        blend, decode = self._options(options)
        clock = Clock(self.reader.adapter.device)
        with clock.stage("retrieve"):
            given = self._passages(question, passages, top_k)
        prompt = self.prompts.build(question, given)
        self._check_length(prompt, decode)
        with clock.stage("prefill"):
            report, tokens, absent = self._prefill(prompt, blend, decode, clock)
        remember = partial(self._write_back, absent)
        return AnswerStream(self.reader.tokenizer, tuple(given), report, tokens, decode, clock, remember)

    def tenant(self, namespace: str) -> Engine:
        """The same engine for another namespace: same reader, index and store, but KV of its own.

        The same text under two namespaces has unrelated keys and is stored twice: no tenant can hit, or time, what
        another one stored. Close the engine that this came from, not this one.
        """
        store = changed(self.config.store, namespace=namespace)
        view = Engine(changed(self.config, store=store.model_dump()), self.reader, self.store, self.index)
        view._owns_store = False
        return view

    def close(self) -> None:
        """Release the store; idempotent."""
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready(self, say: Say) -> Engine:
        """Check and measure now what the first question would otherwise wait for."""
        self.gate = verdict(self.reader, say)
        if self.config.blend.method == "auto" and self.gate.passed:
            self.blender.calibrate(say)
        return self

    @cached_property
    def gate(self) -> GateReport:
        """Whether this reader may blend: checked on its weights once, and kept."""
        return verdict(self.reader)

    def _prefill(
        self, prompt: Prompt, blend: BlendConfig, decode: DecodeConfig, clock: Clock
    ) -> tuple[BlendReport, Iterator[int], Sequence[TokenIds]]:
        """What was done, the tokens to come, and the chunks that were not found."""
        reader, new_tokens = self.reader, decode.max_new_tokens
        if not self.gate.passed:
            if blend.method not in {"auto", "full"}:
                self.gate.require()
            why = f"the reader fails {self.gate.failure}"
            return (
                plain_report(prompt, blend, why),
                model_generate(reader.adapter, prompt.ids, decode, reader.end_tokens),
                (),
            )
        done = self.blender.run(prompt, blend, new_tokens, clock)
        cache, logits = done.prefilled.cache, done.prefilled.logits
        tokens = generate(reader.adapter, cache, len(prompt), logits, decode, reader.end_tokens)
        return done.report, tokens, done.absent

    def _options(self, options: Mapping[str, Any]) -> tuple[BlendConfig, DecodeConfig]:
        """Split the options by section; a seed serves whatever is random."""
        for name in options:
            if name not in BLEND_OPTIONS | DECODE_OPTIONS:
                raise ConfigError(
                    f"unknown option {name!r}: {nearest(name, sorted(BLEND_OPTIONS | DECODE_OPTIONS))}"
                )
        blend = {k: v for k, v in options.items() if k in BLEND_OPTIONS}
        decode = {k: v for k, v in options.items() if k in DECODE_OPTIONS}
        return changed(self.config.blend, **blend), changed(self.config.decode, **decode)

    def _passages(
        self, question: str, passages: Sequence[Passage | str] | None, top_k: int | None
    ) -> list[Passage]:
        if not question.strip():
            raise InputError("the question is empty: ask something")
        if passages is not None:
            return [Passage(text=p) if isinstance(p, str) else p for p in passages]
        return self._index().search(question, self.config.retrieve.top_k if top_k is None else top_k)

    def _check_length(self, prompt: Prompt, decode: DecodeConfig) -> None:
        limit = self.reader.adapter.context_limit
        if len(prompt) + decode.max_new_tokens > limit:
            raise PromptTooLong(len(prompt), limit, decode.max_new_tokens)

    def _write_back(self, absent: Sequence[TokenIds]) -> None:
        """Store what a request found missing or damaged. An answer never fails for it."""
        if absent and self.config.store.write_back:
            try:
                self.blender.remember(absent)
            except StoreError as error:
                log.warning("missing chunks were not stored: %s", error)

    def _chunks(self, passages: Sequence[Passage]) -> list[TokenIds]:
        return [self.prompts.chunk(p).ids for p in passages]

    def _index(self) -> VectorIndex:
        if self.index is None:
            raise InputError(
                "this engine has no index: pass `passages`, or open one with Engine.open('indexes/<name>')"
            )
        return self.index

    def _shard(self, passages: Sequence[Passage] | None, shard: tuple[int, int]) -> list[TokenIds]:
        """The chunks of one share."""
        i, n = shard
        if not 0 <= i < n:
            shares = f"count from 0/{n} to {n - 1}/{n}" if n > 0 else "there is at least one, 0/1"
            raise InputError(f"shard {i}/{n} does not exist: {shares}")
        chunks = self._chunks(self._index().passages if passages is None else passages)
        return [ids for ids in chunks if share_of(ids, n) == i]


def _identity(reader: Reader) -> tuple[str, str]:
    """How an index remembers its reader: the KV of one dtype is not another's."""
    return f"{reader.name} ({str(reader.adapter.dtype).removeprefix('torch.')})", reader.fingerprint


def _counter(reader: Reader, config: Config) -> Callable[[Passage], int]:
    """Tokens of a passage as it will stand in the prompt."""
    prompts = PromptBuilder(reader.tokenizer, config.prompt)
    return lambda passage: len(prompts.chunk(passage))
