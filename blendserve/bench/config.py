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
from blendserve.evaluate.variants import FULL, TRANSFORMERS, Variant, variants
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

    repeats: Positive = Field(5, description="Measure so many rounds.")
    seed: int = Field(0, description="Draw the text by this seed, and tokens where a policy draws.")
    folder: Path | None = Field(
        None, description="Put stores here while it runs; the system's temporary folder if none is given."
    )

    @property
    def reader(self) -> ReaderConfig:
        return ReaderConfig(**self.model_dump(include=set(ReaderConfig.model_fields)))


class TtftConfig(BenchConfig):
    """One prompt, from text to first token."""

    chunks: Positive = Field(6, description="Give the prompt so many chunks.")
    chunk_tokens: Positive = Field(512, description="Give a chunk so many tokens.")
    suffix_tokens: Positive = Field(40, description="Put so many tokens behind the chunks.")
    methods: tuple[str, ...] = Field(
        BENCHED,
        description="Compare these, in words as `evaluate` has them, beside transformers, full, prefix and reuse.",
    )
    ratios: tuple[Ratio, ...] = Field(
        (0.05, 0.15), description="Give methods that name no ratio each of these."
    )
    cold: bool = Field(False, description="Measure from a cold page cache, too.")
    throttle: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (), description="Measure from a store that gives so many GB/s, too."
    )
    memory: bool = Field(False, description="Measure the peak memory of a request, too.")

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Everything that is compared, transformers first. Raises ConfigError."""
        words = (TRANSFORMERS, FULL, "prefix", "reuse", *self.methods)
        found = variants(words, self.ratios, self.seed)
        return tuple(sorted(found, key=lambda v: v.kind != TRANSFORMERS))


class DocumentConfig(BenchConfig):
    """A long document that was read before, and a question about it."""

    document_tokens: Positive = Field(5000, description="Give the document so many tokens.")
    question_tokens: Positive = Field(100, description="Put so many tokens behind it.")
    manual: bool = Field(True, description="Measure a document as long as the reader's context allows, too.")
    repeats: Positive = Field(3, description="Measure so many rounds.")

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Full prefill, by transformers and ours, and the stored document."""
        return variants((TRANSFORMERS, FULL, "prefix"), ())


class ScalingConfig(BenchConfig):
    """How cost grows with context, ratio and chunk count."""

    contexts: tuple[Positive, ...] = Field(
        (512, 1024, 2048, 3072, 4096, 6144, 7680), description="Vary the context over so many tokens."
    )
    chunk_tokens: Positive = Field(
        512, description="Give a chunk so many tokens where their number is not varied."
    )
    ratios: tuple[Ratio, ...] = Field(
        (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0), description="Vary the ratio over these."
    )
    counts: tuple[Positive, ...] = Field(
        (3, 6, 12, 24, 48), description="Vary the number of chunks over these."
    )
    context: Positive = Field(
        3072, description="Give the context so many tokens where ratio or number of chunks is varied."
    )
    usual: tuple[Ratio, ...] = Field(
        (0.05, 0.15), description="Use these ratios where the ratio is not varied."
    )
    methods: tuple[str, ...] = Field(
        BENCHED, description="Compare these, in words as `evaluate` has them, beside the usual ones."
    )
    suffix_tokens: Positive = Field(40, description="Put so many tokens behind the chunks.")
    repeats: Positive = Field(3, description="Measure so many rounds of a cell.")

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

    context: Positive = Field(3072, description="Decode behind so many tokens.")
    new_tokens: int = Field(
        64, ge=2, description="Decode so many tokens; what is timed lies between the first and the last."
    )
    repeats: Positive = Field(3, description="Measure so many rounds.")


class PrecomputeConfig(BenchConfig):
    """Chunks into a store."""

    chunks: Positive = Field(12, description="Store so many chunks.")
    chunk_tokens: Positive = Field(512, description="Give a chunk so many tokens.")
    repeats: Positive = Field(3, description="Measure so many rounds.")


class StoreBenchConfig(BenchConfig):
    """Records of chunk KV, written and read."""

    chunks: Positive = Field(24, description="Put and get so many chunks.")
    chunk_tokens: Positive = Field(512, description="Give a chunk so many tokens.")


