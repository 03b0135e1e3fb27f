"""scripts/golden_kernels.py: the same code gives the same digests, and one number that differs is found."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blendserve.kernels import ops, selfcheck
from blendserve.kernels.cpu import isa
from blendserve.kernels.dispatch import Backend, KernelOp

SCRIPT = Path(__file__).parents[2] / "scripts" / "golden_kernels.py"
HERE = {level.name for level in isa.LEVELS.values() if selfcheck.cpu_status(level).active}


@pytest.mark.skipif(not HERE, reason="this machine has no native kernels")
def test_the_same_code_is_equal_and_one_other_number_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main, file = runpy.run_path(str(SCRIPT))["main"], tmp_path / "golden.json"
    assert main("record", file) == main("compare", file) == 0

    def off(backend: Backend) -> Backend:
        def run(*args: Any) -> Any:
            out = backend.run(*args)
            out[0, 0] += 0.1
            return out

        return replace(backend, run=run)

    *native, plain = ops.gated_activation.backends
    wrong: Any = KernelOp(plain.run, *map(off, native))
    monkeypatch.setitem(ops.OPERATIONS, "gated_activation", wrong)
    capsys.readouterr()
    assert main("compare", file) == 1
    found = capsys.readouterr().out.splitlines()[:-1]
    assert {line.split(":")[0] for line in found} == {f"{name} gated_activation" for name in HERE}
