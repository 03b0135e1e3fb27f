"""`blendserve bench codec`: what each codec and level takes, and how long coding, decoding and a first
token take with it.

Every byte of a chunk's records counts: segments with their scales, the header with its lengths and checksums. Tables are
told apart, and what they add to a token where so many chunks share them. Encoding is in one thread, as beside precompute.
Decoding is layer by layer, the chunks side by side in as many threads as prefilling has, without the store and with
nothing beside it; prefilling is that of a whole prompt of these chunks. TTFT is that of one method over the same prompt
from a store of each codec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from blendserve.bench.config import CodecBenchConfig
from blendserve.bench.figures import Figures, Update, interleaved, ratios, spread
from blendserve.bench.harness import SPARE_BYTES, run_blender, scratch
from blendserve.bench.machine import where
from blendserve.bench.workload import Workload, make_workload
from blendserve.blend.blender import Blender
from blendserve.blend.priors import Priors
from blendserve.config import BlendConfig, Config
from blendserve.core import ChunkKV, TokenIds
from blendserve.engine.calibration import chunks_of, fit
from blendserve.engine.own_words import own_words
from blendserve.engine.prompt import PromptBuilder
from blendserve.kernels import team
from blendserve.models.loader import Reader, load_reader
from blendserve.registry import CODECS, parse_codec
from blendserve.retrieve import read_documents
from blendserve.store import LMDBStore, record
from blendserve.store.codecs.base import ChunkShape, Codec
from blendserve.timing import Clock

Say = Callable[[str], None]
SHARED_BY = (1_000, 100_000)  # chunks that one set of tables serves
RAW = CODECS.default


@dataclass(frozen=True)
class Contestant:
    """One codec at one level, and a store that it wrote."""

    word: str
    codec: Codec
    blender: Blender
    tables_bytes: int

    def encode(self, kvs: Sequence[ChunkKV]) -> float:
        """-> seconds"""
        clock = Clock()
        for kv in kvs:
            self.codec.encode(kv)
        return clock.elapsed()

    def decode(self, kvs: Sequence[ChunkKV], coded: Sequence[record.Coded]) -> float:
        """-> seconds, a layer of all chunks before the next one, as a request does"""
        clock = Clock()
        decoders = [self.codec.decoder(ChunkShape.of(kv)) for kv in kvs]
        with ThreadPoolExecutor(min(torch.get_num_threads(), len(kvs)), initializer=team.alone) as pool:
            for l in range(len(kvs[0].keys)):
                segments = (chunk.segments[l] for chunk in coded)
                list(pool.map(lambda decoder, segment: decoder.layer(l, segment), decoders, segments))  # noqa: B023
        return clock.elapsed()


def measure(
    config: CodecBenchConfig, say: Say = lambda text: None, update: Update = lambda done, total: None
) -> Figures:
    """Everything that the bench prints. Raises ConfigError, CorpusError, InputError, ModelError, StoreError."""
    words, blend = config.words, config.variant.blend
    reader = load_reader(config.reader, say)
    shape = (config.chunks, config.chunk_tokens, config.suffix_tokens)
    workload = make_workload(reader, *shape, config.seed)
    with scratch(config.folder) as folder, ExitStack() as stores:
        raw = _contestant(RAW, reader, workload, folder, config, stores, {}, say)
        kvs = [_kv(raw.blender, ids) for ids in workload.chunks]
        tables: dict[str, bytes] = {}
        others = [
            _contestant(word, reader, workload, folder, config, stores, tables, say)
            for word in words
            if word != RAW
        ]
        contestants = [raw, *others]
        coded = {c.word: [_coded(c, ids) for ids in workload.chunks] for c in contestants}
        calls: dict[str, Callable[[], float]] = {"prefill": partial(_prefill, raw.blender, workload)}
        for c in contestants:
            calls[f"encode {c.word}"] = partial(c.encode, kvs)
            calls[f"decode {c.word}"] = partial(c.decode, kvs, coded[c.word])
            calls[f"ttft {c.word}"] = partial(_ttft, c.blender, workload, blend)
        took = interleaved(calls, config.repeats, update)
    tokens = sum(kv.n_tokens for kv in kvs)
    raw_bytes = sum(kv.n_bytes for kv in kvs)
    return {
        "bench": "codec",
        **where(config, reader),
        "method": config.variant.name,
        "tokens": tokens,
        "raw_bytes": raw_bytes,
        "prefill": spread(took["prefill"]),
        "codecs": {
            c.word: {
                **_sizes(c, kvs, coded[c.word], config.chunk_tokens),
                **_speeds(c.word, took, tokens, raw_bytes),
            }
            for c in contestants
        },
    }


def _contestant(
    word: str,
    reader: Reader,
    workload: Workload,
    folder: Path,
    config: CodecBenchConfig,
    stores: ExitStack,
    tables: dict[str, bytes],
    say: Say,
) -> Contestant:
    """With the KV of the workload in a store of its own. tables: those that were fitted already, by codec."""
    name, level = parse_codec(word)
    prompts, made = workload.prompts, CODECS.load(name)
    payload = len(workload.prompt) * reader.adapter.kv_bytes_per_token
    store = stores.enter_context(LMDBStore(folder / word, payload + SPARE_BYTES))
    if made.needs_tables and name not in tables:
        say(f"Fitting tables of {name}")
        hash = fit(name, _text(config, reader, prompts), reader, prompts, store)
        tables[name] = store.tables(hash) or b""
    raw = tables[name] if made.needs_tables else b""
    if made.needs_tables:
        store.put_tables(name, reader.fingerprint, raw)
    codec = made.with_tables(level, raw)
    store.write_by(codec)
    blender = Blender(reader.adapter, reader.fingerprint, store, prompts.prefix, prompts.kv_context)
    blender.priors.use(Priors.of_nothing(reader.adapter))
    say(f"Storing the KV of {config.chunks} chunks by {word}")
    blender.precompute(workload.chunks)
    return Contestant(word, codec, blender, len(raw))


def _text(config: CodecBenchConfig, reader: Reader, prompts: PromptBuilder) -> Sequence[TokenIds]:
    """What tables are fitted on."""
    if config.text is None:
        return own_words(reader, config.fit_tokens)
    return chunks_of(read_documents(config.text), config.fit_tokens, Config(), prompts)


def _kv(blender: Blender, ids: tuple[int, ...]) -> ChunkKV:
    """As it was computed: out of the raw store."""
    coded = blender.store.coded(blender.key(ids))
    assert coded is not None
    decoder = CODECS.load(RAW).with_tables(0).decoder(coded.shape)
    layers = [decoder.layer(l, segment) for l, segment in enumerate(coded.segments)]
    return ChunkKV(*(torch.stack(part) for part in zip(*layers, strict=True)))


def _coded(contestant: Contestant, ids: tuple[int, ...]) -> record.Coded:
    coded = contestant.blender.store.coded(contestant.blender.key(ids))
    assert coded is not None
    return coded


def _prefill(blender: Blender, workload: Workload) -> float:
    return run_blender(blender, workload, BlendConfig(method="full")).prefill


def _ttft(blender: Blender, workload: Workload, blend: BlendConfig) -> float:
    return run_blender(blender, workload, blend).ttft


def _sizes(
    contestant: Contestant, kvs: Sequence[ChunkKV], coded: Sequence[record.Coded], chunk_tokens: int
) -> Figures:
    tokens, key = sum(kv.n_tokens for kv in kvs), contestant.blender.key((0,))
    elements = sum(2 * kv.keys.numel() for kv in kvs)
    headers = [record.seal(key, chunk) for chunk in coded]
    stored = sum(header.n_bytes + len(record.encode_header(key, header)) for header in headers)
    per_token = stored / tokens
    with_tables = {n: per_token + contestant.tables_bytes / (n * chunk_tokens) for n in SHARED_BY}
    return {
        "bytes": stored,
        "bytes_per_token": per_token,
        "bits_per_element": 8 * stored / elements,
        "smaller": sum(kv.n_bytes for kv in kvs) / stored,
        "tables_bytes": contestant.tables_bytes,
        "bytes_per_token_with_tables": {f"{n} chunks": size for n, size in with_tables.items()},
    }


def _speeds(word: str, took: dict[str, list[float]], tokens: int, raw_bytes: int) -> Figures:
    figures: Figures = {}
    for what in ("encode", "decode"):
        seconds = took[f"{what} {word}"]
        figures[what] = {
            "seconds": spread(seconds),
            "raw_mb_per_second": spread([raw_bytes / s / 1e6 for s in seconds]),
            "tokens_per_second": spread([tokens / s for s in seconds]),
        }
    figures["decode_share_of_prefill"] = ratios(took[f"decode {word}"], took["prefill"])
    figures["ttft"] = spread(took[f"ttft {word}"])
    figures["ttft_of_raw"] = ratios(took[f"ttft {word}"], took[f"ttft {RAW}"])
    return figures
