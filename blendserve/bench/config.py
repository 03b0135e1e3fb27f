"""What each bench is asked for: checked before anything is loaded; the command line takes its defaults from here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from blendserve.config import (
    BlendConfig,
    Positive,
    Ratio,
    ReaderConfig,
    RetrieveConfig,
    Section,
    StoreKindName,
)
from blendserve.errors import ConfigError
from blendserve.evaluate.methods import FULL, TRANSFORMERS, MethodSpec, parse_methods
from blendserve.registry import (
    BENCHED,
    CODECS,
    DELIVERED_CODECS,
    SENT_CODECS,
    SHARED_STORE,
    codec_word,
    every_codec,
    parse_codec,
)


class BenchConfig(ReaderConfig):
    """What all benches share: a reader, and how it is measured."""

    repeats: Positive = Field(5, description="Number of measured rounds.")
    seed: int = Field(0, description="Random seed of the text, and of policies that sample.")
    folder: Path | None = Field(
        None, description="Folder for temporary stores; the system's temporary folder if not set."
    )

    @property
    def reader(self) -> ReaderConfig:
        return ReaderConfig(**self.model_dump(include=set(ReaderConfig.model_fields)))


class TtftConfig(BenchConfig):
    """One prompt, from text to first token."""

    chunks: Positive = Field(6, description="Number of chunks in the prompt.")
    chunk_tokens: Positive = Field(512, description="Length of a chunk, in tokens.")
    suffix_tokens: Positive = Field(40, description="Length of the prompt after the chunks, in tokens.")
    methods: tuple[str, ...] = Field(
        BENCHED,
        description="Methods to compare, written as for `evaluate`, with transformers, full, prefix and "
        "reuse.",
    )
    ratios: tuple[Ratio, ...] = Field((0.05, 0.15), description="Recompute ratios of methods that name none.")
    cold: bool = Field(False, description="Measure from a cold page cache, too.")
    throttle: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (), description="Read rates of a throttled store to measure, too, in GB/s."
    )
    memory: bool = Field(False, description="Measure the peak memory of a request, too.")

    @property
    def variants(self) -> tuple[MethodSpec, ...]:
        """Everything that is compared, transformers first. Raises ConfigError."""
        words = (TRANSFORMERS, FULL, "prefix", "reuse", *self.methods)
        found = parse_methods(words, self.ratios, self.seed)
        return tuple(sorted(found, key=lambda v: v.kind != TRANSFORMERS))


class DocumentConfig(BenchConfig):
    """A long document that was read before, and a question about it."""

    document_tokens: Positive = Field(5000, description="Length of the document, in tokens.")
    question_tokens: Positive = Field(100, description="Length of the question, in tokens.")
    manual: bool = Field(True, description="Measure a document as long as the model's context, too.")
    repeats: Positive = Field(3, description="Number of measured rounds.")

    @property
    def variants(self) -> tuple[MethodSpec, ...]:
        """Full prefill, by transformers and ours, and the stored document."""
        return parse_methods((TRANSFORMERS, FULL, "prefix"), ())


class ScalingConfig(BenchConfig):
    """How cost grows with context, ratio and chunk count."""

    contexts: tuple[Positive, ...] = Field(
        (512, 1024, 2048, 3072, 4096, 6144, 7680), description="Context lengths to measure, in tokens."
    )
    chunk_tokens: Positive = Field(
        512, description="Length of a chunk where the number of chunks is not varied, in tokens."
    )
    ratios: tuple[Ratio, ...] = Field(
        (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0), description="Recompute ratios to measure."
    )
    counts: tuple[Positive, ...] = Field((3, 6, 12, 24, 48), description="Numbers of chunks to measure.")
    context: Positive = Field(
        3072, description="Context length where ratio or number of chunks is varied, in tokens."
    )
    usual: tuple[Ratio, ...] = Field(
        (0.05, 0.15), description="Recompute ratios where the ratio is not varied."
    )
    methods: tuple[str, ...] = Field(
        BENCHED,
        description="Methods to compare, written as for `evaluate`, with transformers, full, prefix and "
        "reuse.",
    )
    suffix_tokens: Positive = Field(40, description="Length of the prompt after the chunks, in tokens.")
    repeats: Positive = Field(3, description="Number of measured rounds of a cell.")

    @property
    def cells(self) -> list[tuple[dict[str, str], TtftConfig]]:
        """The grid: what is varied, and the contest. Raises ConfigError."""
        usual = [
            self._cell("context", n, self._chunks(n, self.chunk_tokens), self.usual) for n in self.contexts
        ]
        ratios = self._cell("ratio", self.context, self._chunks(self.context, self.chunk_tokens), self.ratios)
        counts = [self._cell("chunks", self.context, n, self.usual) for n in self.counts]
        return [*usual, ratios, *counts]

    def _cell(
        self, varied: str, context: int, chunks: int, ratios: tuple[float, ...]
    ) -> tuple[dict[str, str], TtftConfig]:
        cell = TtftConfig(
            **self.model_dump(include=set(BenchConfig.model_fields)),
            chunks=chunks,
            chunk_tokens=self._chunks(context, chunks),
            suffix_tokens=self.suffix_tokens,
            methods=self.methods,
            ratios=ratios,
        )
        cell.variants  # noqa: B018  a wrong word is told before the first cell, not after hours
        return {"varied": varied}, cell

    @staticmethod
    def _chunks(context: int, tokens: int) -> int:
        if context % tokens:
            raise ConfigError(f"a context of {context:,} tokens cannot be cut into equal parts by {tokens}")
        return context // tokens


class DecodeBenchConfig(BenchConfig):
    """Tokens behind a long context."""

    context: Positive = Field(3072, description="Context length, in tokens.")
    new_tokens: int = Field(
        64, ge=2, description="Number of tokens to decode; the time from the first to the last is measured."
    )
    repeats: Positive = Field(3, description="Number of measured rounds.")


class PrecomputeConfig(BenchConfig):
    """Chunks into a store."""

    chunks: Positive = Field(12, description="Number of chunks to store.")
    chunk_tokens: Positive = Field(512, description="Length of a chunk, in tokens.")
    repeats: Positive = Field(3, description="Number of measured rounds.")


class StoreBenchConfig(BenchConfig):
    """Records of chunk KV, written and read."""

    chunks: Positive = Field(24, description="Number of chunks to write and read.")
    chunk_tokens: Positive = Field(512, description="Length of a chunk, in tokens.")


class CodecBenchConfig(BenchConfig):
    """One prompt's chunks by every codec."""

    codecs: tuple[str, ...] = Field(
        (), description="Codecs to measure, written name or name@level; all codecs and levels if not set."
    )
    chunks: Positive = Field(6, description="Number of chunks in the prompt.")
    chunk_tokens: Positive = Field(512, description="Length of a chunk, in tokens.")
    suffix_tokens: Positive = Field(40, description="Length of the prompt after the chunks, in tokens.")
    method: str = Field(
        f"{BENCHED[0]}@0.15",
        description="Method for the time to first token, written as for `evaluate`.",
    )
    text: Path | None = Field(
        None,
        description="File or folder with the text that tables are fitted on; text sampled from the model "
        "if not set.",
    )
    fit_tokens: Positive = Field(
        16_384, description="Length of the text that tables are fitted on, in tokens."
    )

    @property
    def words(self) -> tuple[str, ...]:
        """Every codec and level that is measured, uncoded first. Raises ConfigError."""
        return tuple(dict.fromkeys((CODECS.default, *_codec_words(self.codecs))))

    @property
    def variant(self) -> MethodSpec:
        """Raises ConfigError."""
        return parse_methods((self.method,), ())[-1]


