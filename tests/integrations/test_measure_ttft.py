"""integrations/measure_ttft.py with a tiny model: its rows, its exit code, and the answers of every framework."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.bench.conftest import write_shape
from tests.conftest import INTEGRATIONS
from tests.support.engines import QUESTIONS
from tests.support.http import Server

SMALL = {"collection": "a", "questions": 1, "chunks": 3, "chunk_tokens": 16}
SCRIPT = INTEGRATIONS / "measure_ttft.py"
spec: Any = importlib.util.spec_from_file_location("measure_ttft", SCRIPT)
script: Any = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = script  # dataclasses look their module up
spec.loader.exec_module(script)


def samples(application: str, blended: tuple[float, ...], full: tuple[float, ...], text: str = "yes") -> Any:
    """One question for each pair of times; `text` is the answer to the first one, blended."""
    return [
        script.Sample(application, method, str(n), ttft_s, "yes" if n or method == "full" else text)
        for method, times in (("blended", blended), ("full", full))
        for n, ttft_s in enumerate(times)
    ]


def test_a_row_holds_medians_extremes_and_equal_answers() -> None:
    own = samples("own API", (1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    _, row = script.rows(own + samples("other", (0.1, 0.2, 0.5), (4.0, 2.0, 1.0), "no"))
    assert (row.blended, row.full) == ((0.2, 0.1, 0.5), (2.0, 1.0, 4.0))
    assert (row.speedup, row.least_speedup) == (pytest.approx(10), pytest.approx(2))
    assert (row.equal, row.answers) == (5, 6)


@pytest.mark.parametrize(
    ("text", "at_least", "fails"), [("yes", None, False), ("no", None, True), ("yes", 5.0, True)]
)
def test_a_different_answer_or_a_low_speedup_is_the_exit_code(
    server: Server, monkeypatch: pytest.MonkeyPatch, text: str, at_least: float | None, fails: bool
) -> None:
    measured = samples("own API", (1.0,), (1.0,)) + samples("other", (1.0,), (1.0,), text)
    monkeypatch.setattr(script, "measure", lambda target: measured)
    options = {"url": server.url, **SMALL, **({"at_least": at_least} if at_least else {})}
    with pytest.raises(script.typer.Exit) if fails else nullcontext():
        script.main(**options)


def test_chunks_are_long_and_shuffled_and_stored(server: Server) -> None:
    target = script.choose(server.url, QUESTIONS, 3, 16, "a", 0)
    orders = {tuple(p["id"] for p in passages) for passages in target.passages.values()}
    assert {frozenset(order) for order in orders} == {frozenset({"cats:0", "snow:0", "ships:0"})}
    scores = [[p["score"] for p in passages] for passages in target.passages.values()]
    assert any(row != sorted(row, reverse=True) for row in scores)  # the nearest is not always first
    assert script.choose(server.url, QUESTIONS, 3, 16, "a", 0) == target
    assert server.post("/v1/cache/lookup", {"collection": "a"}).json()["found"] == 3
    for chunk_tokens, collection in ((400, "a"), (16, "nothing")):
        with pytest.raises(SystemExit):
            script.choose(server.url, QUESTIONS, 3, chunk_tokens, collection, 0)


def test_without_any_framework_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("langchain_core", "langchain_openai", "langchain_blendserve", "llama_index", "haystack"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit):
        script.applications(script.Target("http://127.0.0.1:1", "tiny", {}))


@pytest.mark.parametrize(
    "own_server", [False, pytest.param(True, marks=[pytest.mark.nightly, pytest.mark.timeout(300)])]
)
def test_it_measures_every_framework(
    server: Server, own_server: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At night as a command, with an index of real text and a server of its own."""
    for package in ("langchain_openai", "llama_index.core", "haystack.version"):
        pytest.importorskip(package)
    if own_server:
        model = write_shape(tmp_path / "shape", max_position_embeddings=4096)
        options = f"--model {model} --index {tmp_path / 'index'} --questions 2 --max-tokens 4 --json"
        command = [sys.executable, str(SCRIPT), *options.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        printed = json.loads(done.stdout)
    else:
        script.main(url=server.url, **{**SMALL, "questions": 2}, max_tokens=4, as_json=True)
        printed = json.loads(capsys.readouterr().out)
    names = [row["application"] for row in printed["rows"]]
    assert names == ["own API", "LangChain", "LlamaIndex", "Haystack"]
    assert [(row["equal"], row["answers"]) for row in printed["rows"]] == [(4, 4)] * 4
    assert all(s["ttft_s"] > 0 and s["text"] for s in printed["samples"])
