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
    gb_month: Price | None = Field(None, description="Keeping a GB (10^9 bytes) for a month costs so much.")
    gb_read: Price | None = Field(None, description="Reading a GB costs so much: egress, network.")
    thousand_reads: Price | None = Field(None, description="A thousand requests for a chunk cost so much.")


class LevelConfig(Section):
    """One way of writing KV."""

    inside = "cost.levels."
    bytes_per_token: Price | None = Field(
        None, description="A token's keys and values take so many bytes, headers and checksums included."
    )
    decode_seconds: Price | None = Field(
        None, description="Decoding a token takes so many seconds of the machine."
    )


class CostConfig(Section):
    """Everything that a comparison rests on."""

    currency: str = Field("USD", description="Prices are in this currency.")
    machine_hour: Price | None = Field(
        None, description="An hour of the machine that the reader runs on costs so much."
    )
    tiers: dict[str, TierConfig] = Field({}, description="KV may be kept in these places.")
    levels: dict[str, LevelConfig] = Field({}, description="KV may be written in these ways.")
    prefill_seconds: Price | None = Field(
        None, description="Prefilling a token takes so many seconds of the machine."
    )
    ratio: Ratio = Field(0.05, description="Recompute this share of the tokens that are found.")
    load_seconds: Price | None = Field(
        None,
        description="Reading a stored token, rotating and placing it takes so many seconds of the machine, where they do "
        "not hide behind anything.",
    )
    chunk_tokens: Positive = Field(512, description="Let a chunk have so many tokens.")
    tokens: Price = Field(1e9, description="Keep a corpus of so many tokens.")
    reuses: Price = Field(10.0, description="Use each of its tokens so many times a month, on average.")
    months: float = Field(
        6.0, gt=0.0, description="Use a chunk for so many months before it is computed anew or given up."
    )
