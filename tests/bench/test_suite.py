"""Suites run in order, within their time, past failures; claims are judged; pages are rendered from results."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.render_results import CLAIMS, README, RESULTS, RESULTS_PAGE, rendered, results_part
from benchmarks.render_results import PAGES as RENDERED
from blendserve.bench.suite import Claim, Suite, run_suite
from blendserve.errors import ConfigError, InputError
from tests.support.commands import cli

ROOT = Path(__file__).parents[2]


def write_suite(folder: Path, runs: dict[str, Any], *claims: dict[str, Any]) -> Path:
    file = folder / "suite.yaml"
    file.write_text(yaml.safe_dump({"runs": runs, "claims": list(claims)}))
    return file


def store_run(tiny: str, **more: Any) -> dict[str, Any]:
    return {"bench": "store", "model": tiny, "chunks": 2, "chunk_tokens": 8, "repeats": 1, **more}


def faster(target: str, **more: Any) -> dict[str, Any]:
    claim = {"says": "S", "run": "one", "metric": "gb_per_s", "where": {"operation": "put"}}
    return {**claim, "target": target, **more}


def test_a_suite_goes_on_after_a_failure_resumes_and_judges(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables are set by the user, and no value of theirs is stored."""
    echo = "import json, sys\nprint('a table')\nprint(json.dumps({'folder': sys.argv[1], 'data': f'{sys.argv[2]}/q'}))"
    (tmp_path / "echo_words.py").write_text(echo)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    last = {"command": "echo_words $OUT $data"}
    runs = {"one": store_run(tiny), "bad": store_run("random:gpt-9"), "last": last}
    file, out = write_suite(tmp_path, runs, faster(">= 0"), faster(">= 1000000000")), tmp_path / "out"
    first = cli("bench", "suite", file, "--out", out)
    states = first.json()
    assert (first.code, states["one"], states["last"]) == (1, "done", "skipped: needs --set data=VALUE")
    assert "gpt-9" in states["bad"]
    again = cli("bench", "suite", file, "--out", out, "--set", "data=/secret/place").json()
    assert (again["one"], again["last"]) == ("done", "done")
    suite = Suite.read(file)
    assert suite.result("last", out) == {"folder": "$OUT", "data": "$data/q"}
    assert [verdict.met for _, verdict in suite.verdicts(out) if verdict] == [True, False]


def test_a_suite_keeps_its_time_and_runs_what_is_chosen(tiny: str, tmp_path: Path) -> None:
    """A run that needs more than is left is skipped, a shorter one after it is not."""
    runs = {"long": store_run(tiny, minutes=9), "short": store_run(tiny, minutes=1), "other": store_run(tiny)}
    suite = Suite.read(write_suite(tmp_path, runs, faster(">= 0", run="long")))
    states = run_suite(suite, tmp_path / "out", 5, only=("long", "short"))
    assert states == {"long": "skipped: needs 9 minutes", "short": "done"}
    assert [verdict for _, verdict in suite.verdicts(tmp_path / "out")] == [None]
    with pytest.raises(InputError):
        run_suite(suite, tmp_path / "out", 5, only=("unknown",))


GPU_SUITE = ROOT / "configs" / "bench" / "gpu.yaml"
AT_NIGHT = [pytest.mark.nightly, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("file", "only"),
    [
        (GPU_SUITE, "decode"),
        pytest.param(GPU_SUITE, "", marks=AT_NIGHT),
        pytest.param(CLAIMS, "", marks=AT_NIGHT),
    ],
)
def test_a_suite_of_the_repository_runs_dry_on_a_cpu(file: Path, only: str, tmp_path: Path) -> None:
    suite = cli("bench", "suite", file, "--out", tmp_path, "--only", only, "--minutes", 60, "--dry-run")
    states = suite.json()
    assert suite.code == 0, states
    assert states == dict.fromkeys([only] if only else Suite.read(file).runs, "done")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "broken",
    [
        {"runs": {"one": {"benches": "ttft"}}},
        {"runs": {"one": {"bench": "store", "chunks": 0}}},
        *({"runs": {"one": {"bench": name}}} for name in ("nothing", "no.such.module")),
        {"runs": {}, "claims": [faster(">= 1")]},
        {"runs": {"one": {"command": "x"}}, "claims": [faster("about 1")]},
        {"runs": {"one": {"command": "x", "chunks": 1}}},
        {"claims": []},
    ],
)
def test_a_wrong_suite_is_refused_before_anything_runs(broken: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(broken))
    with pytest.raises(ConfigError):
        Suite.read(tmp_path / "suite.yaml")


