"""Store or recompute, counted by hand; what is unknown is named, and what was measured is taken over."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.cli import main
from blendserve.config import changed
from blendserve.core import ChunkKV
from blendserve.cost.config import CostConfig
from blendserve.cost.measured import STORED, with_bench, with_store
from blendserve.cost.model import advice, report, verdicts
from blendserve.errors import InputError
from blendserve.store import MemoryStore

CONFIGS = Path(__file__).parents[2] / "configs" / "cost"
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
    (verdict,) = verdicts(CostConfig(**BY_HAND))
    assert verdict.hold == pytest.approx(0.02)  # 10 bytes of 2e6 for 1e9
    assert verdict.first == pytest.approx(0.0025)
    assert verdict.recompute == pytest.approx(0.01)
    assert verdict.reuse == pytest.approx(0.001 + 0.001 + 0.001 + 0.0002)  # ratio, loading, bytes, request
    assert verdict.break_even == pytest.approx(0.0225 / 0.0068)
    assert verdict.savings == pytest.approx(1000 * (0.05 - 0.0225 - 5 * 0.0032))
    assert verdict.times_cheaper == pytest.approx(0.05 / (0.0225 + 5 * 0.0032))
    assert verdict.claim_at == pytest.approx(4 * 0.02 / 0.01)


@given(
    price=st.floats(0.0, 1e7),
    read=st.floats(0.0, 1e6),
    size=st.floats(1.0, 1e3),
    decode=st.floats(0.0, 0.02),
    reuses=st.floats(0.0, 100.0),
)
def test_savings_begin_at_break_even(
    price: float, read: float, size: float, decode: float, reuses: float
) -> None:
    tiers = {"ssd": {"gb_month": price, "gb_read": read, "thousand_reads": 0.0}}
    levels = {"x": {"bytes_per_token": size, "decode_seconds": decode}}
    config = CostConfig(**{**BY_HAND, "tiers": tiers, "levels": levels, "reuses": reuses})
    (verdict,) = verdicts(config)
    assert verdict.savings is not None
    assert verdict.break_even is not None
    if verdict.break_even == float("inf"):
        assert verdict.savings <= 0
        return
    at = verdicts(changed(config, reuses=verdict.break_even))[0].savings
    assert at == pytest.approx(0.0, abs=1e-6 * config.tokens)
    if abs(reuses - verdict.break_even) > 1e-6:
        assert (verdict.savings > 0) == (reuses > verdict.break_even)
    dearer = changed(config, machine_hour=7200.0)
    assert (verdicts(dearer)[0].break_even or 0) <= verdict.break_even


def test_what_is_not_known_is_named_and_never_guessed() -> None:
    config = CostConfig(
        **{
            **BY_HAND,
            "machine_hour": None,
            "tiers": {"ssd": {"gb_month": 1.0}},
            "levels": {"raw": {"bytes_per_token": 1}},
        }
    )
    found = report(config)
    assert found["missing"] == sorted(
        [
            *("machine_hour", "tiers.ssd.gb_read", "tiers.ssd.thousand_reads"),
            "levels.raw.decode_seconds",
        ]
    )
    assert found["keep"] == {}
    assert found["verdicts"][0]["savings"] is None


def test_the_level_that_saves_most_is_kept_or_none() -> None:
    levels = {
        "large": {"bytes_per_token": 10, "decode_seconds": 0.0},
        "small": {"bytes_per_token": 1, "decode_seconds": 0.001},
    }
    tiers = {
        "dear": {"gb_month": 1e9, "gb_read": 0.0, "thousand_reads": 0.0},
        "cheap": {"gb_month": 1.0, "gb_read": 0.0, "thousand_reads": 0.0},
        "middle": {"gb_month": 2e6, "gb_read": 0.0, "thousand_reads": 0.0},
    }
    assert advice(CostConfig(**{**BY_HAND, "levels": levels, "tiers": tiers})) == {
        "dear": None,
        "cheap": "large",
        "middle": "small",
    }


def test_a_store_tells_its_bytes() -> None:
    store = MemoryStore(1 << 20)
    with pytest.raises(InputError, match="no chunk"):
        with_store(CostConfig(), store)
    store.put(b"k" * 16, ChunkKV(torch.zeros(2, 1, 8, 4), torch.zeros(2, 1, 8, 4)))
    level = with_store(CostConfig(**BY_HAND), store).levels[STORED]
    assert level.bytes_per_token == 2 * 2 * 4 * 4  # keys and values, layers, dimensions, bytes
    assert level.decode_seconds == 0.0


def test_a_bench_tells_its_levels(tmp_path: Path) -> None:
    file = tmp_path / "codec.json"
    figures = {
        "settings": {"chunks": 4, "chunk_tokens": 100, "suffix_tokens": 100},
        "prefill": {"median": 2.0},
        "codecs": {"int8": {"bytes_per_token": 12.0, "decode": {"tokens_per_second": {"median": 50.0}}}},
    }
    file.write_text(f"a table\n{json.dumps(figures)}\n")
    config = with_bench(CostConfig(**BY_HAND), file)
    assert config.prefill_seconds == pytest.approx(2 / 500)
    assert config.levels["int8"].decode_seconds == pytest.approx(0.02)
    assert "raw" in config.levels
    file.write_text("{}")
    with pytest.raises(InputError, match="bench codec"):
        with_bench(config, file)


@pytest.mark.parametrize("name", ["smollm_cpu", "h100_8b"])
def test_the_examples_are_complete_but_for_what_they_say(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["cost", "-c", str(CONFIGS / f"{name}.yaml"), "--prices", str(CONFIGS / "prices.yaml")]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "tiers.memory.gb_month" in found["missing"]
    assert any(verdict["savings"] is not None for verdict in found["verdicts"])
    assert main([*words, "--reuses", "100000"]) == 0
    assert re.search("^ssd: store", capsys.readouterr().out, re.MULTILINE)
