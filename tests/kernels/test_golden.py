"""scripts/golden_kernels.py: the same code gives the same digests, and one number that differs is found."""

from __future__ import annotations

import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from blendserve.kernels import ops, reference, selfcheck
from blendserve.kernels.cpu import isa
from blendserve.kernels.dispatch import Backend, KernelOp

SCRIPT = Path(__file__).parents[2] / "scripts" / "golden_kernels.py"


def test_the_same_code_is_equal_and_one_other_number_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [level.name for level in isa.LEVELS.values() if selfcheck.cpu_status(level).active]
    if not {"avx2", "avx512", "avx512_bf16"} & set(names):
        pytest.skip("this machine has no native kernels")
    script = runpy.run_path(str(SCRIPT))
    assert script["main"]("record", tmp_path / "golden.json") == 0
    assert script["main"]("compare", tmp_path / "golden.json") == 0

    def off(backend: Backend, *args: Any) -> Any:
        out = backend.run(*args)
        out[0, 0] += 0.1
        return out

    backends = ops.gated_activation.backends[:-1]
    wrong: list[Any] = [replace(backend, run=partial(off, backend)) for backend in backends]
    monkeypatch.setitem(ops.OPERATIONS, "gated_activation", KernelOp(reference.gated_activation, *wrong))
    capsys.readouterr()
    assert script["main"]("compare", tmp_path / "golden.json") == 1
    found = capsys.readouterr().out.splitlines()[:-1]
    assert {line.split(":")[0] for line in found} == {f"{n} gated_activation" for n in names}
