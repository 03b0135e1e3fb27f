"""The counts of the limit, derived again: torch's own FLOP counter, and a loop over rows and keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from blendserve.bench.harness import Harness
from blendserve.bench.rates import Rates
from blendserve.bench.roofline import Counts, Work, layer_work, limit, prefill_work
from blendserve.bench.stages import StagedAdapter
from blendserve.bench.workload import make_workload
from blendserve.blend.report import plain_report
from blendserve.config import BlendConfig
from blendserve.core import Prompt
from blendserve.errors import ModelUnsupported
from blendserve.evaluate.variants import variants
from blendserve.models.adapter import Adapter
from blendserve.models.loader import Reader
from tests.support.models import tiny_adapter

WORDS = ("full", "prefix", "reuse", "query@0.2", "deviation@0.2", "chunk_head@0.5", "query@1", "random@0")


class Counting(StagedAdapter):
    """Counts the FLOPs of what the staged adapter times."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        self.flops = 0

    def count(self, step: Callable[..., Any], *args: Any) -> Any:
        with FlopCounterMode(display=False) as counter:
            result = step(*args)
        self.flops += counter.get_total_flops()
        return result

    def project(self, *args: Any) -> Any:
        return self.count(super().project, *args)

    def finish(self, *args: Any) -> Any:
        return self.count(super().finish, *args)

    def logits(self, *args: Any) -> Any:
        return self.count(super().logits, *args)


def test_linear_flops_are_those_that_ran_and_stages_add_up(reader: Reader, tmp_path: Path) -> None:
    counting, workload = Counting(reader.adapter), make_workload(reader, 4, 24, 20, seed=0)
    found = variants(WORDS, ())
    with Harness(reader, workload, found, tmp_path, counting.as_adapter()) as contest:
        contest.precompute()
        counting.clock.seconds.clear()
        for variant in (v for v in found if v.name in WORDS):
            counting.flops = 0
            run = contest.run(variant)
            assert run.report is not None
            assert run.recomputed is not None
            work = prefill_work(Counts.of(reader.adapter), run.report, run.recomputed, variant.blend)
            assert work.linear == counting.flops, variant.name
            assert work.loaded == run.report.bytes_loaded, variant.name
            split = counting.split(run)
            assert sum(split.values()) == pytest.approx(run.prefill)
            assert min(split.values()) >= 0
            assert not counting.clock.seconds["linear"]  # each run starts at zero


@pytest.mark.parametrize("window", [None, 5])
def test_attention_flops_by_a_loop_over_rows_and_keys(window: int | None) -> None:
    counts = Counts(project=0, finish=0, head=0, attention_width=12, windows=(window,))
    rows = [0, 3, 4, 9]
    seen = sum(1 for row in rows for key in range(row + 1) if window is None or row - key < window)
    assert layer_work(counts, 0, 4, torch.tensor(rows), 4).attention == 4 * 12 * seen


def test_a_full_prefill_by_the_textbook(reader: Reader) -> None:
    """2 FLOPs a weight and row, but one row in the last layer's finish and the head; attention 2 T^2 H D."""
    counts, n = Counts.of(reader.adapter), 50
    report = plain_report(Prompt((), (), tuple(range(n))), BlendConfig(), "")
    work = prefill_work(counts, report, torch.empty(0, dtype=torch.long), BlendConfig())
    hidden, inner = 64, 96
    project, finish = hidden * 64 + 2 * hidden * 32, 64 * hidden + 3 * hidden * inner
    assert (counts.project, counts.finish, counts.head) == (project, finish, hidden * 500)
    assert work.linear == 2 * (n * (3 * project + 2 * finish) + finish + hidden * 500)
    assert work.attention == 4 * 64 * (2 * n * (n + 1) / 2 + n)


def test_seconds_are_work_over_rates() -> None:
    bound = limit(Work(6e9, 3e9, 4e9), Rates(flops=3e9, bytes=2e9))
    assert (bound.linear, bound.attention, bound.load, bound.total) == (2.0, 1.0, 2.0, 5.0)


def test_experts_are_refused() -> None:
    with pytest.raises(ModelUnsupported):
        Counts.of(tiny_adapter("mixtral"))
