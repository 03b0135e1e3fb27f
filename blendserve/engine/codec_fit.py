"""The codec that a store writes with for a model, and its tables, which are fitted on text once.

`blendserve codec fit` fits tables on the user's text, or on text that the model generates, and the store keeps them.
Those of a bundled model are fitted on first use.

A generated text begins with one of the vocabulary's frequent tokens and follows the model's own probabilities. So it is
spread like what the model was trained on: prose, letters, code, lists, languages. Every other text stands after a few
passages about nothing in particular, which are no part of it, as retrieved text does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from blendserve.blend.chunk_kv import ChunkComputer
from blendserve.config import Config
from blendserve.core import Document, TokenIds
from blendserve.engine.prompt import PRIMER, PromptBuilder, literal_tokenizer
from blendserve.engine.sensitivity import ModelSensitivity
from blendserve.errors import ConfigError, InputError, TablesMissing
from blendserve.models.forward import Row
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import LoadedModel
from blendserve.models.model import DecoderModel
from blendserve.models.runner import append, append_each
from blendserve.models.sources import BUNDLED
from blendserve.registry import CODECS, parse_codec
from blendserve.retrieve.chunker import split
from blendserve.store import KVStore
from blendserve.store.codecs.base import Codec, Progress, Sample

FIT_TOKENS = 16_384  # of generated text, unless told otherwise
TEXT_TOKENS = 128  # of one generated text
BATCH = 32  # texts that are generated together
FREQUENT = 1 << 14  # tokens at the front of the vocabulary

log = logging.getLogger(__name__)


def writing_codec(
    config: Config,
    model: LoadedModel,
    prompts: PromptBuilder,
    store: KVStore,
    sampling: Progress = lambda done, total: None,
    fitting: Progress = lambda done, total: None,
) -> Codec:
    """The codec that `store.codec` names, with the model's tables; those of a bundled model are fitted if need be.

    sampling: progress of the text to fit on, in tokens. fitting: the codec's own progress. Raises ConfigError,
    TablesMissing, StoreError.
    """
    name, level = parse_codec(config.store.codec)
    made: type[Codec] = CODECS.load(name)
    if made.needs_equal_layers and not model.decoder.has_equal_layers:
        raise ConfigError(
            f"store.codec={name} needs keys and values of one shape in all layers, and {model.name} has others: "
            "use raw or int8",
            setting="store.codec",
        )
    if model.decoder.recurrent and not made.keeps_states:
        raise ConfigError(
            f"store.codec={name} does not store states of recurrent layers, and {model.name} has such layers: use raw",
            setting="store.codec",
        )
    if not made.needs_tables:
        return made.with_tables(level)
    if (codec := _with_tables(made, level, store, store.blobs.current(name, model.fingerprint))) is not None:
        return codec
    if model.name in BUNDLED:
        log.info(
            "Fitting tables of codec %s for %s (once) on text that the model generates",
            name,
            model.name,
        )
        text = self_generated_text(model, FIT_TOKENS, sampling)
        hash = fit(name, text, model, prompts, store, fitting=fitting)
        codec = _with_tables(made, level, store, hash)
    if codec is None:
        raise TablesMissing(
            f"codec {name!r} needs tables for {model.name}, and the store has none for this version: fit some by "
            f"`blendserve codec fit INDEX --codec {name}`, or set store.codec to one that needs none",
            setting="store.codec",
        )
    return codec


def _with_tables(made: type[Codec], level: int, store: KVStore, hash: bytes | None) -> Codec | None:
    """The codec with these tables of the store; None if it has none, or another version of blendserve fitted them."""
    raw = None if hash is None else store.blobs.get(hash)
    try:
        return None if raw is None else made.with_tables(level, raw)
    except ValueError:
        return None


def fit(
    name: str,
    chunks: Sequence[TokenIds],
    model: LoadedModel,
    prompts: PromptBuilder,
    store: KVStore,
    computing: Progress = lambda done, total: None,
    fitting: Progress = lambda done, total: None,
) -> bytes:
    """Fit a codec's tables on chunks, and keep them in the store -> their hash.

    computing: progress in tokens of KV. fitting: the codec's own progress. Raises InputError for too little text,
    StoreError.
    """
    if not chunks:
        raise InputError(
            "the text to fit tables on is empty: give another --text, or leave it out to sample text from the model"
        )

    def samples() -> Iterator[Sample]:
        """The chunks with their KV, computed as precompute does, while they are read."""
        done = 0
        total = sum(map(len, chunks))
        computer = ChunkComputer(model.decoder, prompts.kv_context)
        for ids, kv in zip(chunks, computer.stream(chunks), strict=True):
            yield ids, kv
            done += len(ids)
            computing(done, total)

    made: type[Codec] = CODECS.load(name)
    raw = made.fit(samples(), ModelSensitivity(model.decoder), fitting)
    return store.blobs.put(name, model.fingerprint, raw)


def chunks_of(
    documents: Iterable[Document], tokens: int, config: Config, prompts: PromptBuilder
) -> list[TokenIds]:
    """The documents' chunks, of the size that an index would have, with `tokens` tokens together."""
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


