"""Gemma 3 270M, put together from its packages: windows, two kinds of RoPE, norms of queries and keys, real weights.

Its packages are optional, 253 MB, and under the Gemma Terms of Use (https://ai.google.dev/gemma/terms).
"""

from __future__ import annotations

import importlib.util

import pytest

from blendserve.config import ModelConfig
from blendserve.engine import gate
from blendserve.models.loader import load_model
from blendserve.models.sources import BUNDLED

NAME = "gemma3-270m"
MISSING = [part for part in BUNDLED[NAME].packages if importlib.util.find_spec(part) is None]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} missing: {BUNDLED[NAME].install}")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gate_passes(dtype: str) -> None:
    reader = load_model(ModelConfig(name=NAME, dtype=dtype, device="cpu"))
    report = gate.check(reader)
    assert report.passed, report.failure
    assert 512 in reader.adapter.windows