class CrowdedConfig(BenchConfig):
    """One prompt and its decoding beside other work."""

    chunks: Positive = Field(6, description="Number of chunks in the prompt.")
    chunk_tokens: Positive = Field(512, description="Length of a chunk, in tokens.")
    suffix_tokens: Positive = Field(40, description="Length of the prompt after the chunks, in tokens.")
    new_tokens: int = Field(32, ge=2, description="Number of tokens to decode.")
    methods: tuple[str, ...] = Field(
        BENCHED, description="Methods to compare, written as for `evaluate`, with transformers and full."
    )
    ratios: tuple[Ratio, ...] = Field((0.15,), description="Recompute ratios of methods that name none.")
    busy: tuple[Positive, ...] = Field(
        (1, 2, 4), description="Numbers of busy processes to run at the same time."
    )
    environments: tuple[Annotated[str, Field(pattern=r"^\w+=\S*( \w+=\S*)*$")], ...] = Field(
        (),
        description="Environment variables of a further wait policy to measure, such as "
        '"OMP_WAIT_POLICY=passive".',
    )
    ours_alone: bool = Field(
        False, description="Skip libgomp's default wait policy, which takes most of the time."
    )
    repeats: Positive = Field(3, description="Number of measured rounds.")

    @property
    def variants(self) -> tuple[MethodSpec, ...]:
        """What brings a first token, transformers first. Raises ConfigError."""
        return parse_methods((TRANSFORMERS, FULL, *self.methods), self.ratios, self.seed)


