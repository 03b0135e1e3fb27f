"""question -> retrieve -> store (load KV) -> blend (prefill) -> decode -> answer: the whole flow on one screen."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from blendserve.answer import Answer
from blendserve.blend.blender import Blender
from blendserve.blend.policies import defaults_for
from blendserve.blend.precompute import MissingChunk, PrecomputeReport
from blendserve.config import Config
from blendserve.core import Document, Passage, Prompt, TokenIds, run
from blendserve.engine import arguments
from blendserve.engine.codec_fit import writing_codec
from blendserve.engine.documents import Documents, token_counter
from blendserve.engine.gate import GateReport, check_model
from blendserve.engine.generate import AnswerStream, TokenSequence, prefill, reference_prefill
from blendserve.engine.prompt import PromptBuilder
from blendserve.engine.request import PreparedRequest, Request, Search, prepare_request, with_options
from blendserve.engine.warm_up import warm_up
from blendserve.errors import InputError, StoreError, StoreUnavailable
from blendserve.fetch import KVFetcher, open_storage
from blendserve.forks import begin_computing, is_forked
from blendserve.models.loader import LoadedModel, load_model
from blendserve.models.reference import OwnDecoding
from blendserve.paths import index_folder
from blendserve.quality.control import QualityControl
from blendserve.quality.evidence import PROMPTS, Evidence
from blendserve.registry import CORRECTIONS, STORES
from blendserve.retrieve import Embedder, VectorIndex, read_manifest
from blendserve.retrieve.reranker import reranked, reranker_of
from blendserve.store import KVStore, share_of
from blendserve.store.base import Progress
from blendserve.timing import Clock

PROBED = 16  # chunks of the index; the first one that another machine has is read to measure the link

log = logging.getLogger(__name__)


class Engine:
    """Answers questions over passages whose KV is reused. Make one with `open` or `build`; safe to share by threads.

    with Engine.open("indexes/demo") as engine:
        print(engine.answer("What does the with statement do?").text)
    """

    def __init__(
        self,
        config: Config,
        model: LoadedModel,
        store: KVStore,
        index: VectorIndex | None = None,
        prompts: PromptBuilder | None = None,
        fetcher: KVFetcher | None = None,
    ) -> None:
        """prompts: of this model and `config.prompt`, where the caller has one that counts the index's tokens.

        fetcher: brings chunks of the store to prompts; default: one without copies. Chunks are stored raw; `open` and
        `build` set the codec of the settings.
        """
        config = config.model_copy(update={"blend": defaults_for(config.blend, model.decoder)})
        self.config = config
        self.model = model
        self.store = store
        self.index = index
        self._owns_store = True
        self.prompts = prompts = prompts or PromptBuilder(model.tokenizer, config.prompt)
        namespace = config.store.namespace
        about = model.decoder, model.fingerprint, store, prompts.prefix, prompts.kv_context, namespace
        self.blender = Blender(*about, fetcher=fetcher, tokenizer=model.tokenizer)
        self.quality = QualityControl(config, model, self.blender)
        self.reranker = reranker_of(config.retrieve.reranker)

    @classmethod
    def open(
        cls,
        index: str | Path | Config,
        config: Config | None = None,
        model: LoadedModel | None = None,
    ) -> Engine:
        """Open an index by folder or by name (indexes/<name>); with a Config alone, an engine without an index.

        Without an index, passages come with every question, and KV is kept in memory unless `store.location` is set.
        model: the configuration's model, if it is loaded already.
        Raises IndexMissing, IndexMismatch, ModelError, StoreError.
        """
        if isinstance(index, Config):
            return cls._load(index, model)
        folder = index_folder(index)
        read_manifest(folder)  # before anything heavy is loaded
        return cls._load(config or Config(), model, folder, partial(VectorIndex.open, folder))

    @classmethod
    def build(
        cls,
        index: str | Path,
        documents: Iterable[Document | str | Mapping[str, Any]],
        config: Config | None = None,
        progress: Progress | None = None,
        model: LoadedModel | None = None,
    ) -> Engine:
        """Build an index of these documents, replacing an existing one, and open it.

        `progress(characters embedded, in all)`; `model`: the configuration's model, where it is loaded already.
        Raises CorpusError, ModelError, ConfigError.
        """
        config = config or Config()
        folder = index_folder(index)
        own = config.store.path is None and STORES.load(config.store.kind).needs_folder
        chunk_tokens = config.retrieve.chunk_tokens
        make_index = partial(
            VectorIndex.build, folder, documents=documents, chunk_tokens=chunk_tokens, progress=progress
        )
        return cls._load(config, model, folder, make_index, unpin_others=own)

    @classmethod
    def _load(
        cls,
        config: Config,
        model: LoadedModel | None,
        folder: Path | None = None,
        make_index: Callable[..., VectorIndex] | None = None,
        unpin_others: bool = False,
    ) -> Engine:
        """make_index: opens or builds the index in `folder`. unpin_others: of an earlier index of this name."""
        model = model or load_model(config.model)
        prompts = PromptBuilder(model.tokenizer, config.prompt)
        tokens = token_counter(model.name, str(model.decoder.dtype), model.fingerprint, prompts)
        index = make_index(Embedder.load(config.retrieve.embedder), tokens) if make_index else None
        store, fetcher = open_storage(config.store, folder and folder / "kv", model.decoder.device)
        with ExitStack() as opened:
            opened.callback(store.close)
            opened.callback(fetcher.close)
            if store.read_only:
                config = config.replace("store.write_back", "none")
            engine = cls(config, model, store, index, prompts, fetcher)
            if unpin_others:
                ours = {engine.blender.key(ids) for ids in prompts.chunk_ids(engine._index().passages)}
                store.pin(set(store.keys(config.store.namespace)) - ours, pinned=False)
            engine._make_ready()
            opened.pop_all()
        return engine

    def add(
        self, documents: Iterable[Document | str | Mapping[str, Any]], progress: Progress | None = None
    ) -> int:
        """Add documents to the index and save it -> how many were new. Their KV: `precompute`, or on demand.

        A document with a known id and new content replaces the old one, and the old one's KV goes with it.
        """
        n_new, replaced = self._index().add(documents, progress)
        self._documents().delete_kv(replaced)
        return n_new

    def delete(self, *doc_ids: str) -> int:
        """Remove documents with their passages, vectors and KV -> how many were there. Raises InputError."""
        for doc_id in doc_ids:
            arguments.check_text(doc_id, "doc_ids")
        return self._documents().delete(*doc_ids)[0]

    def precompute(
        self,
        passages: Sequence[Passage] | None = None,
        shard: tuple[int, int] = (0, 1),
        progress: Progress | None = None,
        learning: Progress = lambda done, total: None,
    ) -> PrecomputeReport:
        """Compute and store the KV of the index's passages, or of these; what is stored already is skipped.

        Then priors are fitted, if the correction uses them and the store has none (blend/priors.py). Then evidence
        for the target of quality is gathered (quality/control.py). `progress` and `learning(tokens done, tokens in all)`.

        shard (i, n): only the i-th of n shares, for as many processes to compute side by side, each on its own GPU or
        machine; they may write to one store. A chunk's share depends on its tokens alone. Raises StoreError; what was
        stored stays; ModelUnsupported for a model that fails the gate.
        """
        self.gate.require()
        chunks = self.chunks(passages, shard)
        report = self.blender.writer.precompute(chunks, progress)
        self.learn(chunks, learning)
        if passages is None and shard == (0, 1):
            self.quality.gather(report.computed, self.calibrate)
        return report

    def learn(self, chunks: Sequence[TokenIds], learning: Progress = lambda done, total: None) -> None:
        """Learn from stored chunks what `precompute` learns at its end."""
        begin_computing()
        if CORRECTIONS.load(self.config.blend.correction).uses_prior:
            self.blender.priors.learn(chunks, learning, self.blender.writer.as_computed)

    def calibrate(
        self,
        prompts: int = PROMPTS,
        questions: Sequence[str] = (),
        progress: Progress | None = None,
        limit: int | None = None,
    ) -> Evidence:
        """Measure what every ratio loses on prompts of the index: evidence by which the ratio is chosen.

        questions: users' own; without any, some are made of the passages. limit: of prompts to measure now.
        `progress(prompts done, prompts in all)`; what was measured stays if it is stopped. Raises InputError, StoreError.
        """
        arguments.check_count(prompts, "prompts")
        begin_computing()
        asked = [passage.text for passage in arguments.own_passages(questions, "questions")]
        self.gate.require()

        def lay_out(question: str) -> Prompt:
            return self.prepare(Request(question, blend={"method": "blend"})).prompt

        return self.quality.calibrate(self._index(), lay_out, prompts, asked, progress, limit)

    def missing(self, passages: Sequence[Passage] | None = None, shard: tuple[int, int] = (0, 1)) -> int:
        """How many chunks `precompute` with the same arguments would still have to compute."""
        return len(self.blender.writer.missing(self.chunks(passages, shard)))

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

        question: text; with `prompt.separator`, chunks and a question (Request.split). passages: the caller's own, in
        their order; default: the index's `top_k` nearest.
        options: any field of BlendConfig (method, policy, ratio, correction, ...) or DecodeConfig (max_new_tokens,
        temperature, top_p, seed, stop), for this question only, and `logprobs`: how many likeliest tokens get log
        probabilities beside each chosen one.

        An answer ends where the context does. The first token is ready when this returns. Raises InputError,
        PromptTooLong, ConfigError; ModelUnsupported when a model that fails the gate is told to blend (auto does not).
        """
        own = None if passages is None else arguments.own_passages(passages)
        arguments.check_text(question, "question")
        top_k = None if top_k is None else arguments.check_count(top_k, "top_k")
        return self.run(self.prepare(with_options(Request(question, own, top_k), options)))

    def prepare(
        self,
        request: Request,
        search: Search | None = None,
        clock: Clock | None = None,
        room: int | None = None,
        indexes: Sequence[VectorIndex] | None = None,
    ) -> PreparedRequest:
        """What is to be done for a request. Raises InputError, PromptTooLong, ConfigError, and what `search` raises.

        search: by default in the index. clock: since the request came. room: tokens for prompt and answer; by default
        the model's context. indexes: that are searched; by default the engine's own.
        """
        begin_computing()
        decoder = self.model.decoder
        search = search or reranked(lambda *given: self._index().search(*given), self.reranker)
        room = room or decoder.context_limit
        clock = clock or Clock(decoder.device)
        request = request.split(self.config.prompt.separator)
        prepared = prepare_request(request, self.config, decoder, room, self.prompts, search, clock)
        arguments.check_near(prepared.blend, self.store, self.config.store)
        is_retrieved = request.passages is None and not prepared.prompt.is_plain
        own = () if self.index is None else (self.index,)
        searched = own if indexes is None else indexes
        choice = self.quality.choose(prepared.blend, request.blend, searched if is_retrieved else ())
        return replace(prepared, blend=choice.blend, quality=choice) if choice else prepared

    def run(self, request: PreparedRequest) -> AnswerStream:
        """Prefill, and choose the first token: by the model's own forward, never blended, if it fails the gate.

        Raises ModelUnsupported then for methods that blend.
        """
        begin_computing()
        if self.gate.passed:
            sequence = TokenSequence(request, self.model, partial(prefill, blender=self.blender))
            on_end = None if self.config.store.write_back == "none" else self._write_back
            return AnswerStream(sequence, on_end=on_end)
        if request.blend.method not in {"auto", "full"}:
            self.gate.require()
        reference = OwnDecoding(self.model.decoder)
        why = f"the model fails {self.gate.failure}"
        own_prefill = partial(reference_prefill, reference=reference, why=why)
        sequence = TokenSequence(request, self.model, own_prefill)
        return AnswerStream(sequence, lambda at, tokens: reference.feed(tuple(tokens)))

    def tenant(self, namespace: str) -> Engine:
        """The same engine for another namespace: same model, index and store, but KV of its own.

        The same text under two namespaces has unrelated keys and is stored twice: no tenant can hit, or time, what
        another one stored. Close the engine that this came from, not this one.
        """
        view = copy(self)
        view.config = self.config.replace("store.namespace", namespace)
        view._owns_store = False
        view.blender = self.blender.over(self.store, namespace)
        return view

    def close(self) -> None:
        """Release the store; idempotent."""
        if self._owns_store and not is_forked():  # what is open is the parent's
            self.fetcher.close()
            self.store.close()
            if self.index is not None:
                self.index.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_ready(self) -> None:
        """Check and measure now what the first question would otherwise wait for."""
        blend = self.config.blend
        if self.index is not None:
            self.warn_of_room(self.model.decoder.context_limit, [self.index])
        arguments.check_near(blend, self.store, self.config.store)
        self.gate = check_model(self.model)
        try:
            self.blender.writer.codec = writing_codec(self.config, self.model, self.prompts, self.store)
        except StoreUnavailable as error:
            log.warning("chunks are stored as raw until the engine is restarted: %s", error)
        if CORRECTIONS.load(blend.correction).uses_prior:
            self.blender.priors.current()
        if self.fetcher.remote:
            passages = next(self.index.scan(PROBED), []) if self.index is not None else []
            keys = [self.blender.key(ids) for ids in self.prompts.chunk_ids(passages) if ids]
            threading.Thread(target=self.fetcher.warm_up, args=(keys,), daemon=True).start()
        if self.gate.passed:
            if blend.method == "auto":
                self.blender.planner.calibrate()
            warm_up(self.config, self.model.decoder, self.blender, self.prompts.prefix, self.index)

    def warn_of_room(self, room: int, indexes: Iterable[VectorIndex]) -> None:
        """Log a line if the passages of a question may not fit. room: tokens for prompt and answer."""
        longest = max((index.manifest.chunk_tokens for index in indexes), default=0)
        top_k = self.config.retrieve.top_k
        answer = self.config.decode.answer_tokens
        needed = len(self.prompts.frame("")) + top_k * longest + answer
        if longest and needed > room:
            log.warning(
                "%d passages of up to %d tokens, the question and %d tokens of answer may need %d tokens, but only %d "
                "fit: the nearest passages that fit are used (retrieve.top_k, retrieve.chunk_tokens)",
                *(top_k, longest, answer, needed, room),
            )

    @property
    def fetcher(self) -> KVFetcher:
        """Brings stored chunks to prompts."""
        return self.blender.fetcher

    @cached_property
    def gate(self) -> GateReport:
        """Whether this model may blend: checked on its weights once, and kept."""
        begin_computing()
        return check_model(self.model)

    def _write_back(self, missing: Sequence[MissingChunk]) -> None:
        """Store the chunks that a request missed. An answer never fails for it."""
        try:
            run(self.blender.writer.write_back(missing))
        except StoreError as error:
            log.warning("missing chunks were not stored: %s", error)

    def _documents(self) -> Documents:
        return Documents(self._index(), self.prompts, [self.blender.writer])

    def _index(self) -> VectorIndex:
        begin_computing()
        if self.index is None:
            raise InputError(
                "this engine has no index: pass `passages`, or open one with Engine.open('indexes/<name>')",
                setting="passages",
            )
        return self.index

    def chunks(
        self, passages: Sequence[Passage] | None = None, shard: tuple[int, int] = (0, 1)
    ) -> list[TokenIds]:
        """The chunks of one share of the index's passages, or of these."""
        begin_computing()
        i, n = arguments.check_shard(shard)
        given = self._index().passages if passages is None else arguments.own_passages(passages)
        found = arguments.chunks_within(given, self.prompts, self.model.decoder.context_limit)
        return [ids for ids in found if share_of(ids, n) == i]
