"""integrations/measure_ttft.py with a tiny model: its rows, and the answers of every framework."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.conftest import write_shape
from tests.conftest import INTEGRATIONS
from tests.engine.helpers import QUESTIONS
from tests.serve.helpers import Server

SCRIPT = INTEGRATIONS / "measure_ttft.py"
FRAMEWORKS = ("langchain_openai", "llama_index.core", "haystack.version")


def load() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("measure_ttft", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


script = load()


def sample(application: str, method: str, question: str, ttft_s: float, text: str = "yes") -> Any:
    return script.Sample(application, method, question, ttft_s, text)


def test_a_row_holds_medians_extremes_and_equal_answers() -> None:
    own = [sample("own API", m, q, 1.0) for q in "abc" for m in ("blended", "full")]
    other = [
        *(sample("other", "blended", q, t) for q, t in zip("abc", (0.1, 0.2, 0.5), strict=True)),
        *(sample("other", "full", q, t) for q, t in zip("abc", (4.0, 2.0, 1.0), strict=True)),
    ]
    other[0] = sample("other", "blended", "a", 0.1, "no")
    _, row = script.rows(own + other)
    assert (row.blended, row.full) == ((0.2, 0.1, 0.5), (2.0, 1.0, 4.0))
    assert row.speedup == pytest.approx(10)
    assert row.least_speedup == pytest.approx(2)
    assert (row.equal, row.answers) == (5, 6)


def test_a_framework_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = script.Target("http://127.0.0.1:1", "tiny", {})
    for name in ("langchain_core", "langchain_openai", "langchain_blendserve", "llama_index", "haystack"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match="no framework"):
        script.applications(target)
    said = capsys.readouterr().err
    for name, folder in (("LangChain", "langchain"), ("LlamaIndex", "llama_index"), ("Haystack", "haystack")):
        assert f"{name} is skipped" in said
        assert f"integrations/{folder}" in said


def test_chunks_are_long_and_shuffled_and_stored(server: Server) -> None:
    target = script.choose(server.url, QUESTIONS, 3, 16, "a", 0)
    orders = {tuple(p["id"] for p in passages) for passages in target.passages.values()}
    assert {frozenset(order) for order in orders} == {frozenset({"cats:0", "snow:0", "ships:0"})}
    scores = [[p["score"] for p in passages] for passages in target.passages.values()]
    assert any(row != sorted(row, reverse=True) for row in scores)  # the nearest first no more
    assert script.choose(server.url, QUESTIONS, 3, 16, "a", 0) == target
    found = server.post("/v1/cache/lookup", {"collection": "a"}).json()
    assert found["found"] == 3


def test_too_few_long_passages_are_refused(server: Server) -> None:
    with pytest.raises(SystemExit, match="lower --chunk-tokens"):
        script.choose(server.url, QUESTIONS, 3, 400, "a", 0)


def test_an_error_of_the_server_ends_it(server: Server) -> None:
    with pytest.raises(SystemExit, match="404"):
        script.choose(server.url, QUESTIONS, 3, 16, "nothing", 0)


def test_it_measures_every_framework_on_its_own_server(tmp_path: Path) -> None:
    """As CI runs it: an index of real text, its KV, a server, and two questions through each framework."""
    for package in FRAMEWORKS:
        pytest.importorskip(package)
    model = write_shape(tmp_path / "shape", max_position_embeddings=4096)
    options = ("--model", model, "--index", str(tmp_path / "index"), "--questions", "2", "--max-tokens", "4")
    command = [sys.executable, str(SCRIPT), *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    names = [row["application"] for row in printed["rows"]]
    assert names == ["own API", "LangChain", "LlamaIndex", "Haystack"]
    assert [(row["equal"], row["answers"]) for row in printed["rows"]] == [(4, 4)] * 4
    assert all(s["ttft_s"] > 0 and s["text"] for s in printed["samples"])


def test_an_answer_that_differs_is_the_exit_code(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a speedup below --at-least is, too."""
    texts = {"same": "yes", "other": "yes"}

    def measured(target: Any) -> list[Any]:
        return [
            sample(n, m, "a", 1.0, texts.get(n, "yes"))
            for n in ("own API", "other")
            for m in ("blended", "full")
        ]

    monkeypatch.setattr(script, "measure", measured)
    options: dict[str, Any] = {
        "url": server.url,
        "collection": "a",
        "questions": 1,
        "chunks": 3,
        "chunk_tokens": 16,
    }
    script.main(**options)
    assert "2/2" in capsys.readouterr().out
    for wrong, more in (("no", {}), ("yes", {"at_least": 5.0})):
        texts["other"] = wrong
        with pytest.raises(script.typer.Exit):
            script.main(**options, **more)
