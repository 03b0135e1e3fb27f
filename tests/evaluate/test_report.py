"""Figures by hand, a page that stands alone, and the command with the bundled reader."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from blendserve.cli import main
from blendserve.errors import InputError
from blendserve.evaluate.job import Outcome
from blendserve.evaluate.methods import parse_methods
from blendserve.evaluate.report import tables
from blendserve.evaluate.summary import COUNTS, Predictions, summarize
from tests.support.evaluations import HOSTILE, run

# mean KL and seconds to the first token on two questions
MEASURED = {
    "full": ((0.0, 0.0), (1.0, 3.0)),
    "reuse": ((0.1, 0.3), (0.1, 0.1)),
    "query@0.15": ((0.05, 0.07), (0.5, 0.5)),
    "query+shift@0.15": ((0.02, 0.04), (0.3, 0.5)),
}
VARIANTS = parse_methods(list(MEASURED), ())
QUESTIONS = {"a": "a", "b": "b"}


def line(name: str, n: int) -> dict[str, Any]:
    kl, ttft = (values[n] for values in MEASURED[name])
    scores = {"f1": 0.25 + 0.5 * n, "em": 0.0, "rouge_l": 0.0, "agreement": 1.0, "identical": n == 0}
    seconds = {"ttft": ttft, "prefill": ttft, "decode": 1.0}
    about = {"type": "xy"[n], "recall": 0.5, "seconds": seconds, "first_kl": 2 * kl, "mean_kl": kl}
    scores["score"] = scores["f1"]
    return {**scores, **dict.fromkeys(COUNTS, 10 + n), **about}


LINES = {(i, name): line(name, n) for n, i in enumerate(QUESTIONS) for name in MEASURED}


def test_the_figures_of_two_questions_by_hand() -> None:
    figures = summarize(Predictions(LINES, QUESTIONS, VARIANTS), "F1")
    found = figures["methods"]["query+shift@0.15"]
    assert (figures["questions"], figures["recall"]["mean"]) == (2, 0.5)
    assert found["mean_kl"]["mean"] == pytest.approx(0.03)
    assert found["mean_kl_share"]["mean"] == found["first_kl_share"]["mean"] == pytest.approx(0.06 / 0.4)
    assert found["seconds"]["ttft"] == pytest.approx({"median": 0.4, "p95": 0.49})
    assert found["times_faster"]["mean"] == pytest.approx(2.0 / 0.4)
    assert found["identical"]["mean"] == found["f1"]["mean"] == 0.5
    assert found["tokens_recomputed"] == 10.5
    reuse, uncorrected = found["tails"]
    assert [tail["worst"] for tail in found["tails"]] == pytest.approx([0.02 / 0.1, 0.04 / 0.07])
    assert (reuse["against"], uncorrected["against"]) == ("reuse", "query@0.15")


def test_tables_show_the_figures_in_their_units() -> None:
    figures = summarize(Predictions(LINES, QUESTIONS, VARIANTS), "F1")
    shown = {table.title: table for table in tables({**figures, "metric": "F1"})}
    assert list(shown) == ["Quality", "Single prompts", "Time and work"]
    for title, column, wanted in (
        ("Time and work", "times faster than full", "5.00 (3.33 to 6.00)"),
        ("Time and work", "TTFT ms", "400"),
        ("Quality", "mean KL, nats", "0.0300 (0.0200 to 0.0400)"),
        ("Quality", "F1 - full's", "+0.000 (+0.000 to +0.000)"),
    ):
        (row,) = (row for row in shown[title].rows if row[0] == "query+shift@0.15")
        assert row[shown[title].columns.index(column)] == wanted, column


def test_only_questions_that_every_method_answered_count() -> None:
    lines = dict(LINES)
    del lines["a", "query@0.15"]
    assert Predictions(lines, QUESTIONS, VARIANTS).ids == ["b"]
    del lines["b", "full"]
    with pytest.raises(InputError):
        Predictions(lines, QUESTIONS, VARIANTS)


@pytest.mark.parametrize(("kind", "plots"), [("raw", 1), ("coded", 2)])
def test_the_page_stands_alone_and_shows_the_prompts(
    toy: Callable[[str], Outcome], kind: str, plots: int
) -> None:
    done = toy(kind)
    page = (done.folder / "report.html").read_text(encoding="utf-8")
    assert HOSTILE not in page  # neither as HTML nor within a script
    refers = re.findall(r'(?:src|href)="([^"]*)"', page)
    pictures = [reference for reference in refers if reference.startswith("data:")]
    assert len(pictures) == plots
    assert all(reference.startswith(("data:", "#")) for reference in refers)
    for picture in pictures:
        assert ElementTree.fromstring(base64.b64decode(picture.partition(",")[2])).tag.endswith("svg")
    data = json.loads(re.findall("<script[^>]*>(.*?)</script>", page, re.DOTALL)[0])
    assert data["methods"] == list(done.metrics["methods"])
    for prompt in data["prompts"]:
        assert HOSTILE in "".join(t for part in prompt["parts"] for t in part)
        n = sum(map(len, prompt["parts"][:-1]))
        for shown in data["lines"][prompt["id"]].values():
            assert all(0 <= a < b <= n for a, b in shown["recomputed"])


def test_without_matplotlib_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError):
        run(tmp_path, tmp_path / "none.json", draws=True)
    assert not list(tmp_path.iterdir())


def test_evaluate_with_the_bundled_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "evaluate --limit 1 --chunks 4 --methods deviation,query+shift --ratios 0.15 --max-new-tokens 4"
    assert main([*words.split(), "--runs", str(tmp_path), "--name", "run"]) == 0
    figures = json.loads((tmp_path / "run" / "metrics.json").read_text())
    share = {name: m["mean_kl_share"]["mean"] for name, m in figures["methods"].items()}
    assert share["query+shift@0.15"] < share["deviation@0.15"] < share["reuse"] == 1.0
    assert "query+shift@0.15" in capsys.readouterr().out
