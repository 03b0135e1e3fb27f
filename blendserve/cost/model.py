"""Store or recompute: pure arithmetic on a CostConfig. Amounts are of one token unless said otherwise.

    recompute   a reuse costs      machine second x prefill
    store       once               machine second x prefill, over the months that the chunk is used
                a month            bytes x price of a GB
                a reuse costs      machine second x (ratio x prefill + loading + decoding), and reading the bytes

Break-even is the number of reuses a month at which both cost the same. Time to first token has no price here: a chunk
that is cheaper to recompute may still be worth storing for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from blendserve.cost.config import CostConfig, LevelConfig, TierConfig

GB = 1e9
CLAIM = 4.0  # times cheaper: what is said of KV on SSD


@dataclass(frozen=True, slots=True)
class Verdict:
    """One level in one tier. None = a number is missing, which `missing` names; break-even "never" is infinite."""

    tier: str
    level: str
    missing: tuple[str, ...] = ()
    hold: float | None = None  # a token and month
    first: float | None = None  # a token and month: its computing, spread
    reuse: float | None = None  # a token and reuse, stored
    recompute: float | None = None  # a token and reuse, recomputed
    break_even: float | None = None  # reuses a month
    times_cheaper: float | None = None  # than recomputing, at the workload's reuses, all counted
    claim_at: float | None = None  # reuses a month at which keeping the bytes alone is CLAIM times cheaper
    savings: float | None = None  # of the workload, a month


def verdicts(config: CostConfig) -> list[Verdict]:
    """Every level in every tier."""
    return [
        _verdict(config, tier, about, level, written)
        for tier, about in config.tiers.items()
        for level, written in config.levels.items()
    ]


def advice(config: CostConfig) -> dict[str, str | None]:
    """tier -> the level that saves most for the workload; None = recompute. A tier of unknown prices is left out."""
    best: dict[str, Verdict] = {}
    for verdict in verdicts(config):
        if verdict.savings is None:
            continue
        there = best.get(verdict.tier)
        if there is None or verdict.savings > (there.savings or 0.0):
            best[verdict.tier] = verdict
    return {tier: v.level if (v.savings or 0.0) > 0 else None for tier, v in best.items()}


def report(config: CostConfig) -> dict[str, Any]:
    """All of it, as JSON."""
    found = verdicts(config)
    return {
        "settings": config.model_dump(mode="json"),
        "verdicts": [_plain(verdict) for verdict in found],
        "missing": sorted({name for verdict in found for name in verdict.missing}),
        "keep": advice(config),
    }


def _verdict(config: CostConfig, tier: str, about: TierConfig, level: str, written: LevelConfig) -> Verdict:
    missing = tuple(_missing(config, tier, about, level, written))
    if missing:
        return Verdict(tier, level, missing)
    hour, prefill, load = (
        _known(config.machine_hour),
        _known(config.prefill_seconds),
        _known(config.load_seconds),
    )
    size, decode = _known(written.bytes_per_token), _known(written.decode_seconds)
    second = hour / 3600
    hold = size * _known(about.gb_month) / GB
    first = second * prefill / config.months
    reading = size * _known(about.gb_read) / GB + _known(about.thousand_reads) / 1000 / config.chunk_tokens
    reuse = second * (config.ratio * prefill + load + decode) + reading
    recompute = second * prefill
    stored = hold + first + config.reuses * reuse
    return Verdict(
        tier=tier,
        level=level,
        hold=hold,
        first=first,
        reuse=reuse,
        recompute=recompute,
        break_even=(hold + first) / (recompute - reuse) if recompute > reuse else float("inf"),
        times_cheaper=config.reuses * recompute / stored if stored else float("inf"),
        claim_at=CLAIM * hold / recompute if recompute else float("inf"),
        savings=config.tokens * (config.reuses * recompute - stored),
    )


def _missing(
    config: CostConfig, tier: str, about: TierConfig, level: str, written: LevelConfig
) -> Iterator[str]:
    parts = (
        ("", config, ("machine_hour", "prefill_seconds", "load_seconds")),
        (f"tiers.{tier}.", about, ("gb_month", "gb_read", "thousand_reads")),
        (f"levels.{level}.", written, ("bytes_per_token", "decode_seconds")),
    )
    for before, section, names in parts:
        yield from (before + name for name in names if getattr(section, name) is None)


def _known(value: float | None) -> float:
    assert value is not None  # `_missing` has named it
    return value


def _plain(verdict: Verdict) -> dict[str, Any]:
    values = asdict(verdict)
    return {name: "never" if value == float("inf") else value for name, value in values.items()}
