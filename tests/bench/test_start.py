"""The bench of whole processes, on a tiny reader: what they print fits together, and a failed one is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from blendserve.bench import start
from blendserve.bench.answers import ANSWERS
from blendserve.bench.config import StartConfig
from blendserve.bench.tables import start as tables
from blendserve.errors import InputError


def test_every_process_runs_and_is_timed(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = lambda calls, repeats, update: {name: [call()] for name, call in calls.items()}  # noqa: E731
    monkeypatch.setattr(start, "interleaved", once)
    config = StartConfig(
        model=tiny, dtype="float32", passages=2, chunk_tokens=64, new_tokens=3, repeats=1, folder=tmp_path
    )
    figures = start.measure(config)
    assert list(figures["processes"]) == ["blendserve --help", "blendserve ask", f"{ANSWERS} answers"]
    assert figures["tokens"][0] <= 3
    assert len(figures["ttft"]["answers"]) == ANSWERS
    assert figures["ttft"]["ask"]["median"] < figures["processes"]["blendserve ask"]["median"]
    assert figures["machine"]["cpu"]
    assert list(tmp_path.iterdir()) == []
    assert all(len(columns) == len(row) for _, columns, rows in tables(figures) for row in rows)


def test_the_first_answer_is_held_against_those_after_it() -> None:
    asked = {"tokens": 16, "timings": {"ttft": 0.7}}
    rows: list[list[tuple[float, Any]]] = [[(0.4, 900)], [(6.0, asked)], [(7.0, [0.9, 0.5, 0.7])]]
    figures = start._figures(*rows, names=["help", "ask", "answers"])
    assert figures["first_against_later"]["rounds"] == [pytest.approx(1.5)]
    assert [f["median"] for f in figures["ttft"]["answers"]] == [0.9, 0.5, 0.7]


def test_a_process_that_fails_is_one_line() -> None:
    with pytest.raises(InputError, match="measured failed: no index here"):
        start._process((sys.executable, "-c", "raise SystemExit('no index here')"))
