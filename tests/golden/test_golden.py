"""Blending and the server give what they gave when blend.json and http.json were recorded, on any machine."""

from __future__ import annotations

import json

import pytest
import transformers

from tests.golden import blend, http
from tests.support.kernel_switches import plain_torch

GOLDEN = json.loads(blend.FILE.read_text("utf-8"))
KINDS = sorted({case.split(", ")[0] for case in GOLDEN["cases"]})


@pytest.mark.parametrize("kind", KINDS)
def test_selections_reports_reasons_and_logits_stay(kind: str) -> None:
    with plain_torch():
        cases = dict(blend.sample(kind))
    for case, (*values, logits) in cases.items():
        *before, logits_before = GOLDEN["cases"][f"{kind}, {case}"]
        assert values == before, case
        assert logits == pytest.approx(logits_before, abs=1e-4), case


@pytest.mark.skipif(
    transformers.__version__ != GOLDEN["transformers"],
    reason="a configuration's defaults, which are part of a fingerprint, differ by version of transformers",
)
def test_fingerprints_stay() -> None:
    """They are part of every chunk's key: a change would make the KV that users have stored useless."""
    assert blend.fingerprints().items() <= GOLDEN["fingerprints"].items()


def test_what_the_server_sends_is_as_recorded() -> None:
    found, recorded = http.transcript(), json.loads(http.FILE.read_text("utf-8"))
    for name in recorded:
        assert found.pop(name, None) == recorded[name], name
    assert not found
