"""Every bench at its smallest size: it resumes, its tables are rectangular, its numbers finite, its counts right."""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from benchmarks import auto, delivery, noisy_neighbor, plain, traffic
from benchmarks.__main__ import BENCHES as CLAIMS
from benchmarks.support.clients import CLIENTS as PLAIN_CLIENTS
from benchmarks.support.clients import Wire
from benchmarks.support.hostile import GAVE_UP, NO_ANSWER
from benchmarks.support.valkey import binary
from blendserve import console
from blendserve.bench.harness import Result, read_result, render, samples_of
from blendserve.bench.roofline import measure_rates
from blendserve.bench.runner import BENCHES, load_bench, run_bench
from blendserve.cli.app import run as app_run
from blendserve.cli.bench import bench_app
from blendserve.config import ServeConfig
from blendserve.core import Document
from blendserve.cost import CostConfig, with_bench
from blendserve.errors import ConfigError, InputError
from blendserve.kdn.target import PublishTarget
from blendserve.models.loader import load_model
from blendserve.retrieve.chunker import TokenCounter
from blendserve.retrieve.index import VectorIndex
from blendserve.store import MemoryStore
from tests.retrieve.conftest import toy_embedder, words
from tests.support.engines import PASSAGES
from tests.support.http import CommandServer, Server

ROOT = Path(__file__).parents[2]
HOSTILE = "benchmarks.noisy_neighbor"
SEVERAL_PROCESSES = (
    "delivery",
    "sharing",
    "cpu_contention",
    "startup",
    "engines",
    "quantised",
    "ray_routing",
)
SLOW = {HOSTILE, *(f"benchmarks.{name}" for name in SEVERAL_PROCESSES)}
# vLLM needs an environment and weights of its own: tests/vllm
ELSEWHERE = {
    "serving",
    "benchmarks.vllm_connector",
}
NAMES = [name for name in (*BENCHES, *(f"benchmarks.{name}" for name in CLAIMS)) if name not in ELSEWHERE]
MARKED = [pytest.param(n, marks=[pytest.mark.nightly, pytest.mark.timeout(600)] * (n in SLOW)) for n in NAMES]
Run = Callable[[str], Result]


@contextmanager
def toy_server(folder: Path, **config: Any) -> Iterator[str]:
    with closing(Server(folder / "served", ServeConfig(**config))) as made:
        yield made.url


def write_passages(config: Any, folder: Path, documents: Sequence[Document] = ()) -> None:
    documents = documents or [Document(p.text, p.title) for p in PASSAGES]
    VectorIndex.build(
        folder, toy_embedder(), TokenCounter("tiny", "abcdefghij", words), documents, chunk_tokens=64
    )


