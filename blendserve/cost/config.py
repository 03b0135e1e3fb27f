"""Prices that the user fills in, what was measured of a reader, and a workload. `configs/cost` has examples to edit.

What is not known stays blank: the result names it instead of guessing.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from blendserve.config import Positive, Ratio, Section

Price = Annotated[float, Field(ge=0.0)]


class TierConfig(Section):
    """What it costs to keep KV in one place, and to read it from there."""

    inside = "cost.tiers."
    gb_month: Price | None = Field(None, description="Price of storing a GB (10^9 bytes) for a month.")
    gb_read: Price | None = Field(None, description="Price of reading a GB (egress, network).")
    thousand_reads: Price | None = Field(None, description="Price of a thousand requests for a chunk.")


class LevelConfig(Section):
    """One way of writing KV."""

    inside = "cost.levels."
    bytes_per_token: Price | None = Field(
        None, description="Size of a token's KV, in bytes, headers and checksums included."
    )
    decode_seconds: Price | None = Field(None, description="Machine time to decode a token's KV, in seconds.")


class CostConfig(Section):
    """Everything that a comparison rests on."""

    currency: str = Field("USD", description="Currency of the prices.")
    machine_hour: Price | None = Field(
        None, description="Price of an hour of the machine that runs the model."
    )
    tiers: dict[str, TierConfig] = Field({}, description="Places to store KV, with their prices.")
    levels: dict[str, LevelConfig] = Field({}, description="Codecs and levels, with their sizes.")
    prefill_seconds: Price | None = Field(None, description="Machine time to prefill a token, in seconds.")
    ratio: Ratio = Field(0.05, description="Fraction of the cached tokens to recompute.")
    load_seconds: Price | None = Field(
        None,
        description="Machine time to read, rotate and place a cached token, in seconds, where it does "
        "not overlap with computation.",
    )
    chunk_tokens: Positive = Field(512, description="Length of a chunk, in tokens.")
    tokens: Price = Field(1e9, description="Size of the corpus, in tokens.")
    reuses: Price = Field(10.0, description="Average number of uses of a token per month.")
    months: float = Field(
        6.0, gt=0.0, description="Number of months that a chunk is used before it is recomputed or dropped."
    )