class EmbedConfig(BenchConfig):
    """Passages to vectors."""

    embedder: str = Field(
        RetrieveConfig().embedder,
        description="Embedding model: a bundled name, a folder or a Hugging Face id.",
    )
    passages: Positive = Field(200, description="Number of passages per round if there is no data set.")
    passage_tokens: Positive = Field(
        120, description="Maximum length of these passages, in tokens of the embedding model."
    )
    dataset: Path | None = Field(
        None,
        description="Data set whose corpus is embedded, an equal part per round; recall is measured, too.",
    )
    corpus: Path | None = Field(None, description="Corpus file of the data set.")
    top_k: Positive = Field(10, description="Number of retrieved passages that recall is measured over.")
    repeats: Positive = Field(5, description="Number of measured rounds.")


class AutoBenchConfig(BenchConfig):
    """Method auto against every fixed one."""

    repeats: Positive = Field(3, description="Number of measured rounds of a cell; doubtful cells get more.")
    tolerance: float = Field(
        0.10, ge=0.0, description="Fraction that auto may be slower than the best fixed method."
    )


class NearConfig(BenchConfig):
    """Prompts with edited passages."""

    chunks: Positive = Field(6, description="Number of chunks in the prompt.")
    chunk_tokens: Positive = Field(512, description="Length of a chunk, in tokens.")
    suffix_tokens: Positive = Field(40, description="Length of the prompt after the chunks, in tokens.")
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.05, description="Fraction of a passage's words to edit."
    )
    ratio: Ratio = Field(
        BlendConfig().share, description="Fraction of the cached context tokens to recompute."
    )
    signatures: Positive = Field(1_000_000, description="Number of synthetic chunks to search.")


class FaultsConfig(BenchConfig):
    """Requests over a shared store whose server fails."""

    requests: Positive = Field(100, description="Number of requests under each fault.")
    chunks: Positive = Field(4, description="Number of chunks in the prompt.")
    chunk_tokens: Positive = Field(64, description="Length of a chunk, in tokens.")
    pool: Positive = Field(12, description="Number of chunks that prompts are drawn from.")
    deadline_s: float = Field(0.5, gt=0, description="Deadline for the server per request, in seconds.")
    kinds: tuple[str, ...] = Field((), description="Faults to test; all if not set.")


