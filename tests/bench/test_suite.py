"""Suites run in order, within their time, past failures; claims are judged; pages are rendered from results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import render_results
from benchmarks.render_results import BEGIN, END, PAGES, RESULTS, claims_table, rendered, ttft_table
from blendserve.bench import ttft
from blendserve.bench.roofline import Rates
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
    return {
        "says": "S",
        "run": "one",
        "metric": "gb_per_s",
        "where": {"operation": "put"},
        "target": target,
        **more,
    }


def test_a_suite_goes_on_after_a_failure_resumes_and_judges(tiny: str, tmp_path: Path) -> None:
    runs = {"one": store_run(tiny), "bad": store_run("random:gpt-9"), "last": {"command": "json.tool --help"}}
    file = write_suite(tmp_path, runs, faster(">= 0"), faster(">= 1000000000"))
    first, again = (cli("bench", "suite", file, "--out", tmp_path / "out") for _ in range(2))
    states = first.json()
    assert (first.code, states["one"], states["last"]) == (1, "done", "done")
    assert "gpt-9" in states["bad"]
    assert again.json()["one"] == "done"
    verdicts = [verdict for _, verdict in Suite.read(file).verdicts(tmp_path / "out")]
    assert [verdict.met for verdict in verdicts if verdict] == [True, False]
    late = run_suite(Suite.read(file), tmp_path / "late", minutes=0)
    assert set(late.values()) == {"skipped"}
    assert [v for _, v in Suite.read(file).verdicts(tmp_path / "late")] == [None, None]


@pytest.mark.parametrize("file", ["configs/bench/gpu.yaml"])
def test_the_gpu_suite_runs_dry(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttft, "measure_rates", lambda *_: Rates(1e9, 1e9))
    suite = Suite.read(ROOT / file)
    few = suite.model_copy(update={"runs": {n: suite.runs[n] for n in ("ttft_host", "decode", "kernels")}})
    assert set(run_suite(few, tmp_path, 5, dry_run=True).values()) == {"done"}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "broken",
    [
        {"runs": {"one": {"benches": "ttft"}}},
        {"runs": {"one": {"bench": "store", "chunks": 0}}},
        {"runs": {}, "claims": [faster(">= 1")]},
        {"runs": {"one": {"command": "x"}}, "claims": [faster("about 1")]},
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
    assert share.judge({"methods": {"m": {"share": {"mean": 0.4, "low": 0.3, "high": 0.6}}}}) == (
        0.4,
        0.3,
        0.6,
        True,
    )
    assert share.judge({"methods": {"m": {"share": 0.4}}})[:2] == (0.4, 0.4)
    with pytest.raises(InputError):
        share.judge({"methods": {}})


def write_ttft(folder: Path) -> None:
    """A result in which every method is twice as fast as the one before."""
    environment: dict[str, Any] = {
        "versions": {"commit": "abc"},
        "machine": {"cpu": "C", "instruction_sets": [], "cores": 2},
    }
    environment["machine"] |= {"gpu": "", "system": "Linux", "threads": 2}
    samples = [
        [{"source": "warm", "method": method}, 0, {"ttft_s": 4.0 / 2**n}]
        for n, method in enumerate(render_results.METHODS)
    ]
    samples.append([{"source": "fresh process", "method": "query+prior@0.05"}, 0, {"above_kv_ratio": 0.5}])
    header = {"bench": "ttft", "config": {}, "environment": environment}
    lines = [header, {"group": {}, "facts": {}, "samples": samples}]
    folder.mkdir()
    (folder / "ttft.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_pages_are_rendered_from_results(tmp_path: Path) -> None:
    results = tmp_path / "results"
    write_ttft(results)
    suite, page = Suite.read(render_results.CLAIMS), tmp_path / "README.md"
    table = claims_table(suite, results)
    assert "| 8.00 | >= 12 | **no** |" in table
    assert table.count("not run") == len(suite.claims) - 4
    page.write_text(f"before\n{BEGIN}old{END}\nafter\n")
    assert rendered(page, suite, results) == page.read_text()  # KL shares are missing yet
    share = {"methods": {"reuse": {"mean_kl_share": {"mean": 1.0, "low": 1.0, "high": 1.0}}}}
    for run in render_results.QUALITY:
        (results / f"{run}.json").write_text(json.dumps(share))
    text = rendered(page, suite, results)
    assert text == f"before\n{BEGIN}\n{ttft_table(results)}\n{END}\nafter\n"
    assert "| 4,000 | 1.0 | | |" in text
    assert "| 16.0 | 1.00 | 1.00 |" in text


def test_the_pages_in_the_repository_are_the_rendered_ones() -> None:
    suite = Suite.read(render_results.CLAIMS)
    assert len({claim.says for claim in suite.claims}) == len(suite.claims) > 15
    for page in PAGES:
        assert page.read_text("utf-8") == rendered(page, suite, RESULTS), (
            f"{page}: python -m benchmarks.render_results"
        )
