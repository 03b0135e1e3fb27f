"""Plain torch in the place of compiled kernels, as a process has it that starts with the switch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from blendserve.kernels import ops
from blendserve.kernels.switches import NATIVE


@contextmanager
def plain_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NATIVE, "0")
        ops.forget()
        yield
    ops.forget()