class CodecBenchConfig(BenchConfig):
    """One prompt's chunks by every codec."""

    codecs: tuple[str, ...] = Field(
        (), description="Measure these, written name or name@level; all codecs and levels if none is given."
    )
    chunks: Positive = Field(6, description="Give the prompt so many chunks.")
    chunk_tokens: Positive = Field(512, description="Give a chunk so many tokens.")
    suffix_tokens: Positive = Field(40, description="Put so many tokens behind the chunks.")
    method: str = Field(
        f"{BENCHED[0]}@0.15",
        description="Measure the time to the first token by this method, in a word as `evaluate` has it.",
    )
    text: Path | None = Field(
        None,
        description="Fit tables on this text, a file or folder; on what the reader says by itself, if none.",
    )
    fit_tokens: Positive = Field(16_384, description="Fit tables on so many tokens.")

    @property
    def words(self) -> tuple[str, ...]:
        """Every codec and level that is measured, uncoded first. Raises ConfigError."""
        return tuple(dict.fromkeys((CODECS.default, *_codec_words(self.codecs))))

    @property
    def variant(self) -> Variant:
        """Raises ConfigError."""
        return variants((self.method,), ())[-1]


class CrowdedConfig(BenchConfig):
    """One prompt and its decoding beside other work."""

    chunks: Positive = Field(6, description="Give the prompt so many chunks.")
    chunk_tokens: Positive = Field(512, description="Give a chunk so many tokens.")
    suffix_tokens: Positive = Field(40, description="Put so many tokens behind the chunks.")
    new_tokens: int = Field(32, ge=2, description="Decode so many tokens.")
    methods: tuple[str, ...] = Field(
        BENCHED, description="Compare these, in words as `evaluate` has them, beside transformers and full."
    )
    ratios: tuple[Ratio, ...] = Field((0.15,), description="Give methods that name no ratio each of these.")
    busy: tuple[Positive, ...] = Field((1, 2, 4), description="Run beside so many busy processes.")
    environments: tuple[Annotated[str, Field(pattern=r"^\w+=\S*( \w+=\S*)*$")], ...] = Field(
        (), description='Measure another way to wait, too, such as "OMP_WAIT_POLICY=passive".'
    )
    ours_alone: bool = Field(
        False, description="Leave out libgomp's own way to wait, which takes most of the time."
    )
    repeats: Positive = Field(3, description="Measure so many rounds.")

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What brings a first token, transformers first. Raises ConfigError."""
        return variants((TRANSFORMERS, FULL, *self.methods), self.ratios, self.seed)


class EmbedConfig(BenchConfig):
    """Passages to vectors."""

    embedder: str = Field(
        RetrieveConfig().embedder, description="Embed with this model: a bundled name, a folder or a hub id."
    )
    passages: Positive = Field(200, description="Embed so many passages a round, where there is no data set.")
    passage_tokens: Positive = Field(120, description="Cut them to so many tokens of the embedder, at most.")
    dataset: Path | None = Field(
        None, description="Embed the corpus of this data set, an equal part a round, and measure recall, too."
    )
    corpus: Path | None = Field(None, description="Read the data set's corpus from this file.")
    top_k: Positive = Field(10, description="Count what a question needs among so many nearest passages.")
    repeats: Positive = Field(5, description="Measure so many rounds.")


class AutoBenchConfig(BenchConfig):
    """Method auto against every fixed one."""

    repeats: Positive = Field(3, description="Measure so many rounds of a cell; one in doubt gets more.")
    tolerance: float = Field(0.10, ge=0.0, description="Let auto be slower than the best by this share.")


class NearConfig(BenchConfig):
    """Prompts with edited passages."""

    chunks: Positive = Field(6, description="Give the prompt so many chunks.")
    chunk_tokens: Positive = Field(512, description="Give a chunk so many tokens.")
    suffix_tokens: Positive = Field(40, description="Put so many tokens behind the chunks.")
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.05, description="Edit this share of a passage's words."
    )
    ratio: Ratio = Field(
        BlendConfig().share, description="Recompute this share of the context's tokens that were found."
    )
    signatures: Positive = Field(1_000_000, description="Look among so many synthetic chunks.")


class FaultsConfig(BenchConfig):
    """Requests over a shared store whose server fails."""

    requests: Positive = Field(100, description="Ask so many times under each fault.")
    chunks: Positive = Field(4, description="Give the prompt so many chunks.")
    chunk_tokens: Positive = Field(64, description="Give a chunk so many tokens.")
    pool: Positive = Field(12, description="Draw a prompt's chunks from so many.")
    deadline_s: float = Field(0.5, gt=0, description="Wait no longer than so many seconds for the server.")
    kinds: tuple[str, ...] = Field((), description="Try these faults; all, if none is named.")


class LinkConfig(BenchConfig):
    """A prompt whose chunks lie on a server behind a network."""

    round_trips_ms: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (0.0, 5.0, 50.0), description="Measure round trips of so many milliseconds."
    )
    rates_gbit: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (0.1, 1.0, 10.0), description="Measure networks of so many Gbit/s."
    )
    codecs: tuple[str, ...] = Field(
        SENT_CODECS,
        description="Store the chunks by these codecs, written name or name@level.",
    )
    chunks: Positive = Field(6, description="Give the prompt so many chunks.")
    chunk_tokens: Positive = Field(256, description="Give a chunk so many tokens.")
    suffix_tokens: Positive = Field(40, description="Put so many tokens behind the chunks.")
    method: str = Field(
        f"{BENCHED[0]}@0.15", description="Blend by this method, in a word as `evaluate` has it."
    )
    text: Path | None = Field(
        None,
        description="Fit tables on this text, a file or folder; on what the reader says by itself, if none.",
    )
    fit_tokens: Positive = Field(16_384, description="Fit tables on so many tokens.")
    in_flight: Positive = Field(3, description="Let so many requests be known ahead, to measure throughput.")
    requests: Positive = Field(8, description="Measure throughput over so many requests.")
    repeats: Positive = Field(3, description="Measure so many rounds.")

    @property
    def words(self) -> tuple[str, ...]:
        """Every codec and level, as they are written. Raises ConfigError."""
        return _codec_words(self.codecs)

    @property
    def variant(self) -> Variant:
        """Raises ConfigError."""
        return variants((self.method,), ())[-1]


class DeliveryConfig(BenchConfig):
    """A prompt whose chunks a service delivers, over a link whose rate changes."""

    rates_gbit: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (0.1, 0.3, 1.0, 3.0, 10.0), description="Replay constant links of so many Gbit/s."
    )
    traces: tuple[str, ...] = Field(
        ("down", "up", "sawtooth", "mobile", "dead"), description="Replay these links that change, too."
    )
    round_trip_ms: float = Field(1.0, ge=0, description="Give the link a round trip of so many milliseconds.")
    codecs: tuple[str, ...] = Field(
        DELIVERED_CODECS,
        description="Publish the chunks at these levels, written name or name@level, uncoded first.",
    )
    chunks: Positive = Field(6, description="Give the prompt so many chunks.")
    chunk_tokens: Positive = Field(512, description="Give a chunk so many tokens.")
    suffix_tokens: Positive = Field(40, description="Put so many tokens behind the chunks.")
    deadline_s: float = Field(
        10.0, gt=0, le=60, description="Wait no longer than so many seconds for the chunks of a request."
    )
    method: str = Field(
        f"{BENCHED[0]}@0.15", description="Blend by this method, in a word as `evaluate` has it."
    )
    fit_tokens: Positive = Field(2_048, description="Fit tables on so many tokens of the reader's own words.")
    repeats: Positive = Field(3, description="Measure so many rounds.")

    @property
    def words(self) -> tuple[str, ...]:
        """Every level, uncoded first. Raises ConfigError."""
        return tuple(dict.fromkeys((CODECS.default, *_codec_words(self.codecs))))

    @property
    def variant(self) -> Variant:
        """Raises ConfigError."""
        return variants((self.method,), ())[-1]


class ServingConfig(Section):
    """Load on a server."""

    out: Path = Field(Path("runs/serving"), description="Put results into this folder.")
    url: str | None = Field(
        None, description="Send requests to the server at this URL; one is started if none is given."
    )
    key: str | None = Field(None, description="Send this API key, where the server at the URL has keys.")
    index: Path = Field(Path("indexes/demo"), description="Ask about passages of the index in this folder.")
    pool: Positive = Field(20, description="Draw passages from so many of the index's longest ones.")
    dataset: Path | None = Field(
        None,
        description="Ask these questions, with a corpus beside them, over an index of it that is built in OUT.",
    )
    questions: Positive = Field(56, description="Ask the first so many questions of the data set.")
    corpus_passages: Positive = Field(
        500, description="Build the data set's index of so many of its passages."
    )
    prepare: bool = Field(
        False, description="Build and precompute the data set's index, and measure nothing."
    )
    passages: Positive = Field(6, description="Give a prompt so many passages.")
    ratio: Ratio | None = Field(
        None, description="Let blending recompute this share; the server's own ratio if none is given."
    )
    new_tokens: Positive = Field(16, description="Ask for answers of so many tokens.")
    clients: Positive = Field(8, description="Let so many clients ask at once to find saturation.")
    seconds: float = Field(60.0, gt=0, description="Measure a cell for so many seconds.")
    shares: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (0.5, 1.0, 2.0, 4.0), description="Offer loads of these shares of full prefill's saturation."
    )
    minutes: float = Field(60.0, gt=0, description="Begin no cell after so many minutes.")
    timeout: float = Field(
        120.0, gt=0, description="Count a request as failed after so many seconds without an event."
    )


class HostileConfig(Section):
    """A server's ordinary clients beside a hostile one."""

    index: Path = Field(
        Path("indexes/demo"),
        description="Ask about a copy of the index in this folder; about one of bundled text if there is none.",
    )
    clients: Positive = Field(3, description="Let so many ordinary clients ask.")
    share: float = Field(
        0.4, gt=0, lt=1, description="Let them ask for this share of what the server answers one by one."
    )
    passages: Positive = Field(3, description="Retrieve so many passages for a question.")
    new_tokens: Positive = Field(4, description="Ask for answers of so many tokens.")
    seconds: float = Field(20.0, gt=0, description="Measure a window for so many seconds.")
    rounds: Positive = Field(
        3, description="Measure so many pairs of windows, without the hostile client and with it."
    )
    kinds: tuple[str, ...] = Field(
        (), description="Let the hostile client send these kinds of requests in turns; all if none is given."
    )
    connections: Positive = Field(4, description="Let the hostile client send so many requests at a time.")
    timeout: float = Field(
        120.0, gt=0, description="Count a request as failed after so many seconds without an event."
    )
    folder: Path | None = Field(
        None, description="Put indexes here while it runs; the system's temporary folder if none is given."
    )