def self_generated_text(
    model: LoadedModel, tokens: int, progress: Progress = lambda done, total: None
) -> list[TokenIds]:
    """Texts of `tokens` tokens together, the same each time, to rounding; without end and control tokens."""
    primer = _primer_cache(model)
    sample = _sampler(model)
    texts: list[TokenIds] = []
    while (missing := tokens - TEXT_TOKENS * len(texts)) > 0:
        n = min(BATCH, -(-missing // TEXT_TOKENS))
        starts = [primer.capacity * (text % 2) for text in range(n)]  # every other one after the primer
        caches = [_cache_after(model.decoder, primer, start) for start in starts]
        columns = [sample(torch.ones(n, FREQUENT))]
        for at in range(TEXT_TOKENS - 1):
            latest = zip(caches, starts, columns[-1], strict=True)
            rows = [Row(cache, start + at, token) for cache, start, token in latest]
            columns.append(sample(append_each(model.decoder, rows).float().softmax(dim=-1).cpu()))
            progress(tokens - max(0, missing - len(columns) * n), tokens)
        texts += zip(*columns, strict=True)
    texts[-1:] = [text[: TEXT_TOKENS + missing] for text in texts[-1:]]  # missing <= 0
    return texts


def _primer_cache(model: LoadedModel) -> KVCache:
    """The KV of the primer's last tokens, with which a text fits the context."""
    text = PRIMER.read_text("utf-8").strip() + "\n\n"
    literal = literal_tokenizer(model.tokenizer)
    ids = literal(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    ids = ids[max(0, len(ids) - (model.decoder.context_limit - TEXT_TOKENS)) :]
    cache = KVCache(model.decoder, len(ids))
    if ids:
        append(model.decoder, cache, 0, ids)
    return cache


def _cache_after(model: DecoderModel, primer: KVCache, start: int) -> KVCache:
    """Make a cache with the first `start` tokens of the primer, and room for a text."""
    cache = KVCache(model, start + TEXT_TOKENS)
    known = primer.beginning(model, start)
    for l in range(known.n_layers):
        cache.write(l, slice(start), known.keys[l], known.values[l])
    return cache


def _sampler(model: LoadedModel) -> Callable[[Tensor], list[int]]:
    """Probabilities [n, V] of the vocabulary, or of its front -> a token each, from a seed."""
    added = getattr(model.tokenizer, "added_tokens_decoder", {})
    control = {*model.end_tokens, *(i for i, token in added.items() if token.special)}
    allowed = torch.ones(model.decoder.vocab_size)
    random = torch.Generator().manual_seed(0)
    allowed[[i for i in control if i < len(allowed)]] = 0.0

    def sample(probabilities: Tensor) -> list[int]:
        width = min(probabilities.shape[1], len(allowed))
        weights = probabilities[:, :width] * allowed[:width]
        tokens: list[int] = torch.multinomial(weights, 1, generator=random)[:, 0].tolist()
        return tokens

    return sample