def test_claims_read_facts_and_paths() -> None:
    result = {"groups": [{"facts": {"miss": 0.2}}, {"facts": {"miss": 0.1}}, {"facts": {}}]}
    claim = Claim(says="S", run="auto", fact="miss", target="<= 0.1")
    assert (claim.judge(result).value, claim.judge(result).met) == (0.2, False)
    share = Claim(says="S", run="quality", path=("methods", "m", "share"), target="<= 0.5")
    interval = {"mean": 0.4, "low": 0.3, "high": 0.6}
    assert share.judge({"methods": {"m": {"share": interval}}}) == (0.4, 0.3, 0.6, True)
    assert share.judge({"methods": {"m": {"share": 0.4}}})[:2] == (0.4, 0.4)
    with pytest.raises(InputError):
        share.judge({"methods": {}})


def test_the_pages_in_the_repository_are_the_rendered_ones(tmp_path: Path) -> None:
    """Results that are there, and results that are missing."""
    suite = Suite.read(CLAIMS)
    assert len({claim.says for claim in suite.claims}) == len(suite.claims) > 15
    for page in RENDERED:
        assert page.read_text("utf-8") == rendered(page, suite, RESULTS), (
            "python -m benchmarks.render_results"
        )
    assert len(RESULTS_PAGE.read_text("utf-8").splitlines()) <= 150
    assert len(README.read_text("utf-8").split()) <= 900
    (tmp_path / "page.md").write_text("no marks")
    with pytest.raises(InputError):
        rendered(tmp_path / "page.md", suite, RESULTS)


PAGES = [ROOT / "adapters" / "README.md", *sorted(set(ROOT.glob("docs/**/*.md")) - {RESULTS_PAGE})]


def strange_figures(page: str, part: str) -> Iterator[tuple[str, str]]:
    """Decimals of a paragraph that names runs (and of a table before it) that the results page does not have of them."""
    header = next(line for line in part.splitlines() if line.startswith("| method | TTFT ms"))
    table = [line.split("|") for line in part.partition(header)[2].partition("\n\n")[0].splitlines()]
    for block in re.split(r"\n\n(?!\|)(?<!\|\n\n)", page):
        runs = re.findall(r"\bruns? `(\w+)`", block)
        if not runs:
            continue
        known = [line for line in part.splitlines() if line.endswith(tuple(f"`{run}` |" for run in runs))]
        of_runs = [n for n, title in enumerate(header.split("|")) if title.strip().endswith(tuple(runs))]
        known += [row[n] for row in table if len(row) > max(of_runs, default=0) for n in of_runs]
        told = set(re.findall(r"\d+\.\d+", " ".join(known)))
        yield from (
            (runs[0], figure) for figure in re.findall(r"(?<![@~\d.])\d+\.\d+", block) if figure not in told
        )


def test_figures_of_a_run_are_those_of_the_results() -> None:
    """A copy by hand is found once the run is measured again."""
    part = results_part(Suite.read(CLAIMS), RESULTS)
    copies = "| F1 |\n|---|\n| 0.27 |\n\nThe figures are from the run `reader_2wikimqa`.\n\n1.9 GB"
    assert list(strange_figures(copies, part)) == [("reader_2wikimqa", "0.27")]
    named = [page for page in PAGES if re.search(r"\bruns? `\w+_\w+`", page.read_text("utf-8"))]
    assert len(named) >= 3
    assert {page.name: list(strange_figures(page.read_text("utf-8"), part)) for page in named} == {
        page.name: [] for page in named
    }
