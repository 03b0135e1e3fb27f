"""Store KV or recompute it? Arithmetic on prices, bytes and seconds. Amounts are per token unless noted.

    recompute   a reuse    machine second x prefill
    store       once       machine second x prefill, spread over the months of use
                a month    bytes x price of a GB
                a reuse    machine second x (ratio x prefill + load + decode), and the price of reading the bytes

Break-even is the number of reuses a month at which both cost the same. TTFT has no price here: a chunk that is cheaper
to recompute may still be worth storing. Unknown numbers stay blank: the result names them. Examples: `configs/cost`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from blendserve.bench.harness import Column, samples_of, select, summarize
from blendserve.config import Positive, Ratio, Settings
from blendserve.errors import InputError

if TYPE_CHECKING:  # imports torch
    from blendserve.store import KVStore

GB = 1e9
CLAIM = 4.0  # times cheaper: a common claim for KV on SSD
STORED = "as stored"  # the level that a store's own chunks make

Price = Annotated[float, Field(ge=0.0)]


class TierConfig(Settings):
    """Prices of one place to store KV."""

    prefix = "cost.tiers."
    gb_month: Price | None = Field(None, description="Price of storing a GB (10^9 bytes) for a month.")
    gb_read: Price | None = Field(None, description="Price of reading a GB (egress, network).")
    thousand_reads: Price | None = Field(None, description="Price of a thousand requests for a chunk.")


class LevelConfig(Settings):
    """One codec at one level."""

    prefix = "cost.levels."
    bytes_per_token: Price | None = Field(None, description="Bytes of a token's KV, with headers.")
    decode_seconds: Price | None = Field(None, description="Machine time to decode a token's KV, in seconds.")


class CostConfig(Settings):
    """Prices, measured sizes and times, and a workload."""

    currency: str = Field("USD", description="Currency of the prices.")
    machine_hour: Price | None = Field(None, description="Price of an hour of the model's machine.")
    tiers: dict[str, TierConfig] = Field({}, description="Places to store KV, with their prices.")
    levels: dict[str, LevelConfig] = Field({}, description="Codecs and levels, with their sizes.")
    prefill_seconds: Price | None = Field(None, description="Machine time to prefill a token, in seconds.")
    ratio: Ratio = Field(0.05, description="Fraction of the cached tokens to recompute.")
    load_seconds: Price | None = Field(
        None, description="Machine time to load a cached token, in seconds, that no computation hides."
    )
    chunk_tokens: Positive = Field(512, description="Length of a chunk, in tokens.")
    tokens: Price = Field(1e9, description="Size of the corpus, in tokens.")
    reuses: Price = Field(10.0, description="Average number of uses of a token per month.")
    months: float = Field(6.0, gt=0.0, description="Number of months that a stored chunk is used.")


@dataclass(frozen=True, slots=True)
class Estimate:
    """One level in one tier. None: a number is missing, which `missing` names. A break-even of inf is "never"."""

    tier: str
    level: str
    missing: tuple[str, ...] = ()
    hold: float | None = None  # storage cost of a token for a month
    first: float | None = None  # compute cost of a token for a month: one prefill over the months
    reuse: float | None = None  # cost of a reuse from the store
    recompute: float | None = None  # cost of a reuse without a store
    break_even: float | None = None  # reuses a month
    times_cheaper: float | None = None  # recompute / store for the workload, all costs included
    claim_at: float | None = None  # reuses a month at which storage alone is CLAIM times cheaper
    savings: float | None = None  # of the workload, a month


def estimates(config: CostConfig) -> list[Estimate]:
    """Every level in every tier."""
    return [_estimate(config, tier, level) for tier in config.tiers for level in config.levels]


def recommendations(found: Sequence[Estimate]) -> dict[str, str | None]:
    """tier -> the level with the largest savings; None: recompute. A tier without complete prices is left out."""
    tiers: dict[str, dict[float, str]] = {}
    for e in found:
        if e.savings is not None:
            tiers.setdefault(e.tier, {}).setdefault(e.savings, e.level)
    return {tier: levels[best] if (best := max(levels)) > 0 else None for tier, levels in tiers.items()}


def report(config: CostConfig) -> dict[str, Any]:
    """All results, as JSON."""
    found = estimates(config)
    return {
        "settings": config.model_dump(mode="json"),
        "verdicts": [{k: "never" if v == inf else v for k, v in asdict(e).items()} for e in found],
        "missing": sorted({name for estimate in found for name in estimate.missing}),
        "keep": recommendations(found),
    }


def with_store(config: CostConfig, store: KVStore) -> CostConfig:
    """Add a level with the store's bytes per token. Raises InputError for an empty store."""
    stats = store.stats()
    if not stats.tokens:
        raise InputError(
            f"the store at {stats.path} has no chunk to measure: run `blendserve precompute` first",
            path=stats.path,
        )
    uncoded = stats.bytes == stats.raw_bytes
    level = {"bytes_per_token": stats.bytes / stats.tokens, "decode_seconds": 0.0 if uncoded else None}
    return config.with_values(levels={**config.model_dump()["levels"], STORED: level})