class LinkConfig(BenchConfig):
    """A prompt whose chunks lie on a server behind a network."""

    round_trips_ms: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (0.0, 5.0, 50.0), description="Round-trip times to measure, in milliseconds."
    )
    rates_gbit: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (0.1, 1.0, 10.0), description="Link rates to measure, in Gbit/s."
    )
    codecs: tuple[str, ...] = Field(
        SENT_CODECS,
        description="Codecs of the stored chunks, written name or name@level.",
    )
    chunks: Positive = Field(6, description="Number of chunks in the prompt.")
    chunk_tokens: Positive = Field(256, description="Length of a chunk, in tokens.")
    suffix_tokens: Positive = Field(40, description="Length of the prompt after the chunks, in tokens.")
    method: str = Field(f"{BENCHED[0]}@0.15", description="Blending method, written as for `evaluate`.")
    text: Path | None = Field(
        None,
        description="File or folder with the text that tables are fitted on; text sampled from the model "
        "if not set.",
    )
    fit_tokens: Positive = Field(
        16_384, description="Length of the text that tables are fitted on, in tokens."
    )
    in_flight: Positive = Field(
        3, description="Number of requests announced ahead of time when throughput is measured."
    )
    requests: Positive = Field(8, description="Number of requests that throughput is measured over.")
    repeats: Positive = Field(3, description="Number of measured rounds.")

    @property
    def words(self) -> tuple[str, ...]:
        """Every codec and level, as they are written. Raises ConfigError."""
        return _codec_words(self.codecs)

    @property
    def variant(self) -> MethodSpec:
        """Raises ConfigError."""
        return parse_methods((self.method,), ())[-1]


class DeliveryConfig(BenchConfig):
    """A prompt whose chunks a service delivers, over a link whose rate changes."""

    rates_gbit: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (0.1, 0.3, 1.0, 3.0, 10.0), description="Rates of constant links to replay, in Gbit/s."
    )
    traces: tuple[str, ...] = Field(
        ("down", "up", "sawtooth", "mobile", "dead"), description="Traces of changing links to replay, too."
    )
    round_trip_ms: float = Field(1.0, ge=0, description="Round-trip time of the link, in milliseconds.")
    codecs: tuple[str, ...] = Field(
        DELIVERED_CODECS,
        description="Levels that the chunks are published at, written name or name@level, uncoded first.",
    )
    chunks: Positive = Field(6, description="Number of chunks in the prompt.")
    chunk_tokens: Positive = Field(512, description="Length of a chunk, in tokens.")
    suffix_tokens: Positive = Field(40, description="Length of the prompt after the chunks, in tokens.")
    deadline_s: float = Field(
        10.0, gt=0, le=60, description="Deadline for the delivery service per request, in seconds."
    )
    method: str = Field(f"{BENCHED[0]}@0.15", description="Blending method, written as for `evaluate`.")
    fit_tokens: Positive = Field(
        2_048, description="Length of the text, sampled from the model, that tables are fitted on, in tokens."
    )
    repeats: Positive = Field(3, description="Number of measured rounds.")

    @property
    def words(self) -> tuple[str, ...]:
        """Every level, uncoded first. Raises ConfigError."""
        return tuple(dict.fromkeys((CODECS.default, *_codec_words(self.codecs))))

    @property
    def variant(self) -> MethodSpec:
        """Raises ConfigError."""
        return parse_methods((self.method,), ())[-1]


class ServingConfig(Section):
    """Load on a server."""

    out: Path = Field(Path("runs/serving"), description="Folder for results.")
    url: str | None = Field(None, description="URL of a running server; a server is started if not set.")
    key: str | None = Field(None, description="API key for the server at the URL.")
    index: Path = Field(
        Path("indexes/demo"), description="Folder of the index whose passages are asked about."
    )
    pool: Positive = Field(
        20, description="Number of the index's longest passages that prompts are drawn from."
    )
    dataset: Path | None = Field(
        None,
        description="Questions file with a corpus in the same folder; an index of the corpus is built in "
        "OUT.",
    )
    questions: Positive = Field(56, description="Number of questions from the data set.")
    corpus_passages: Positive = Field(500, description="Number of the data set's passages in its index.")
    prepare: bool = Field(False, description="Build and precompute the data set's index without measuring.")
    passages: Positive = Field(6, description="Number of passages in a prompt.")
    ratio: Ratio | None = Field(None, description="Recompute ratio of blending; the server's own if not set.")
    new_tokens: Positive = Field(16, description="Length of an answer, in tokens.")
    clients: Positive = Field(8, description="Number of concurrent clients that saturate the server.")
    seconds: float = Field(60.0, gt=0, description="Duration of a cell, in seconds.")
    shares: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (0.5, 1.0, 2.0, 4.0),
        description="Offered loads, as fractions of full prefill's saturation throughput.",
    )
    minutes: float = Field(60.0, gt=0, description="Time after which no further cell starts, in minutes.")
    timeout: float = Field(
        120.0, gt=0, description="Time without an event after which a request counts as failed, in seconds."
    )


