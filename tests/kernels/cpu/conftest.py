"""`level`: every instruction set with a kernel of the file's `OPERATION`, loaded by itself whatever would serve."""

from __future__ import annotations

import pytest

from blendserve.kernels import verify
from blendserve.kernels.cpu.build import Unavailable
from blendserve.kernels.cpu.isa import LEVELS, Level
from blendserve.kernels.cpu.library import loaded


@pytest.fixture(scope="module", params=list(LEVELS))
def level(request: pytest.FixtureRequest) -> Level:
    """Skips where this machine has no such kernels; kernels that are there and compute something else are an error."""
    found: Level = LEVELS[request.param]
    if request.module.OPERATION not in found.sources:
        pytest.skip(f"{found.title} leaves this to others")
    status = verify.cpu_status(found)
    if not status.active:
        if not verify.is_switched_off() and can_be_loaded(found):
            pytest.fail(status.reason)
        pytest.skip(status.reason)
    return found


def can_be_loaded(level: Level) -> bool:
    try:
        loaded(level)
    except Unavailable:
        return False
    return True
