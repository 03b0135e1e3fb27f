"""Blending gives what it gave when tests/golden/blend.json was written, on any machine."""

from __future__ import annotations

import json

import pytest
import transformers

from tests.golden.blend import FILE, fingerprints, sample
from tests.support.kernels import plain_torch

GOLDEN = json.loads(FILE.read_text("utf-8"))
KINDS = sorted({case.split(", ")[0] for case in GOLDEN["cases"]})


@pytest.mark.parametrize("kind", KINDS)
def test_selections_reports_reasons_and_logits_stay(kind: str) -> None:
    with plain_torch():
        cases = dict(sample(kind))
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
def test_fingerprints_stay() -> None:
    """They are part of every chunk's key: a change would make the KV that users have stored useless."""
    assert fingerprints() == GOLDEN["fingerprints"]
