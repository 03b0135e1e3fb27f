"""Blending gives what it gave when tests/golden/blend.json was written by scripts/golden_blend.py, on any machine."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support.switches import plain_torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "golden_blend.py"
GOLDEN = json.loads(Path(__file__).with_name("blend.json").read_text("utf-8"))
KINDS = sorted({case.split(", ")[0] for case in GOLDEN["cases"]})


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with plain_torch():  # the script sets the switch for its own process
        return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize("kind", KINDS)
def test_selections_reports_reasons_and_logits_stay(golden: dict[str, Any], kind: str) -> None:
    with plain_torch():
        cases = dict(golden["sample"](kind))
    before = {case: GOLDEN["cases"][f"{kind}, {case}"] for case in cases}
    assert {case: values[:-1] for case, values in cases.items()} == {
        case: values[:-1] for case, values in before.items()
    }
    for case, values in cases.items():
        assert values[-1] == pytest.approx(before[case][-1], abs=1e-4), case


@pytest.mark.skipif(
    transformers.__version__ != GOLDEN["transformers"],
    reason="a configuration's defaults, which are part of a fingerprint, differ by version of transformers",
)
def test_fingerprints_stay(golden: dict[str, Any]) -> None:
    """They are part of every chunk's key: a change would make the KV that users have stored useless."""
    assert golden["fingerprints"]() == GOLDEN["fingerprints"]