class SharingConfig(BenchConfig):
    """Users with overlapping questions, and their caches."""

    users: Positive = Field(4, description="Let so many users ask.")
    engines: Positive = Field(2, description="Answer them by so many engine processes.")
    questions: Positive = Field(20, description="Let each user ask so many questions.")
    passages: Positive = Field(4, description="Give a prompt so many passages.")
    chunk_tokens: Positive = Field(256, description="Give a chunk so many tokens.")
    pool: Positive = Field(32, description="Draw passages from so many.")
    zipf: float = Field(
        1.0,
        ge=0.0,
        description="Draw the n-th most popular passage 1 / n to this power as often as the first.",
    )
    overlap: Ratio = Field(
        0.7,
        description="Draw this share of passages by what all users ask for, the rest by a user's own taste.",
    )
    memory: float = Field(
        0.75, gt=0, description="Let all caches together hold this share of the KV of the pool."
    )
    store: StoreKindName = Field(
        SHARED_STORE,
        description="Keep the caches in stores of this kind; a server is started for them if it takes one.",
    )
    method: str = Field(
        f"{BENCHED[0]}@0.15", description="Answer by this method, in a word as `evaluate` has it."
    )
    threads: Positive | None = Field(1, description="Use so many CPU threads in each process.")

    @property
    def variant(self) -> Variant:
        """Raises ConfigError."""
        return variants((self.method,), ())[-1]


class StartConfig(BenchConfig):
    """Whole processes, from start to exit."""

    passages: Positive = Field(3, description="Retrieve so many passages for the question.")
    chunk_tokens: Positive = Field(512, description="Give a chunk at most so many tokens.")
    new_tokens: Positive = Field(16, description="Answer with so many tokens, at most.")
    repeats: Positive = Field(3, description="Measure so many rounds.")


def _codec_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """Codecs and levels in full, each once; all there are for none. Raises ConfigError."""
    try:
        asked = [parse_codec(word) for word in words] or every_codec()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return tuple(dict.fromkeys(codec_word(*pair) for pair in asked))