class HostileConfig(Section):
    """A server's ordinary clients beside a hostile one."""

    index: Path = Field(
        Path("indexes/demo"),
        description="Folder of the index to copy; an index of bundled text is built if it does not exist.",
    )
    clients: Positive = Field(3, description="Number of ordinary clients.")
    share: float = Field(
        0.4,
        gt=0,
        lt=1,
        description="Load of the ordinary clients, as a fraction of the server's sequential throughput.",
    )
    passages: Positive = Field(3, description="Number of passages to retrieve for a question.")
    new_tokens: Positive = Field(4, description="Length of an answer, in tokens.")
    seconds: float = Field(20.0, gt=0, description="Duration of a window, in seconds.")
    rounds: Positive = Field(
        3, description="Number of pairs of windows, without and with the hostile client."
    )
    kinds: tuple[str, ...] = Field(
        (), description="Kinds of requests that the hostile client sends in turn; all if not set."
    )
    connections: Positive = Field(4, description="Number of concurrent requests of the hostile client.")
    timeout: float = Field(
        120.0, gt=0, description="Time without an event after which a request counts as failed, in seconds."
    )
    folder: Path | None = Field(
        None, description="Folder for temporary indexes; the system's temporary folder if not set."
    )


class SharingConfig(BenchConfig):
    """Users with overlapping questions, and their caches."""

    users: Positive = Field(4, description="Number of users.")
    engines: Positive = Field(2, description="Number of engine processes that serve them.")
    questions: Positive = Field(20, description="Number of questions per user.")
    passages: Positive = Field(4, description="Number of passages in a prompt.")
    chunk_tokens: Positive = Field(256, description="Length of a chunk, in tokens.")
    pool: Positive = Field(32, description="Number of passages that prompts are drawn from.")
    zipf: float = Field(
        1.0,
        ge=0.0,
        description="Zipf exponent of the passages' popularity; 0 makes all equally popular.",
    )
    overlap: Ratio = Field(
        0.7,
        description="Fraction of passages drawn by the popularity that all users share; the rest by a "
        "user's own.",
    )
    memory: float = Field(
        0.75, gt=0, description="Total capacity of the caches, as a fraction of the pool's KV."
    )
    store: StoreKindName = Field(
        SHARED_STORE,
        description="Kind of store of the caches; a server is started for a kind that needs one.",
    )
    method: str = Field(f"{BENCHED[0]}@0.15", description="Method, written as for `evaluate`.")
    threads: Positive | None = Field(1, description="Number of CPU threads per process.")

    @property
    def variant(self) -> MethodSpec:
        """Raises ConfigError."""
        return parse_methods((self.method,), ())[-1]


class StartConfig(BenchConfig):
    """Whole processes, from start to exit."""

    passages: Positive = Field(3, description="Number of passages to retrieve for the question.")
    chunk_tokens: Positive = Field(512, description="Maximum length of a chunk, in tokens.")
    new_tokens: Positive = Field(16, description="Maximum length of an answer, in tokens.")
    repeats: Positive = Field(3, description="Number of measured rounds.")


def _codec_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """Codecs and levels in full, each once; all there are for none. Raises ConfigError."""
    try:
        asked = [parse_codec(word) for word in words] or every_codec()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return tuple(dict.fromkeys(codec_word(*pair) for pair in asked))