def with_bench(config: CostConfig, file: Path) -> CostConfig:
    """Take levels, prefill time and chunk length from `blendserve bench codec --json`. Raises InputError."""
    try:
        result: dict[str, Any] = json.loads(file.read_text().splitlines()[-1])
        of = result["config"]
        samples = samples_of(result)
        tokens = of["chunks"] * of["chunk_tokens"] + of["suffix_tokens"]

        def measured(metric: str, **where: str) -> float:
            return summarize(select(result, Column("", metric), where)).median

        levels = {
            codec: {
                "bytes_per_token": measured("bytes_per_token", of="size", codec=codec),
                "decode_seconds": 1 / measured("tokens_per_s", operation="decode", codec=codec),
            }
            for codec in dict.fromkeys(s.labels["codec"] for s in samples if s.labels["of"] == "size")
        }
        prefill_s = measured("time_s", operation="prefill") / tokens
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}", path=file) from None
    except (ValueError, KeyError, IndexError, TypeError, InputError):
        raise InputError(
            f"{file} is not the output of `blendserve bench codec --json`: give its last line", path=file
        ) from None
    levels = {**config.model_dump()["levels"], **levels}
    return config.with_values(levels=levels, prefill_seconds=prefill_s, chunk_tokens=of["chunk_tokens"])


def _estimate(config: CostConfig, tier: str, level: str) -> Estimate:
    places = {
        "": (config, ("machine_hour", "prefill_seconds", "load_seconds")),
        f"tiers.{tier}.": (config.tiers[tier], ("gb_month", "gb_read", "thousand_reads")),
        f"levels.{level}.": (config.levels[level], ("bytes_per_token", "decode_seconds")),
    }
    values = {prefix + n: getattr(section, n) for prefix, (section, names) in places.items() for n in names}
    if missing := tuple(name for name, value in values.items() if value is None):
        return Estimate(tier, level, missing)
    hour, prefill, load, gb_month, gb_read, thousand_reads, n_bytes, decode = values.values()
    second = hour / 3600
    hold = n_bytes * gb_month / GB
    first = second * prefill / config.months
    reading = n_bytes * gb_read / GB + thousand_reads / 1000 / config.chunk_tokens
    reuse = second * (config.ratio * prefill + load + decode) + reading
    recompute = second * prefill
    stored = hold + first + config.reuses * reuse
    break_even = (hold + first) / (recompute - reuse) if recompute > reuse else inf
    times_cheaper = config.reuses * recompute / stored if stored else inf
    claim_at = CLAIM * hold / recompute if recompute else inf
    savings = config.tokens * (config.reuses * recompute - stored)
    costs = hold, first, reuse, recompute
    return Estimate(tier, level, (), *costs, break_even, times_cheaper, claim_at, savings)
