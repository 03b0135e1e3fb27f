"""`blendserve bench codec`: bytes a token of each codec and level, and the time of encoding, decoding and a first token.

Every byte of a chunk's records counts: segments with their scales, the header with its lengths and checksums. Tables
are shared by all chunks, and counted apart. Encoding runs in one thread, as during precompute. Decoding goes layer by
layer, all chunks in parallel in as many threads as prefill has, without the store. TTFT is that of one method over the
same prompt from a store of each codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import torch
from pydantic import Field, field_validator

from blendserve.bench.fixture import SPARE_BYTES, make_blender, scratch, time_prompt
from blendserve.bench.harness import Case, Group, Metrics, SampleLog, count, ms, ratio, table
from blendserve.bench.runner import Bench, PromptBenchConfig, open_model
from blendserve.bench.workload import Workload
from blendserve.blend.blender import Blender
from blendserve.config import BlendConfig, Positive
from blendserve.engine.codec_fit import fit, self_generated_text
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import ConfigError
from blendserve.evaluate.methods import parse_methods
from blendserve.kernels import team
from blendserve.kv import ChunkKV
from blendserve.models.loader import LoadedModel
from blendserve.registry import BENCHED, CODECS, codec_word, every_codec, parse_codec
from blendserve.store import ChunkRecord, KVStore, LMDBStore, MemoryStore, read_record
from blendserve.store.codecs.base import ChunkShape, Codec
from blendserve.store.view import decode
from blendserve.timing import Clock

RAW = CODECS.default


def codec_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """Codecs and levels in full, uncoded first, each once; all of them for none. Raises ConfigError."""
    try:
        pairs = [parse_codec(word) for word in words] or every_codec()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return tuple(dict.fromkeys((RAW, *(codec_word(*pair) for pair in pairs))))


class CodecTables:
    """The tables of each codec, fitted once, on text sampled from the model."""

    def __init__(self, model: LoadedModel, prompts: PromptBuilder, fit_tokens: int) -> None:
        self._model = model
        self._prompts = prompts
        self._fit_tokens = fit_tokens
        self._store = MemoryStore(1 << 30)

    def codec(self, word: str, *stores: KVStore) -> Codec:
        """The codec that a word names. The stores get its tables, so that its records can be read."""
        name, level = parse_codec(word)
        model = self._model
        made: type[Codec] = CODECS.load(name)
        if not made.needs_tables:
            return made.with_tables(level)
        if (hash := self._store.blobs.current(name, model.fingerprint)) is None:
            text = self_generated_text(model, self._fit_tokens)
            hash = fit(name, text, model, self._prompts, self._store)
        tables = self._store.blobs.get(hash) or b""
        for store in stores:
            store.blobs.put(name, model.fingerprint, tables)
        return made.with_tables(level, tables)


class CodecConfig(PromptBenchConfig):
    """One prompt's chunks by every codec."""

    codecs: tuple[str, ...] = Field(
        (), description="Codecs to measure, written name or name@level; all codecs and levels if not set."
    )
    method: str = Field(f"{BENCHED[0]}@0.15", description="Method for the TTFT, written as for `evaluate`.")
    fit_tokens: Positive = Field(
        16_384, description="Length of the text that tables are fitted on, in tokens."
    )

    @field_validator("codecs")
    @classmethod
    def _codecs(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        codec_words(words)
        return words

    @property
    def blend(self) -> BlendConfig:
        """Raises ConfigError."""
        return parse_methods((self.method,), ())[-1].blend


def groups(config: CodecConfig, log: SampleLog) -> Iterator[Group]:
    blend = config.blend
    words = codec_words(config.codecs)
    model = open_model(config, log)
    workload = config.workload(model)
    tables = CodecTables(model, workload.prompts, config.fit_tokens)
    n_bytes = len(workload.prompt) * model.decoder.kv_bytes_per_token + SPARE_BYTES
    sizes: list[Case] = []
    with scratch(config.folder) as folder, ExitStack() as stores:
        cases: list[Case] = []
        for word in words:
            store = stores.enter_context(LMDBStore(folder / word, n_bytes))
            codec = tables.codec(word, store)
            blender = make_blender(model, workload.prompts, store, codec=codec)
            blender.writer.precompute(workload.chunks)
            coded = [record for ids in workload.chunks if (record := read_record(store, blender.key(ids)))]
            if word == RAW:
                kvs = [ChunkKV(kv.keys, kv.values) for kv in map(decode, coded)]
                tokens = sum(kv.n_tokens for kv in kvs)
                raw_bytes = sum(kv.n_bytes for kv in kvs)
                full = partial(_time, blender, workload, BlendConfig(method="full"), "prefill_s")
                cases.append(Case({"operation": "prefill"}, lambda full=full: {"time_s": full()}))  # type: ignore[misc]
            n_table_bytes = len(store.blobs.get(codec.coding.tables) or b"")
            sizes.append(Case({"codec": word}, partial(_size, coded, n_table_bytes, tokens, raw_bytes)))
            operations: dict[str, Callable[[], float]] = {
                "encode": partial(_encode, codec, kvs),
                "decode": partial(_decode, codec, kvs, coded),
                "ttft": partial(_time, blender, workload, blend, "ttft_s"),
            }
            for name, run in operations.items():
                rates = partial(_rates, run, tokens, raw_bytes)
                cases.append(Case({"operation": name, "codec": word}, rates))
        facts = {"tokens": tokens, "raw_bytes": raw_bytes}
        yield Group({"of": "size"}, sizes, lambda: facts, repeats=1, warm_up=False)
        yield Group({"of": "speed"}, cases)


def _time(blender: Blender, workload: Workload, blend: BlendConfig, metric: str) -> float:
    return time_prompt(blender, workload, blend)[0][metric]


def _encode(codec: Codec, kvs: Sequence[ChunkKV]) -> float:
    """-> seconds"""
    clock = Clock()
    for kv in kvs:
        codec.encode(kv)
    return clock.elapsed()


def _decode(codec: Codec, kvs: Sequence[ChunkKV], coded: Sequence[ChunkRecord]) -> float:
    """-> seconds; a layer of all chunks before the next one, as in a request"""
    clock = Clock()
    decoders = [codec.decoder(ChunkShape.of(kv)) for kv in kvs]
    with ThreadPoolExecutor(min(torch.get_num_threads(), len(kvs)), initializer=team.alone) as pool:
        for l in range(len(kvs[0].keys)):
            segments = (chunk.segment(l) for chunk in coded)
            list(pool.map(lambda decoder, segment: decoder.layer(l, segment), decoders, segments))  # noqa: B023
    return clock.elapsed()


def _rates(run: Callable[[], float], tokens: int, raw_bytes: int) -> Metrics:
    seconds = run()
    return {"time_s": seconds, "raw_mb_per_s": raw_bytes / seconds / 1e6, "tokens_per_s": tokens / seconds}


def _size(coded: Sequence[ChunkRecord], tables: int, tokens: int, raw_bytes: int) -> Metrics:
    stored = sum(record.n_bytes + len(record.header_bytes()) for record in coded)
    return {
        "bytes_per_token": stored / tokens,
        "compression": raw_bytes / stored,
        "bits_per_element": 8 * stored * coded[0].shape.dtype.itemsize / raw_bytes,
        "tables_bytes": tables,
    }


TABLES = (
    table(
        "Size",
        count("x smaller", "compression", digits=2),
        count("bits per element", "bits_per_element", digits=3),
        count("bytes per token", "bytes_per_token"),
        count("tables MB", "tables_bytes", 1e-6, 2),
        of="size",
    ),
    table(
        "Speed; MB of raw KV",
        ms("ms", "time_s"),
        count("MB/s", "raw_mb_per_s"),
        count("tokens/s", "tokens_per_s"),
        ratio("of full prefill", "time_s", operation="prefill", codec=None),
        ratio("of raw", "time_s", codec=RAW),
        of="speed",
    ),
)
TINY = {"codecs": ("int8",), "fit_tokens": 300, "method": "reuse"}
BENCH = Bench(CodecConfig, groups, TABLES, tiny=TINY)
