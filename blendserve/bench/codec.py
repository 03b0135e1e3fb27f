"""`blendserve bench codec`: bytes a token of each codec and level, and the time of encoding, decoding and a first token.

Every byte of a chunk's records counts: segments with their scales, the header with its lengths and checksums. Tables
count apart, and per token of the chunks that share them. Encoding runs in one thread, as during precompute. Decoding goes
layer by layer, the chunks side by side in as many threads as prefill has, without the store. TTFT is that of one
method over the same prompt from a store of each codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from pydantic import Field, field_validator

from blendserve.bench.fixture import SPARE_BYTES, make_blender, scratch, time_prompt
from blendserve.bench.harness import Case, Group, Metrics, SampleLog, count, ms, ratio, table
from blendserve.bench.runner import Bench, PromptBenchConfig, open_reader
from blendserve.bench.stores import CodecTables
from blendserve.bench.workload import Workload
from blendserve.blend.blender import Blender
from blendserve.config import BlendConfig, Positive
from blendserve.core import ChunkKV
from blendserve.errors import ConfigError
from blendserve.evaluate.methods import parse_methods
from blendserve.kernels import team
from blendserve.registry import BENCHED, CODECS, codec_word, every_codec, parse_codec
from blendserve.store import ChunkRecord, LMDBStore, read_record
from blendserve.store.codecs.base import ChunkShape, Codec
from blendserve.store.view import decode
from blendserve.timing import Clock

SHARED_BY = (1_000, 100_000)  # chunks that one set of tables serves
RAW = CODECS.default


def codec_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """Codecs and levels in full, uncoded first, each once; all of them for none. Raises ConfigError."""
    try:
        pairs = [parse_codec(word) for word in words] or every_codec()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return tuple(dict.fromkeys((RAW, *(codec_word(*pair) for pair in pairs))))


class CodecConfig(PromptBenchConfig):
    """One prompt's chunks by every codec."""

    codecs: tuple[str, ...] = Field(
        (), description="Codecs to measure, written name or name@level; all codecs and levels if not set."
    )
    method: str = Field(f"{BENCHED[0]}@0.15", description="Method for the TTFT, written as for `evaluate`.")
    text: Path | None = Field(
        None,
        description="File or folder with the text that tables are fitted on; sampled from the model if not set.",
    )
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
    blend, words = config.blend, codec_words(config.codecs)
    if log.done({"of": "speed"}) and log.done({"of": "size"}):
        return
    reader = open_reader(config, log)
    workload = config.workload(reader)
    tables = CodecTables(reader, workload.prompts, config.fit_tokens, config.text)
    n_bytes = len(workload.prompt) * reader.adapter.kv_bytes_per_token + SPARE_BYTES
    with scratch(config.folder) as folder, ExitStack() as stores:
        blenders: dict[str, Blender] = {}
        for word in words:
            store = stores.enter_context(LMDBStore(folder / word, n_bytes))
            codec = tables.write_with(word, store)
            blenders[word] = make_blender(reader, workload.prompts, store, codec=codec)
            blenders[word].writer.precompute(workload.chunks)
        coded = {
            word: [_record(blender, ids) for ids in workload.chunks] for word, blender in blenders.items()
        }
        kvs = [_decoded(record) for record in coded[RAW]]
        tokens, raw_bytes = sum(kv.n_tokens for kv in kvs), sum(kv.n_bytes for kv in kvs)
        sizes = {word: _sizes(coded[word], len(tables.tables(word)), tokens, raw_bytes) for word in words}
        size_cases = [
            Case({"codec": word}, partial(_size, sizes[word], config.chunk_tokens)) for word in words
        ]
        yield Group({"of": "size"}, size_cases, {"tokens": tokens, "raw_bytes": raw_bytes}, 1, warm_up=False)
        full = BlendConfig(method="full")
        cases = [Case({"operation": "prefill"}, partial(_prompt, blenders[RAW], workload, full, "prefill_s"))]
        for word in words:
            codec = tables.codec(word)
            encode, decode = partial(_encode, codec, kvs), partial(_decode, codec, kvs, coded[word])
            operations: dict[str, Callable[[], Metrics]] = {
                "encode": partial(_rates, tokens, raw_bytes, encode),
                "decode": partial(_rates, tokens, raw_bytes, decode),
                "ttft": partial(_prompt, blenders[word], workload, blend, "ttft_s"),
            }
            cases += [Case({"operation": name, "codec": word}, run) for name, run in operations.items()]
        yield Group({"of": "speed"}, cases)


def _prompt(blender: Blender, workload: Workload, blend: BlendConfig, metric: str) -> Metrics:
    return {"time_s": time_prompt(blender, workload, blend)[0][metric]}


def _record(blender: Blender, ids: tuple[int, ...]) -> ChunkRecord:
    record = read_record(blender.store, blender.key(ids))
    assert record is not None
    return record


def _decoded(record: ChunkRecord) -> ChunkKV:
    kv = decode(record)
    return ChunkKV(kv.keys, kv.values)


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


def _rates(tokens: int, raw_bytes: int, run: Callable[[], float]) -> Metrics:
    seconds = run()
    return {"time_s": seconds, "raw_mb_per_s": raw_bytes / seconds / 1e6, "tokens_per_s": tokens / seconds}


def _sizes(coded: Sequence[ChunkRecord], tables: int, tokens: int, raw_bytes: int) -> dict[str, float]:
    stored = sum(record.n_bytes + len(record.header_bytes()) for record in coded)
    return {
        "bytes_per_token": stored / tokens,
        "compression": raw_bytes / stored,
        "bits_per_element": 8 * stored * coded[0].shape.dtype.itemsize / raw_bytes,
        "tables_bytes": tables,
    }


def _size(sizes: dict[str, float], chunk_tokens: int) -> Metrics:
    shared = {
        f"with_tables_{n}": sizes["bytes_per_token"] + sizes["tables_bytes"] / n / chunk_tokens
        for n in SHARED_BY
    }
    return {**sizes, **shared}


TABLES = (
    table(
        "Size; bytes per token with tables that several chunks share",
        count("x smaller", "compression", digits=2),
        count("bits per element", "bits_per_element", digits=3),
        count("bytes per token", "bytes_per_token"),
        *(count(f"{n:,} chunks", f"with_tables_{n}") for n in SHARED_BY),
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
