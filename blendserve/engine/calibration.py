"""The codec that a store writes with for a reader, and the tables that it may need: fitted once, on text.

Tables are fitted by `blendserve codec fit`, on text of the user's own or on what the reader says by itself, and kept in
the store. Those of a bundled reader are fitted on first use.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from blendserve.blend.chunk_kv import ChunkComputer
from blendserve.config import Config
from blendserve.core import Document, TokenIds
from blendserve.engine.own_words import own_words
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import InputError, TablesMissing
from blendserve.models.loader import LoadedModel
from blendserve.models.sources import BUNDLED
from blendserve.registry import CODECS, parse_codec
from blendserve.retrieve.chunker import split
from blendserve.store import KVStore
from blendserve.store.codecs.base import Codec, Progress, Sample

log = logging.getLogger(__name__)

FIT_TOKENS = 16_384  # of the reader's own words, that tables are fitted on unless told otherwise


def writing_codec(config: Config, reader: LoadedModel, prompts: PromptBuilder, store: KVStore) -> Codec:
    """The codec that `store.codec` names, with the reader's tables. Raises TablesMissing, StoreError."""
    name, level = parse_codec(config.store.codec)
    made: type[Codec] = CODECS.load(name)
    if not made.needs_tables:
        return made.with_tables(level)
    if (codec := _at_level(made, level, store, store.blobs.current(name, reader.fingerprint))) is not None:
        return codec
    if reader.name in BUNDLED:
        log.info(
            "Fitting tables of codec %s for %s on text sampled from it; the store keeps them",
            name,
            reader.name,
        )
        hash = fit(name, own_words(reader, FIT_TOKENS), reader, prompts, store)
        codec = _at_level(made, level, store, hash)
    if codec is None:
        raise TablesMissing(
            f"codec {name!r} needs tables for {reader.name}, and the store has none for this version: fit some by "
            f"`blendserve codec fit INDEX --codec {name}`, or set store.codec to one that needs none",
            setting="store.codec",
        )
    return codec


def codec_without_tables(word: str) -> Codec:
    """The codec that a setting names; raw where that takes tables, until `writing_codec` has them."""
    name, level = parse_codec(word)
    made: type[Codec] = CODECS.load(name)
    return CODECS.load(CODECS.default).with_tables(0) if made.needs_tables else made.with_tables(level)


def _at_level(made: type[Codec], level: int, store: KVStore, hash: bytes | None) -> Codec | None:
    """With these tables of the store; None where it has none, or another version of blendserve fitted them."""
    raw = None if hash is None else store.blobs.get(hash)
    try:
        return None if raw is None else made.with_tables(level, raw)
    except ValueError:
        return None


def fit(
    name: str,
    chunks: Sequence[TokenIds],
    reader: LoadedModel,
    prompts: PromptBuilder,
    store: KVStore,
    computing: Progress = lambda done, total: None,
    fitting: Progress = lambda done, total: None,
) -> bytes:
    """Fit a codec's tables on chunks, and keep them in the store -> their hash.

    computing: progress in tokens of KV; fitting: of what the codec does with them. Raises InputError for too little text,
    StoreError.
    """
    if not chunks:
        raise InputError(
            "the text to fit tables on is empty: give another --text, or leave it out to sample text from the model"
        )
    made: type[Codec] = CODECS.load(name)
    raw = made.fit(samples(chunks, reader, prompts, computing), reader.adapter, fitting)
    return store.blobs.put(name, reader.fingerprint, raw)


def samples(
    chunks: Sequence[TokenIds],
    reader: LoadedModel,
    prompts: PromptBuilder,
    progress: Progress = lambda done, total: None,
) -> Iterator[Sample]:
    """The chunks with their KV, computed as precompute does, while they are read."""
    done, total = 0, sum(map(len, chunks))
    computer = ChunkComputer(reader.adapter, prompts.kv_context)
    for ids, kv in zip(chunks, computer.stream(chunks), strict=True):
        yield ids, kv
        done += len(ids)
        progress(done, total)


def chunks_of(
    documents: Iterable[Document], tokens: int, config: Config, prompts: PromptBuilder
) -> list[TokenIds]:
    """The documents' chunks, of the size that an index would have, until there are so many tokens."""
    found: list[TokenIds] = []
    for document in documents:
        for passage in split(document, config.retrieve.chunk_tokens, lambda p: len(prompts.chunk(p))):
            ids = prompts.chunk(passage).ids[:tokens]
            if ids:
                found.append(ids)
                tokens -= len(ids)
            if tokens <= 0:
                return found
    return found
