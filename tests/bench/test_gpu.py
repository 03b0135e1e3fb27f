"""The GPU bench, rehearsed on a CPU: every step runs, and what fails or does not fit is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve.bench.gpu import agree
from blendserve.bench.gpu.plan import rehearsal
from blendserve.bench.gpu.prefills import Stand
from blendserve.bench.gpu.run import Bench
from blendserve.bench.gpu.tables import tables
from blendserve.kernels.operation import Operation
from blendserve.kernels.ops import ATTEND
from blendserve.kernels.reference import attend_reference
from blendserve.kernels.rows import plan_rows


def bench(folder: Path, minutes: float = 5, **changes: Any) -> Bench:
    return Bench(replace(rehearsal(), **changes), minutes, folder / "figures.json", folder, lambda _: None)


def test_every_step_leaves_its_figures(tmp_path: Path) -> None:
    run, plan = bench(tmp_path), rehearsal()
    assert run.go(), run.figures["failed"]
    figures = run.figures
    assert figures["rehearsal"]
    assert not figures["left_out"] + figures["failed"]
    for part, planned in (("kernels", plan.kinds), ("cells", plan.cells), ("attention", plan.timed)):
        assert len(figures[part]) == len(planned)
    assert [found["context"] for found in figures["decoding"]] == list(plan.decoded)
    assert sum(not rows for _, _, rows in tables(figures)) == 1  # where a host waited for its device
    for cell in figures["cells"]:
        full, reuse, prior = (cell["methods"][name] for name in ("full", "reuse", "query+prior@0.15"))
        assert full["limit"] > prior["limit"] > reuse["limit"] > 0
        assert full["bytes_loaded"] == 0 < reuse["bytes_loaded"] == prior["bytes_loaded"]
        assert prior["tokens_recomputed"] == round(0.15 * cell["context"])


def test_a_step_that_fails_or_does_not_fit_costs_itself_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError

    late = bench(tmp_path, minutes=0)
    assert late.go()
    assert any(step.startswith("prefill") for step in late.figures["left_out"])
    assert not late.figures["cells"]
    monkeypatch.setattr(Stand, "measure", broken)
    run = bench(tmp_path, readers=(), kinds=())
    assert not run.go()
    assert [failed["step"] for failed in run.figures["failed"]] == [f"prefill {c}" for c in run.plan.cells]
    assert len(run.figures["attention"]) == 1
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "a temporary store is left"


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def far(q: Any, keys: Any, values: Any, spec: Any, plan: Any) -> Any:
        moved = (plan.positions + 1).clamp(max=keys.shape[1] - 1)
        return attend_reference(q, keys, values, spec, plan_rows(moved, plan.group, plan.window))

    heads = rehearsal().kinds[0]
    assert agree.kernels(heads, torch.device("cpu"), 100)["ok"]
    backends: list[Any] = [replace(backend, run=far) for backend in ATTEND.backends]
    monkeypatch.setattr(agree, "ATTEND", Operation(*backends))
    assert not agree.kernels(heads, torch.device("cpu"), 100)["ok"]
