"""scripts/golden_kernels.py: the same code gives the same digests, and one number that differs is found."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from blendserve.kernels import verify
from blendserve.kernels.cpu import gate, isa

SCRIPT = Path(__file__).parents[2] / "scripts" / "golden_kernels.py"


def test_the_same_code_is_equal_and_one_other_number_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [level.name for level in isa.LEVELS.values() if verify.cpu_status(level).active]
    if not {"avx2", "avx512", "avx512_bf16"} & set(names):
        pytest.skip("this machine has no native kernels")
    script = runpy.run_path(str(SCRIPT))
    assert script["main"]("record", tmp_path / "golden.json") == 0
    assert script["main"]("compare", tmp_path / "golden.json") == 0
    right = gate.run

    def off(*args: Any) -> Any:
        out = right(*args)
        out[0, 0] += 0.1
        return out

    monkeypatch.setattr(gate, "run", off)
    capsys.readouterr()
    assert script["main"]("compare", tmp_path / "golden.json") == 1
    found = capsys.readouterr().out.splitlines()[:-1]
    assert {line.split(":")[0] for line in found} == {f"{n} gated_activation" for n in names if n != "amx"}
