"""What each bench is asked for: checked before anything is loaded; the command line takes its defaults from here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from blendserve.config import Positive, Ratio, ReaderConfig, Section
from blendserve.errors import ConfigError
from blendserve.evaluate.variants import FULL, TRANSFORMERS, Variant, variants
from blendserve.registry import BENCHED

Dtype = Literal["auto", "bfloat16", "float16", "float32"]


class BenchConfig(Section):
    """What all benches share."""

    model: str = ReaderConfig().model
    dtype: Dtype = "auto"
    threads: Positive | None = None
    repeats: Positive = 5
    seed: int = 0  # of the text, and of the random policy
    folder: Path | None = (
        None  # where stores are put for the time of the bench; None = the system's temporary folder
    )

    @property
    def reader(self) -> ReaderConfig:
        return ReaderConfig(model=self.model, dtype=self.dtype, threads=self.threads)


class TtftConfig(BenchConfig):
    """One prompt, from text to first token."""

    chunks: Positive = 6
    chunk_tokens: Positive = 512
    suffix_tokens: Positive = 40
    methods: tuple[str, ...] = BENCHED  # beside transformers, full, prefix and reuse
    ratios: tuple[Ratio, ...] = (0.05, 0.15)
    cold: bool = False
    throttle: tuple[Annotated[float, Field(gt=0)], ...] = ()  # GB/s that the store gives, one after the other
    memory: bool = False

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Everything that is compared, transformers first. Raises ConfigError."""
        words = (TRANSFORMERS, FULL, "prefix", "reuse", *self.methods)
        found = variants(words, self.ratios, self.seed)
        return tuple(sorted(found, key=lambda v: v.kind != TRANSFORMERS))


class ScalingConfig(BenchConfig):
    """How cost grows with context, ratio and chunk count."""

    contexts: tuple[Positive, ...] = (512, 1024, 2048, 3072, 4096, 6144, 7680)
    chunk_tokens: Positive = 512
    ratios: tuple[Ratio, ...] = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
    counts: tuple[Positive, ...] = (3, 6, 12, 24, 48)  # chunks
    context: Positive = 3072  # where ratios and chunk counts are varied
    usual: tuple[Ratio, ...] = (0.05, 0.15)  # where they are not
    methods: tuple[str, ...] = BENCHED
    suffix_tokens: Positive = 40
    repeats: Positive = 3

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
            **self.model_dump(include={"model", "dtype", "threads", "repeats", "seed", "folder"}),
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

    context: Positive = 3072
    new_tokens: Annotated[int, Field(ge=2)] = 64  # what is timed lies between the first and the last
    repeats: Positive = 3


class PrecomputeConfig(BenchConfig):
    """Chunks into a store."""

    chunks: Positive = 12
    chunk_tokens: Positive = 512
    repeats: Positive = 3


class StoreBenchConfig(BenchConfig):
    """Records of chunk KV, written and read."""

    chunks: Positive = 24
    chunk_tokens: Positive = 512


class CrowdedConfig(BenchConfig):
    """One prompt and its decoding beside other work."""

    chunks: Positive = 6
    chunk_tokens: Positive = 512
    suffix_tokens: Positive = 40
    new_tokens: Annotated[int, Field(ge=2)] = 32
    methods: tuple[str, ...] = BENCHED  # beside transformers and full
    ratios: tuple[Ratio, ...] = (0.15,)
    busy: tuple[Positive, ...] = (1, 2, 4)  # processes
    environments: tuple[Annotated[str, Field(pattern=r"^\w+=\S*( \w+=\S*)*$")], ...] = ()  # also measured
    repeats: Positive = 3

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What brings a first token, transformers first. Raises ConfigError."""
        return variants((TRANSFORMERS, FULL, *self.methods), self.ratios, self.seed)
