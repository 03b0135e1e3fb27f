"""Fingerprints and the server give what they gave when fingerprints.json and http.json were recorded."""

from __future__ import annotations

import json

import pytest
import transformers

from tests.golden import http, research
from tests.support.models import BLEND_KINDS

FINGERPRINTS = research.golden("fingerprints")


@pytest.mark.skipif(
    transformers.__version__ != FINGERPRINTS["transformers"],
    reason="a configuration's defaults, which are part of a fingerprint, differ by version of transformers",
)
def test_fingerprints_stay() -> None:
    """They are part of every chunk's key: a change would make the KV that users have stored useless."""
    assert research.fingerprints(BLEND_KINDS)["kinds"].items() <= FINGERPRINTS["kinds"].items()


def test_what_the_server_sends_is_as_recorded() -> None:
    found, recorded = http.transcript(), json.loads(http.FILE.read_text("utf-8"))
    for name in recorded:
        assert found.pop(name, None) == recorded[name], name
    assert not found
