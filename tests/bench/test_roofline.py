"""The limit's counts, by a second derivation: torch's own FLOP counter, and a loop over rows and keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from blendserve.bench.harness import Harness
from blendserve.bench.rates import Rates, measure_rates
from blendserve.bench.roofline import Counts, Work, layer_work, limit, prefill_work
from blendserve.bench.stages import StagedAdapter
from blendserve.bench.workload import Workload, make_workload
from blendserve.config import BlendConfig
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

    def _count(self, step: Callable[..., Any], *args: Any) -> Any:
        with FlopCounterMode(display=False) as counter:
            result = step(*args)
        self.flops += counter.get_total_flops()
        return result

    def project(self, *args: Any) -> Any:
        return self._count(super().project, *args)

    def finish(self, *args: Any) -> Any:
        return self._count(super().finish, *args)

    def logits(self, *args: Any) -> Any:
        return self._count(super().logits, *args)


@pytest.fixture(scope="module")
def workload(reader: Reader) -> Workload:
    return make_workload(reader, 4, 24, 20, seed=0)


@pytest.fixture(scope="module")
def contest(reader: Reader, workload: Workload, tmp_path_factory: pytest.TempPathFactory) -> Any:
    counting = Counting(reader.adapter)
    folder = tmp_path_factory.mktemp("store")
    with Harness(reader, workload, variants(WORDS, ()), folder, counting.as_adapter()) as contest:
        contest.precompute()
        yield contest, counting


@pytest.mark.parametrize("word", WORDS)
def test_linear_flops_are_those_that_ran(word: str, reader: Reader, contest: Any) -> None:
    contest, counting = contest
    variant = next(v for v in contest.variants if v.name == word)
    counting.flops = 0
    took = contest.run(variant)
    work = prefill_work(Counts.of(reader.adapter), took.report, took.recomputed, variant.blend)
    assert work.linear == counting.flops
    assert work.loaded == took.report.bytes_loaded


@pytest.mark.parametrize("window", [None, 5])
def test_attention_flops_by_a_loop_over_rows_and_keys(window: int | None) -> None:
    counts = Counts(project=0, finish=0, head=0, attention_width=12, windows=(window,))
    positions = torch.tensor([0, 3, 4, 9])
    seen = sum(
        1 for row in positions.tolist() for key in range(row + 1) if window is None or row - key < window
    )
    assert layer_work(counts, 0, 4, positions, 4).attention == 4 * 12 * seen


def test_a_full_prefill_by_the_textbook(reader: Reader) -> None:
    """2 FLOPs a weight and row, but for the last layer's and the head's, which one row reads; 2 T^2 H D of attention."""
    counts, n = Counts.of(reader.adapter), 50
    report = _report(n)
    work = prefill_work(counts, report, torch.empty(0, dtype=torch.long), BlendConfig())
    hidden, inner = 64, 96
    project, finish = hidden * 64 + 2 * hidden * 32, 64 * hidden + 3 * hidden * inner
    assert (counts.project, counts.finish, counts.head) == (project, finish, hidden * 500)
    assert work.linear == 2 * (n * (3 * project + 2 * finish) + finish + hidden * 500)
    assert work.attention == 4 * 64 * (2 * n * (n + 1) / 2 + n)


def _report(n: int) -> Any:
    from blendserve.blend.report import plain_report
    from blendserve.core import Prompt

    return plain_report(Prompt((), (), tuple(range(n))), BlendConfig(), "")


def test_seconds_are_work_over_rates() -> None:
    bound = limit(Work(6e9, 3e9, 4e9), Rates(flops=3e9, bytes=2e9))
    assert (bound.linear, bound.attention, bound.load, bound.total) == (2.0, 1.0, 2.0, 5.0)


def test_experts_are_refused() -> None:
    with pytest.raises(ModelUnsupported, match="experts"):
        Counts.of(tiny_adapter("mixtral"))


def test_rates_are_of_this_machine_in_its_units() -> None:
    rates = measure_rates(torch.float32, torch.device("cpu"), sides=(256,), copied=1 << 22)
    assert 1e8 < rates.flops < 1e16
    assert 1e7 < rates.bytes < 1e14


def test_stages_add_up_to_prefill(reader: Reader, workload: Workload, tmp_path: Path) -> None:
    staged = StagedAdapter(reader.adapter)
    (variant,) = [v for v in variants(("query+shift@0.2",), ()) if v.kind == "blend"]
    with Harness(reader, workload, (variant,), tmp_path, staged.as_adapter()) as contest:
        contest.precompute()
        staged.clock.seconds.clear()
        for _ in range(2):  # and each run starts anew
            took = contest.run(variant)
            split = staged.split(took)
            assert sum(split.values()) == pytest.approx(took.prefill)
            assert not staged.clock.seconds["linear"]
            assert all(seconds > 0 for seconds in split.values()), split