@pytest.fixture(scope="module")
def run(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a bench once and returns its result."""
    known: dict[str, Result] = {}

    def result(name: str) -> Result:
        if name == "benchmarks.ray_routing" and find_spec("ray") is None:
            pytest.skip("Ray is not installed: pip install '.[ray]'")
        if name.removeprefix("benchmarks.") in ("network", "sharing", "ray_routing") and binary() is None:
            pytest.skip("there is no valkey-server here")
        if name not in known:
            tmp, bench = tmp_path_factory.mktemp("bench"), load_bench(name)
            module = import_module(name if "." in name else f"blendserve.bench.{name}")
            if hasattr(module, "measure_rates"):
                patch.setattr(module, "measure_rates", partial(measure_rates, sides=(128,), copied=1 << 20))
            config = bench.tiny_config(model=tiny, dtype="float32", folder=tmp / "kv")
            if name == "benchmarks.ray_routing":  # a process has one cluster, and tests/ray may have it
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    pool.submit(run_bench, name, config, tmp / "out.jsonl").result()
            known[name] = run_bench(name, config, tmp / "out.jsonl")
            assert not list((tmp / "kv").glob("*")), "a temporary store is left"
            assert run_bench(name, config, tmp / "out.jsonl") == known[name]  # nothing is measured twice
        return known[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noisy_neighbor, "server", lambda folder: toy_server(folder, keys=folder / "keys.json"))
        for attribute, value in {"prepare": write_passages, "INDEX": "a", "UPLOADS": "b"}.items():
            patch.setattr(noisy_neighbor, attribute, value)
        for module in (plain, traffic):
            patch.setattr(module, "ServerProcess", CommandServer)
        yield result


def metrics(result: Result, **labels: Any) -> dict[str, float]:
    """Of the last round of the one case with these labels."""
    found = [s for s in samples_of(result) if labels.items() <= s.labels.items()]
    assert len({json.dumps(s.labels) for s in found}) == 1, labels
    return found[-1].metrics


@pytest.mark.parametrize("name", MARKED)
def test_tables_are_rectangular_and_numbers_finite(name: str, run: Run) -> None:
    result, bench = run(name), load_bench(name)
    assert result["bench"] == name
    assert json.loads(json.dumps(result)) == result
    for sample in samples_of(result):
        assert all(math.isfinite(value) for value in sample.metrics.values()), sample
    tables = render(bench.tables, result)
    assert tables
    for title, columns, rows in tables:
        assert {len(row) for row in rows} == {len(columns)}, title
    if bench.plot:
        drawn = bench.plot.draw(result).decode()
        plotted = [s for s in samples_of(result) if bench.plot.x in s.labels and bench.plot.y in s.metrics]
        assert all(f"{s.labels.get(bench.plot.series, '')}" in drawn for s in plotted)


def test_the_bench_of_the_documentation_runs(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's: 40 lines, from docs/how-to/extend.md as they stand."""
    text = (ROOT / "docs" / "how-to" / "extend.md").read_text("utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "BENCH = " in block]
    assert len(code.splitlines()) <= 40
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "question.py").write_text(code)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    tables: list[Any] = []
    monkeypatch.setattr(console, "table", lambda title, columns, rows: tables.append((columns, rows)))
    app = bench_app("A stranger's.", {"question": "Questions of several lengths."}, "mine.")
    words = ["--model", tiny, "--chunk-tokens", "40", "--questions", "25,30", "--repeats", "1"]
    assert app_run(app, ["question", *words, "--out", str(tmp_path / "out.jsonl")]) == 0
    ((columns, rows), *_) = tables
    assert columns == ["question", "method", "TTFT ms", "x transformers"]
    assert len(rows) == 2 * 4  # full and reuse are always there
    assert read_result(tmp_path / "out.jsonl")["config"]["questions"] == [25, 30]


def test_ttft_counts_tokens_and_bytes(run: Run) -> None:
    """Of three chunks of 40 tokens before a question of 25."""
    result = run("ttft")
    n_prompt = result["groups"][0]["facts"]["prompt_tokens"]
    kv_bytes = 2 * 3 * 2 * 16 * 4  # K and V, layers, heads, dim, fp32
    counts = {  # tokens run, tokens selected, tokens loaded
        "full": (n_prompt, 0, 0),
        "reuse": (25, 0, 120),
        "prefix": (105, 0, 40),
        "query+shift@0.1": (37, 12, 120),
        "query+shift@0.2": (49, 24, 120),
        "deviation@0.3": (61, 36, 120),
        "query@0.1/bos": (37, 12, 120),
        "query@0.2/bos": (49, 24, 120),
    }
    warm = {s.labels["method"] for s in samples_of(result) if s.labels["source"] == "warm"}
    assert warm == {"transformers", *counts}
    for name, (n_run, n_selected, n_loaded) in counts.items():
        found = metrics(result, source="warm", method=name)
        assert (found["tokens_run"], found["tokens_recomputed"]) == (n_run, n_selected), name
        assert found["bytes_loaded"] == n_loaded * kv_bytes, name
        assert found["load_s"] + found["select_s"] + found["correct_s"] < found["prefill_s"] < found["ttft_s"]
        assert found["roofline_fraction"] > 0
    assert metrics(result, source="warm", method="full")["kl_first_token"] < 1e-6
    assert metrics(result, source="warm", method="prefix")["same_first_token"] == 1


def test_stores_count_bytes_and_codecs_every_byte(run: Run) -> None:
    store, precompute, codec = run("store"), run("precompute"), run("codec")
    facts = store["groups"][0]["facts"]
    assert facts["bytes"] == 3 * 64 * 2 * 3 * 2 * 16 * 4  # chunks, tokens, K and V, layers, heads, dim, fp32
    assert facts["records"] == 3 * (1 + 3)
    assert (
        precompute["groups"][0]["facts"]["bytes_stored"]
        == 5 * 30 * codec["environment"]["kv_bytes_per_token"]
    )
    raw, int8 = (metrics(codec, of="size", codec=word) for word in ("raw", "int8"))
    assert raw["compression"] < 1 < int8["compression"]
    assert raw["bytes_per_token"] > codec["environment"]["kv_bytes_per_token"]


def test_the_codec_bench_gives_the_cost_model_its_levels(run: Run, tmp_path: Path) -> None:
    def median(metric: str, **labels: str) -> float:
        found = [s.metrics[metric] for s in samples_of(run("codec")) if labels.items() == s.labels.items()]
        return statistics.median(found)

    file = tmp_path / "codec.json"
    file.write_text(f"a table\n{json.dumps(run('codec'))}\n")
    config = with_bench(CostConfig(levels={"other": {}}), file)
    assert config.levels.keys() == {"other", "raw", "int8"}
    level, rate = config.levels["int8"], median("tokens_per_s", of="speed", operation="decode", codec="int8")
    assert level.bytes_per_token == median("bytes_per_token", of="size", codec="int8")
    assert level.decode_seconds == pytest.approx(1 / rate)
    prefill_s = median("time_s", of="speed", operation="prefill")
    assert config.prefill_seconds == pytest.approx(prefill_s / (3 * config.chunk_tokens + 25))
    for wrong in ("", "{}"):
        file.write_text(wrong)
        with pytest.raises(InputError):
            with_bench(CostConfig(), file)


def test_near_counts_what_an_edit_costs(run: Run) -> None:
    result = run("benchmarks.near_duplicates")
    names = ("exact hits", "one edited", "one edited, no search", "all edited", "full prefill")
    exact, one, blind, every, full = (metrics(result, passages=name)["tokens_run"] for name in names)
    assert exact < one < min(blind, every)
    assert every < full
    assert result["groups"][0]["facts"]["false_donors"] == 0
    assert metrics(result, search="nothing found")["search_s"] > 0


def test_what_plain_prompts_reuse_is_the_passages(run: Run) -> None:
    result = run("benchmarks.plain")
    clients = [group for group in result["groups"] if "spans" in group["facts"]]
    assert len(clients) + len(result["environment"]["clients_missing"]) == len(result["config"]["clients"])
    for group in clients:
        assert group["facts"]["false_matches"] == 0
        assert metrics(result, **group["group"], sent=plain.PLAIN)["found"] > 0.9
    assert metrics(result, client=plain.OTHER, sent=plain.PLAIN)["spans"] == 0


def test_a_client_without_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langchain_openai", None)
    wire = Wire("http://127.0.0.1:1", "tiny", 4)
    names = ("langchain", "agent")
    clients, missing = plain.connected(plain.PlainConfig(clients=names), wire)
    assert ([client.name for client in clients], [*missing]) == (
        [PLAIN_CLIENTS["agent"].name],
        [PLAIN_CLIENTS["langchain"].name],
    )
    with pytest.raises(InputError):
        plain.connected(plain.PlainConfig(clients=names[:1]), wire)
    with pytest.raises(ConfigError):
        plain.PlainConfig(clients=("emacs",))


def test_results_are_right_where_they_are_known(run: Run) -> None:
    assert run("decode")["groups"][0]["facts"]["tokens_agreeing"] == 6  # fp32: the same to rounding
    for kind in ("sampled", "quotes"):
        (group,) = (g for g in run("decode")["groups"] if g["group"].get("answer") == kind)
        assert group["facts"]["tokens_equal"] == group["facts"]["tokens"] > 0
        assert metrics(run("decode"), answer=kind, steps="one token a pass")["tokens_per_pass"] == 1.0
        assert metrics(run("decode"), answer=kind, steps="drafts")["tokens_per_pass"] >= 1.0
    network, method = run("benchmarks.network"), "query+prior@0.15"
    far = metrics(network, round_trip_ms=50.0, codec="raw", method=method)
    near = {word: metrics(network, round_trip_ms=0.0, codec=word, method=method) for word in ("raw", "int8")}
    assert far["wait_s"] >= 0.05
    assert near["raw"]["bytes_received"] > 1.5 * near["int8"]["bytes_received"]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_delivery_brings_bytes_and_a_hostile_client_is_refused(run: Run) -> None:
    delivered = run("benchmarks.delivery")
    for link in ("1 Gbit/s", "up"):
        recompute, int8 = (metrics(delivered, link=link, client=client) for client in ("recompute", "int8"))
        assert recompute["kl_first_token"] == 0
        assert recompute["bytes_received"] < 1000 < int8["bytes_received"]
    for kind, statuses in run(HOSTILE)["groups"][0]["facts"]["statuses"].items():
        refused = {"larger": "413", "document": "202"}.get(kind, "400")
        assert statuses.keys() <= {refused, "429", GAVE_UP, NO_ANSWER}


def test_the_delivery_bench_publishes_the_tables_of_its_levels(tiny: str, tmp_path: Path) -> None:
    sizes = {"chunks": 2, "chunk_tokens": 40, "suffix_tokens": 25, "fit_tokens": 256}
    config = delivery.DeliveryConfig(model=tiny, dtype="float32", codecs=("raw", "predict@1"), **sizes)
    model, store = load_model(config.model_settings), MemoryStore(1 << 30)
    target = PublishTarget(f"{tmp_path}/{delivery.COLLECTION}")
    collection = delivery.publish(model, config, config.workload(model), store, target)
    assert [tables.codec for tables in collection.tables] == ["predict"]


def test_auto_misses_where_it_and_its_choice_are_slower() -> None:
    seconds = {"full": [9.0, 2.0], "prefix": [9.0, 1.0], "blend": [1.0, 3.0], "auto": [9.0, 2.0]}
    both = {"excess": 1.0, "slip": 1.0, "miss": 1.0}  # without the warm-up
    assert auto.verdict(seconds, ["prefix", "full"]) == {"best": "prefix", "chosen": "full", **both}
    assert auto.verdict(seconds, ["prefix"])["miss"] == 0.0


def test_serving_resumes_and_counts_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blendserve.bench.loadgen.LEAST", 2)
    write_passages(None, tmp_path / "index")
    config: Any = load_bench("serving").config
    out = tmp_path / "out.jsonl"
    with toy_server(tmp_path) as url:
        small = {"url": url, "index": tmp_path / "index", "passages": 2, "clients": 2, "seconds": 0.1}
        settings = config(**small, new_tokens=2, load_factors=(1.0,))
        first, again = (run_bench("serving", settings, out) for _ in range(2))
        many = [Document(f"{'word ' * 60}{n}", f"Title {n}") for n in range(30)]
        write_passages(None, tmp_path / "large", many)
        more_than_fit = {**small, "index": tmp_path / "large", "passages": len(many), "new_tokens": 2}
        refused = run_bench("serving", config(**more_than_fit, load_factors=()))
    assert again == first
    cases = {(s.labels["load"], s.labels["method"]) for s in samples_of(first)}
    assert cases == {(load, m) for load in ("saturation", 1.0) for m in ("full", "blend", "prefix")}
    assert all(s.metrics["failed"] == 0 < s.metrics["ttft_p95_s"] for s in samples_of(first))
    assert all(s.metrics["failed"] == s.metrics["requests"] > 0 for s in samples_of(refused))
