"""What each bench is asked for: checked before anything is loaded; the command line takes its defaults from here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from blendserve.config import Positive, Ratio, ReaderConfig, Section
from blendserve.evaluate.variants import FULL, TRANSFORMERS, Variant, variants

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
    methods: tuple[str, ...] = ("query+shift",)  # beside transformers, full, prefix and reuse
    ratios: tuple[Ratio, ...] = (0.05, 0.15)
    cold: bool = False
    memory: bool = False

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Everything that is compared, transformers first. Raises ConfigError."""
        words = (TRANSFORMERS, FULL, "prefix", "reuse", *self.methods)
        found = variants(words, self.ratios, self.seed)
        return tuple(sorted(found, key=lambda v: v.kind != TRANSFORMERS))


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
