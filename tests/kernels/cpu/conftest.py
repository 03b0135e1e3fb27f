"""`level`: every instruction set with a kernel of the file's `OPERATION`, loaded by itself whatever would serve."""

from __future__ import annotations

import pytest

from blendserve.kernels import verify
from blendserve.kernels.cpu.isa import LEVELS, Level


@pytest.fixture(scope="module", params=list(LEVELS))
def level(request: pytest.FixtureRequest) -> Level:
    """Skips where this machine has no such kernels."""
    found: Level = LEVELS[request.param]
    if request.module.OPERATION not in found.sources:
        pytest.skip(f"{found.title} leaves this to others")
    status = verify.cpu_status(found)
    if not status.active:
        pytest.skip(status.reason)
    return found
