"""Store or recompute, counted by hand; what is unknown is named, and what was measured replaces the settings."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from blendserve.cost import STORED, CostConfig, estimates, report, with_store
from blendserve.errors import InputError
from blendserve.kv import ChunkKV
from blendserve.store import MemoryStore
from tests.support.commands import cli
from tests.support.stores import put_kv

BY_HAND: dict[str, Any] = {
    "machine_hour": 3600.0,  # 1 a second
    "prefill_seconds": 0.01,
    "load_seconds": 0.001,
    "ratio": 0.1,
    "chunk_tokens": 100,
    "tokens": 1000,
    "reuses": 5,
    "months": 4,
    "tiers": {"ssd": {"gb_month": 2e6, "gb_read": 1e5, "thousand_reads": 20.0}},
    "levels": {"raw": {"bytes_per_token": 10, "decode_seconds": 0.0}},
}


def test_by_hand() -> None:
    (found,) = estimates(CostConfig(**BY_HAND))
    assert found.hold == pytest.approx(0.02)  # 10 bytes of 2e6 for 1e9
    assert found.first == pytest.approx(0.0025)
    assert found.recompute == pytest.approx(0.01)
    assert found.reuse == pytest.approx(0.001 + 0.001 + 0.001 + 0.0002)  # ratio, loading, bytes, request
    assert found.break_even == pytest.approx(0.0225 / 0.0068)
    assert found.savings == pytest.approx(1000 * (0.05 - 0.0225 - 5 * 0.0032))
    assert found.times_cheaper == pytest.approx(0.05 / (0.0225 + 5 * 0.0032))
    assert found.claim_at == pytest.approx(4 * 0.02 / 0.01)


def test_a_store_tells_its_bytes() -> None:
    store = MemoryStore(1 << 20)
    with pytest.raises(InputError):
        with_store(CostConfig(), store)
    put_kv(store, b"k" * 16, ChunkKV(torch.zeros(2, 1, 8, 4), torch.zeros(2, 1, 8, 4)))
    level = with_store(CostConfig(**BY_HAND), store).levels[STORED]
    assert level.bytes_per_token == 2 * 2 * 4 * 4  # keys and values, layers, dimensions, bytes
    assert level.decode_seconds == 0.0


def ssd(**prices: float | None) -> CostConfig:
    """The settings above with other prices of the tier."""
    return CostConfig(**{**BY_HAND, "tiers": {"ssd": {**BY_HAND["tiers"]["ssd"], **prices}}})


def test_the_level_that_saves_most_is_kept_and_what_is_unknown_is_named() -> None:
    kept, unknown, never = (report(ssd(**prices)) for prices in ({}, {"gb_month": None}, {"gb_read": 1e9}))
    assert (kept["keep"], kept["missing"]) == ({"ssd": "raw"}, [])
    assert (unknown["keep"], unknown["missing"]) == ({}, ["tiers.ssd.gb_month"])
    assert (never["keep"], never["verdicts"][0]["break_even"]) == ({"ssd": None}, "never")


@pytest.mark.parametrize("name", ["smollm_cpu", "h100_8b"])
def test_the_command_reports_every_level_of_an_example_in_every_tier(name: str) -> None:
    folder = Path(__file__).parents[2] / "configs" / "cost"
    done = cli("cost", "-c", folder / f"{name}.yaml", "--prices", folder / "prices.yaml", "--json")
    found = json.loads(done.out)
    tiers = yaml.safe_load((folder / "prices.yaml").read_text())["tiers"]
    levels = found["settings"]["levels"]
    assert {(v["tier"], v["level"]) for v in found["verdicts"]} == set(product(tiers, levels))
    assert found["keep"]
