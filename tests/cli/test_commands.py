"""Commands from their arguments to their exit code and JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from blendserve.registry import CODECS
from blendserve.store.codecs.base import known_codec
from tests.cli import stops_itself
from tests.cli.conftest import write_corpus
from tests.support.commands import cli
from tests.support.forked import process

SCRIPTS = Path(__file__).parents[2] / "scripts"
STORED = 6  # chunks when a run is stopped: of 24 that are computed in batches of 8, so some are missing


def test_ask_blends_with_the_given_ratio_and_streams(index: Path) -> None:
    question = ("ask", "Where was the bee seen?", "-i", index, "--max-new-tokens", 8)
    asked = cli(*question, "--json", "--method", "blend", "--ratio", 0.2)
    answer, report = asked.json(), asked.json()["report"]
    assert (asked.code, asked.out.count("\n")) == (0, 1)
    assert answer["passages"][0]["doc_id"] == "doc-1"
    assert report["blended"] is True
    assert report["chunks_hit"] == report["chunks"] == 4
    assert report["share_recomputed"] == pytest.approx(0.2, abs=0.005)
    assert answer["timings"]["ttft"] > 0
    streamed = cli(*question)
    assert (streamed.code, "bee 1" in streamed.out) == (0, True)  # the title of a source


def test_index_and_store_commands_add_up(index: Path, tmp_path: Path) -> None:
    def chunks() -> int:
        return int(cli("store", "stats", index, "--json").json()["chunks"])

    again = cli("precompute", index, "--json")
    assert again.code == 0
    assert again.json() | {"computed": 0, "missing": 0, "tokens": 0} == again.json()
    more, before = write_corpus(tmp_path / "more.jsonl", 6), chunks()
    for expected in (2, 0):
        added = cli("index", "add", more, index, "--json")
        assert (added.code, added.json()["added"]) == (0, expected)
    assert cli("precompute", index).code == 0
    assert chunks() == before + 2
    assert cli("index", "delete", index, "doc-4", "doc-5", "--json").json()["deleted"] == 2
    assert chunks() == before
    assert cli("index", "delete", index, "doc-4").code == 1


def test_shards_merge_into_one_store(index: Path, tmp_path: Path) -> None:
    for shard in ("0/2", "1/2"):
        store = tmp_path / f"kv-{shard[0]}"
        assert cli("precompute", index, "--shard", shard, "--store", store).code == 0
    merged = tmp_path / "all.yaml"
    merged.write_text(f"store: {{location: {tmp_path / 'kv'}}}\n")
    done = cli("store", "merge", index, tmp_path / "kv-0", tmp_path / "kv-1", "-c", merged, "--json")
    assert (done.code, done.json()["copied"]) == (0, 4)
    assert cli("precompute", index, "-c", merged, "--json").json()["computed"] == 0


def test_quiet_prints_results_alone(index: Path) -> None:
    for level, logs in (("--verbose", True), ("--quiet", False)):
        done = cli(level, "precompute", index)
        assert (done.code, done.out.count("\n"), bool(done.err.strip())) == (0, 1, logs)


def test_doctor_reports_every_check() -> None:
    done = cli("doctor", "--json")
    report = done.json()
    assert (done.code, report["passed"], len(report["rows"]) > 5) == (0, True, True)
    assert report["kernels"]["measured"] == []  # the suite turns measuring off
    assert min(report["kv_bytes_per_token"], report["context_tokens"]) > 0
    assert report["exact"]
    assert report["approximate"]


@pytest.mark.skipif(known_codec("cachegen") is None, reason="constriction is not installed")
def test_tables_are_fitted_used_and_shown(tmp_path: Path) -> None:
    corpus, index = write_corpus(tmp_path / "corpus.jsonl", 3), tmp_path / "index"
    assert cli("index", "build", corpus, index).code == 0
    done = cli("codec", "fit", index, "--codec", "cachegen", "--text", corpus, "--tokens", 200, "--json")
    (fitted,) = done.json()["tables"]
    assert (done.code, fitted["codec"]) == (0, "cachegen")
    (shown,) = cli("codec", "show", index, "--json").json()["tables"]
    assert (shown["hash"], shown["bytes"], shown["current"]) == (fitted["hash"], fitted["bytes"], True)
    assert cli("precompute", index, "--codec", "cachegen@2", "--json").code == 0
    stats = cli("store", "stats", index, "--json").json()
    assert (stats["chunks"], stats["tables_bytes"]) == (3, fitted["bytes"])
    assert stats["raw_bytes"] > 5 * stats["bytes"]
    assert cli("store", "verify", index, "--json").json()["bad_tables"] == []
    asked = cli("ask", "Where was the bee?", "-i", index, "--json", "--max-new-tokens", 3)
    assert asked.json()["report"]["chunks_hit"] == 3


def test_results_are_tables_without_json(index: Path) -> None:
    assert [c["codec"] for c in cli("codec", "list", "--json").json()["codecs"]] == list(CODECS.names)
    for command in (("codec", "list"), ("codec", "show", index), ("store", "stats", index), ("doctor",)):
        done = cli(*command)
        assert (done.code, done.out.count("\n") > 3) == (0, True), command


def test_ctrl_c_ends_precompute_cleanly_and_the_next_run_resumes(tmp_path: Path) -> None:
    """Every chunk is good, none is computed twice. tests/endurance/crash.py does the same with SIGKILL."""
    corpus, index, store = write_corpus(tmp_path / "corpus.jsonl", 24), tmp_path / "index", tmp_path / "kv"
    assert cli("index", "build", corpus, index).code == 0
    script = (STORED, SCRIPTS / "precompute_kv.py", str(index), "--store", str(store))
    with process(stops_itself.run, tmp_path / "log", *script) as (stopped, _):
        stopped.join()
    assert stopped.exitcode == 130
    assert "Traceback" not in (tmp_path / "log").read_text()
    done = cli("precompute", index, "--store", store, "--json")
    report = done.json()
    assert report["computed"] + report["skipped"] == report["chunks"] == 24
    assert STORED <= report["skipped"] < 24  # the chunks of the stopped batch are stored before the exit
    verified = cli("store", "verify", index, "--store", store, "--json").json()
    assert (verified["good"], verified["bad"]) == (24, [])
