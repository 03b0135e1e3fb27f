"""Figures by hand, a page that stands alone, and the command as a user types it."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs
from xml.etree import ElementTree

import pytest

from blendserve.cli import main
from blendserve.errors import InputError
from blendserve.evaluate.budget_use import spending
from blendserve.evaluate.plots import pareto
from blendserve.evaluate.report import render
from blendserve.evaluate.summary import Table, headline, summarise
from blendserve.evaluate.tables import brief, tables
from blendserve.evaluate.variants import variants
from blendserve.registry import CACHEBLEND
from tests.evaluate.helpers import predictions, run, write_dataset

# mean KL and seconds to the first token on two questions
MEASURED = {
    "full": ((0.0, 0.0), (1.0, 3.0)),
    "reuse": ((0.1, 0.3), (0.1, 0.1)),
    "deviation@0.15": ((0.05, 0.15), (0.4, 0.4)),
    "query@0.15": ((0.05, 0.07), (0.5, 0.5)),
    "query+shift@0.05": ((0.09, 0.11), (0.25, 0.25)),
    "query+shift@0.15": ((0.02, 0.04), (0.3, 0.5)),
}
VARIANTS = variants(list(MEASURED), ())
IDS = ("a", "b")
ASKED = {i: i for i in IDS}


def line(name: str, n: int, **more: Any) -> dict[str, Any]:
    kl, ttft = (values[n] for values in MEASURED[name])
    scores = {
        "f1": 0.25 + 0.5 * n,
        "em": 0.0,
        "rouge_l": 0.0,
        "agreement": 1.0,
        "identical": n == 0,
        "first_kl": 2 * kl,
    }
    counts = dict.fromkeys(
        ("tokens_prompt", "tokens_recomputed", "tokens_computed", "tokens_exact", "bytes_loaded", "cost"),
        10 + n,
    )
    seconds = {"ttft": ttft, "prefill": ttft, "decode": 1.0}
    return {
        "mean_kl": kl,
        **scores,
        **counts,
        "type": ("x", "y")[n],
        "recall": None,
        "seconds": seconds,
        **more,
    }


def table(**more: Any) -> Table:
    lines = {(i, name): line(name, n, **more) for n, i in enumerate(IDS) for name in MEASURED}
    return Table(lines, ASKED, VARIANTS)


def test_the_figures_of_two_questions_by_hand() -> None:
    figures = summarise(table(recall=0.5), "F1")
    found = figures["methods"]["query+shift@0.15"]
    assert figures["questions"] == 2
    assert figures["recall"]["mean"] == 0.5
    assert found["mean_kl"]["mean"] == pytest.approx(0.03)
    assert found["mean_kl_share"]["mean"] == found["first_kl_share"]["mean"] == pytest.approx(0.06 / 0.4)
    assert found["seconds"]["ttft"] == pytest.approx({"median": 0.4, "p95": 0.49})
    assert found["times_faster"]["mean"] == pytest.approx(2.0 / 0.4)
    assert found["identical"]["mean"] == found["f1"]["mean"] == 0.5
    assert {kind: by["mean"] for kind, by in found["f1_by_type"].items()} == {"x": 0.25, "y": 0.75}
    assert found["tokens_recomputed"] == 10.5
    pair = next(p for p in figures["pairs"] if (p["a"], p["b"]) == ("reuse", "deviation@0.15"))
    assert pair["mean_kl"]["mean"] == pytest.approx(0.1)
    assert pair["ttft_ratio"]["mean"] == pytest.approx(0.25)
    assert len(figures["pairs"]) == 15
    assert [tail["against"] for tail in figures["methods"]["query+shift@0.05"]["tails"]] == ["reuse"]
    reuse, uncorrected = found["tails"]
    assert [tail["worst"] for tail in found["tails"]] == pytest.approx([0.02 / 0.1, 0.04 / 0.07])
    assert (uncorrected["against"], uncorrected["prompts"][0]["id"], reuse["prompts"][0]["id"]) == (
        "query@0.15", "b", "a",
    )  # fmt: skip


def test_the_headline_by_hand() -> None:
    said = headline(table(), CACHEBLEND)
    fast, near = said["at_its_fidelity"], said["in_its_time"]
    assert fast["method"] == "query+shift@0.05"  # as near as the rule on average, and faster
    assert fast["times_faster_than_full"]["mean"] == pytest.approx(8.0)
    assert fast["times_faster_than_rule"]["mean"] == pytest.approx(1.6)
    assert fast["mean_kl_share_of_rule"]["mean"] == pytest.approx(1.0)
    assert near["method"] == "query+shift@0.15"
    assert near["mean_kl_share_of_rule"]["mean"] == pytest.approx(0.3)


def test_only_questions_that_every_method_answered_count() -> None:
    lines = {(i, name): line(name, n) for n, i in enumerate(IDS) for name in MEASURED}
    del lines["a", "query@0.15"]
    assert Table(lines, ASKED, VARIANTS).ids == ["b"]
    del lines["b", "full"]
    with pytest.raises(InputError, match="no question was answered by every method"):
        Table(lines, ASKED, VARIANTS)


def test_a_matrix_turns_pairs_to_its_rows() -> None:
    sheets = {
        sheet.title: sheet for sheet in tables({**summarise(table(), "F1"), "spending": {}, "metric": "F1"})
    }
    kl, ttft = sheets["Mean KL, row minus column"], sheets["TTFT, row divided by column"]
    at = list(kl.columns).index("reuse")
    row = next(n for n, cells in enumerate(kl.rows) if cells[0].text == "deviation@0.15")
    assert (kl.rows[row][at].text, kl.rows[row][at].below) == ("-0.1000", "-0.1500 to -0.0500")
    assert kl.rows[row][at].sure
    assert ttft.rows[row][at].text == "4.00"
    assert all(cell.text == "" for cell in kl.rows[row][at + 2 :])


def test_where_a_budget_goes_by_hand() -> None:
    parts = [["x"] * n for n in (5, 10, 30, 3)]  # prefix, two chunks, suffix: the context is [5, 45)
    prompt = {"parts": parts, "titles": ["A", "B"], "needed": ["B"]}
    spent = spending([prompt, prompt], [{"recomputed": [[5, 7], [14, 16]]}, {"recomputed": [[40, 44]]}])
    assert spent == {"quarters": [0.375, 0.125, 0.0, 0.5], "needed": 0.625, "needed_of_context": 0.75}
    windows = spending([{**prompt, "titles": ["A"]}], [{"recomputed": [[5, 7]]}])
    assert windows == {"quarters": [1.0, 0.0, 0.0, 0.0], "needed": None, "needed_of_context": None}
    assert spending([prompt], [{"recomputed": []}]) is None


def test_the_plot_has_a_line_a_policy_and_a_point_a_ratio() -> None:
    methods = summarise(table(), "F1")["methods"]
    svg = pareto(methods, "Two & <three>")
    text = [t.text for t in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert "Two & <three>" in text
    assert {"full", "reuse", "deviation", "query", "query+shift"} < set(text)
    assert text.count("query+shift") == 1
    assert text.count("5%") == 2  # a panel each
    assert text.count("15%") == 6
    assert pareto(methods, "Two & <three>") == svg
    assert pareto(methods, "x", "png").startswith(b"\x89PNG")


class Page(HTMLParser):
    """Checks nesting, collects what could reach out, and the embedded data."""

    VOID = ("meta", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.refers: list[str] = []
        self.scripts: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.refers += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("report")
    path = write_dataset(folder, 2)
    hostile = "</script><b>&amp; Zoë</b>"
    path.write_text(
        path.read_text().replace("by the river", hostile).replace("Where was", f"{hostile} Where was")
    )
    return run(folder, path, methods=("query+shift", "random", "prefix", "transformers"))


def test_the_page_stands_alone_and_holds_every_table_and_prompt(done: Any) -> None:
    page = Page((done.folder / "report.html").read_text(encoding="utf-8"))
    assert page.open == []
    pictures = [reference for reference in page.refers if reference.startswith("data:")]
    links = [reference for reference in page.refers if reference.startswith("#")]
    assert len(pictures) + len(links) == len(page.refers)
    assert len(pictures) == 1
    svg = base64.b64decode(pictures[0].partition(",")[2])
    asked = [parse_qs(link[1:]) for link in links]
    assert {(*query["prompt"], *query["method"]) for query in asked} == {
        (id, method) for id in ("q0", "q1") for method in ("query+shift@0.25", "random@0.25")
    }
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert len(page.scripts) == 2
    data = json.loads(page.scripts[0])
    methods = list(done.figures["methods"])
    assert data["methods"] == methods
    assert set(methods) < set(page.cells)
    assert [prompt["id"] for prompt in data["prompts"]] == ["q0", "q1"]
    for prompt in data["prompts"]:
        assert "</script><b>&amp; Zoë</b>" in "".join(t for part in prompt["parts"] for t in part)
        n = sum(map(len, prompt["parts"]))
        for shown in data["lines"][prompt["id"]].values():
            assert all(0 <= a < b <= n - len(prompt["parts"][-1]) for a, b in shown["recomputed"])
    assert (
        data["lines"]["q0"]["random@0.25"]["recomputed"]
        != data["lines"]["q0"]["query+shift@0.25"]["recomputed"]
    )
    assert data["lines"]["q0"]["full"]["blends"] is False


def test_the_page_is_made_of_what_the_run_kept(done: Any) -> None:
    figures = json.loads((done.folder / "metrics.json").read_text())
    prompts = [json.loads(text) for text in (done.folder / "prompts.jsonl").read_text().splitlines()]
    lines = {(p["id"], p["method"]): p for p in predictions(done)}
    plots = {path.name: path.read_bytes() for path in done.folder.glob("*.svg")}
    again = render(done.folder.name, figures, {p["id"]: p for p in prompts}, lines, plots)
    assert again == (done.folder / "report.html").read_text(encoding="utf-8")
    columns, rows = brief(figures)
    assert all(len(row) == len(columns) for row in rows)


def test_without_matplotlib_it_is_said_before_hours_of_measuring(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=re.escape("pip install 'matplotlib>=")):
        run(tmp_path, tmp_path / "none.json")


def command(*words: object) -> int:
    return main([str(word) for word in words])


def test_evaluate_with_the_bundled_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "evaluate",
        "--limit",
        2,
        "--chunks",
        4,
        "--methods",
        "deviation,query+shift",
        "--ratios",
        "0.15",
    )
    options = ("--max-new-tokens", 4, "--runs", tmp_path)
    assert command(*words, *options, "--json") == 0
    out = capsys.readouterr().out.strip().splitlines()
    figures = json.loads(out[-1])
    share = {name: m["mean_kl_share"]["mean"] for name, m in figures["methods"].items()}
    assert share["query+shift@0.15"] < share["deviation@0.15"] < share["reuse"] == 1.0
    assert figures["headline"]["rule"] == "deviation@0.15"
    kept = {path.name for path in Path(figures["folder"]).iterdir()}
    assert kept == {
        "config.yaml", "prompts.jsonl", "predictions.jsonl", "metrics.json", "pareto.svg", "pareto.png", "report.html",
    }  # fmt: skip
    assert command(*words, *options) == 0
    shown = capsys.readouterr()
    assert "query+shift@0.15" in shown.out
    assert "Resuming" in shown.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--methods", "qeury@0.1"), "'qeury@0.1'"),
        (("--ratios", "a"), "evaluate.ratios"),
        (("--limit", "0"), "setting 'evaluate.limit' cannot be 0"),
        (("--setting", "shut"), "evaluate.setting"),
        (("--dataset", "no/such.json"), "is no file and none of the known names"),
        (("--kv-context", "bois"), "prompt.kv_context"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("evaluate", "--runs", tmp_path, *options) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert list(tmp_path.iterdir()) == []
