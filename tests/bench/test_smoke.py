"""Every bench at its smallest size: its JSON fits benches.yaml, its tables are rectangular, its counts are right."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from blendserve import console
from blendserve.bench import auto, delivery, hostile, scaling, serving_load, sharing
from blendserve.bench.hostile_client import GIVEN_UP
from blendserve.bench.rates import measure_rates
from blendserve.bench.servers import binary
from blendserve.blend.blender import Blender
from blendserve.blend.cost import CostModel
from blendserve.blend.near import MAX_DONORS
from blendserve.fetch import link
from blendserve.serve.config import ServeConfig
from blendserve.store.codecs.base import known_codec
from tests.support.commands import cli
from tests.support.engines import PASSAGES
from tests.support.http import Server

FILE = yaml.safe_load(Path(__file__).with_name("benches.yaml").read_text())
BENCHES: dict[str, Any] = FILE["benches"] | FILE["nightly"]
SLOW = [pytest.mark.nightly, pytest.mark.timeout(600)]
NAMES = [pytest.param(name, marks=SLOW * (name in FILE["nightly"])) for name in BENCHES]
SPREAD = {"median": "float", "least": "float", "most": "float", "rounds": ["float"]}
TYPES: dict[str, Any] = {"any": object, "float": (float, int), "null": type(None)}
TYPES |= {kind.__name__: kind for kind in (bool, int, str)}
CACHEGEN = known_codec("cachegen") is not None
Run = Callable[[str], dict[str, Any]]


def misfits(value: Any, shape: Any, at: str) -> Iterator[str]:
    """Where a value does not fit a shape of benches.yaml."""
    if shape == "spread":
        yield from misfits(value, SPREAD, at)
        if not value["least"] <= value["median"] <= value["most"]:
            yield f"{at}: not in order"
    elif isinstance(shape, dict) and isinstance(value, dict):
        shapes = {key.removesuffix("?"): part for key, part in shape.items()}
        if "*" not in shape:
            yield from (f"{at}.{key} is missing" for key in shape if key[-1] != "?" and key not in value)
            yield from (f"{at}.{key} is not in the schema" for key in value.keys() - shapes.keys())
        for key, part in value.items():
            yield from misfits(part, shapes.get(key, shapes.get("*", "any")), f"{at}.{key}")
    elif isinstance(shape, list) and isinstance(value, list):
        for n, item in enumerate(value):
            yield from misfits(item, shape[0], f"{at}[{n}]")
    elif not isinstance(shape, str) or not any(isinstance(value, TYPES[t]) for t in shape.split(" or ")):
        yield f"{at}: {value!r:.40}"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{at}: {value}"


@contextmanager
def toy_server(folder: Path, **config: Any) -> Iterator[str]:
    with closing(Server(folder / "served", ServeConfig(**config))) as made:
        yield made.url


def keyed(folder: Path) -> AbstractContextManager[str]:
    return toy_server(folder, keys=folder / "keys.json")


def write_passages(index: Path, folder: Path, say: hostile.Say) -> None:
    folder.mkdir()
    lines = (json.dumps({"text": p.text, "title": p.title}) + "\n" for p in PASSAGES)
    (folder / "passages.jsonl").write_text("".join(lines))


def check_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    assert {len(row) for row in rows} == {len(columns)}, title


@pytest.fixture(scope="module")
def run(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a bench once and returns its figures."""
    known: dict[str, dict[str, Any]] = {}

    def figures(name: str) -> dict[str, Any]:
        if name in ("faults", "link") and binary() is None:
            pytest.skip("there is no valkey-server here")
        if name == "embed":
            pytest.importorskip("sentence_transformers")
        if name not in known:
            tmp = tmp_path_factory.mktemp(name)
            codecs = "int8,cachegen@1,cachegen@2" if CACHEGEN else "int8"
            words = shlex.split(BENCHES[name]["options"].format(tmp=tmp, codecs=codecs))
            reader = [] if name in ("hostile", "embed") else ["--model", tiny]
            done = cli("bench", name, *words, *reader, *(["--dtype", "float32"] if reader else []))
            known[name] = done.json()
            assert done.code == int(not known[name].get("passed", True)), done.err
            assert not list((tmp / "kv").glob("*")), "a temporary store is left"
            drawn = [file.stat().st_size > 1000 for file in tmp.rglob("*.svg")]
            assert drawn == [True] * {"scaling": 2, "delivery": 1, "sharing": 1}.get(name, 0)
        return known[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "table", check_table)
        patch.setattr(scaling, "measure_rates", partial(measure_rates, sides=(128,), copied=1 << 20))
        grid = {"COUNTS": (1, 3), "SIZES": (20, 200), "HITS": (0.0, 1.0), "DOUBT": math.inf}
        toys = {"server": keyed, "prepare": write_passages, "INDEX": "a", "UPLOADS": "b"}
        for module, values in ((auto, grid), (hostile, toys)):
            for attribute, value in values.items():
                patch.setattr(module, attribute, value)
        patch.setattr(link.LinkEstimator, "probe_later", lambda *_: None)  # its bytes are no request's
        patch.setattr(Blender, "calibrate", lambda *_: CostModel(1.0, 1e-5, 0.0, 1e-7))
        yield figures


@pytest.mark.parametrize("name", NAMES)
def test_figures_fit_the_schema(name: str, run: Run) -> None:
    figures = run(name)
    assert list(misfits(figures, BENCHES[name]["shape"], name)) == []
    assert figures["bench"] == name
    broken = {key: value for key, value in figures.items() if key != "machine"} | {"bench": 1, "more": 1}
    assert len(list(misfits(broken, BENCHES[name]["shape"], name))) == 3


def test_ttft_counts_the_tokens_of_every_method(run: Run) -> None:
    figures = run("ttft")
    prompt, methods = figures["prompt"], figures["methods"]
    asked = {"query+shift@0.1", "query+shift@0.2", "deviation@0.3", "query@0.1/bos", "query@0.2/bos"}
    assert set(methods) == asked | {"transformers", "full", "prefix", "reuse"}
    assert prompt["tokens"] == prompt["prefix"] + 3 * 40 + 25
    ran = {name: methods[name]["tokens_run"] for name in ("full", "prefix", "reuse")}
    assert ran == {"full": prompt["tokens"], "prefix": 80 + 25, "reuse": 25}
    assert methods["query+shift@0.2"]["tokens_recomputed"] == round(0.2 * 120)
    stored = (prompt["tokens"] - 25) * figures["reader"]["kv_bytes_per_token"]
    assert methods["reuse"]["bytes_loaded"] == stored
    for name, method in methods.items():
        assert method["prefill"]["median"] < method["ttft"]["median"]
        stages = sum(part["seconds"]["median"] for part in method.get("stages", {}).values())
        assert stages < method["prefill"]["median"]
        assert bool(stages) == (name != "transformers")


def test_stores_count_bytes_and_codecs_every_byte(run: Run) -> None:
    store, precompute, codec = run("store"), run("precompute"), run("codec")
    assert store["bytes"] == 3 * 64 * 2 * 3 * 2 * 16 * 4  # chunks, tokens, K and V, layers, heads, dim, fp32
    assert store["records"] == 3 * (1 + 3)
    assert precompute["tokens"] == 5 * 30
    assert codec["raw_bytes"] == 120 * codec["reader"]["kv_bytes_per_token"]
    assert codec["codecs"]["raw"]["ttft_of_raw"]["median"] == 1
    assert codec["codecs"]["raw"]["smaller"] < 1 < codec["codecs"]["int8"]["smaller"]
    if CACHEGEN:
        fine = codec["codecs"]["cachegen@1"]
        few, _ = fine["bytes_per_token_with_tables"].values()
        assert few - fine["bytes_per_token"] == pytest.approx(fine["tables_bytes"] / 1000 / 40)


def test_near_counts_what_an_edit_costs(run: Run) -> None:
    figures = run("near")
    names = ("exact hits", "one edited", "one edited, not looked for", "all edited", "full prefill")
    exact, one, blind, every, full = (figures["methods"][name]["tokens_run"] for name in names)
    assert exact < one < min(blind, every)
    assert every < full
    index = figures["index"]
    assert figures["unrelated"]["false_donors"] == index["false_donors"] == 0
    assert (index["chunks"], index["donors_found"]) == (5003, "3 of 3")
    assert 1 <= figures["boilerplate"]["donors"] <= MAX_DONORS


def test_results_are_right_where_they_are_known(run: Run) -> None:
    assert run("decode")["tokens_agreeing"] == 6  # fp32: the same computation to rounding
    (document,) = run("document")["documents"]
    assert document["same_first_token"]
    assert document["kl"] < 1e-6
    assert document["methods"]["prefix"]["tokens_run"] == 30
    for cell in run("delivery")["cells"]:
        found = cell["contestants"]
        assert found[delivery.TEXT]["kl"]["median"] == 0
        assert found[delivery.TEXT]["bytes"]["median"] < 1000 < found["int8"]["bytes"]["median"]
    near, far = run("link")["cells"]
    assert far["codecs"]["raw"]["waited"]["least"] >= far["round_trip_ms"] / 1e3
    assert near["codecs"]["raw"]["bytes"] > 1.5 * near["codecs"]["int8"]["bytes"]
    for kind, got in run("hostile")["hostile"].items():
        refused = {"larger": "413", "document": "202"}.get(kind, "400")
        assert got["statuses"].keys() <= {refused, "429", GIVEN_UP}


@pytest.mark.nightly
def test_one_cache_for_all_hits_more_often(run: Run) -> None:
    own, shared = (run("sharing")["arrangements"][name] for name in (sharing.PER_USER, sharing.SHARED))
    assert own["requests"] == shared["requests"] == 12
    assert shared["hit_rate"] > own["hit_rate"]
    assert shared["computed"] < own["computed"]


def test_auto_fails_where_it_is_slower(run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for cell in run("auto")["cells"]:
        assert cell["best"] == min(("full", "prefix", "blend"), key=cell["seconds"].__getitem__)
        assert cell["chosen"] in cell["seconds"]
    slow = {"auto": [2.0], "full": [2.0], "prefix": [1.0], "blend": [3.0]}
    monkeypatch.setattr(auto, "measure_cell", lambda *_: auto.Cell(1, 20, 0.0, slow, "full"))
    done = cli("bench", "auto", "--model", tiny, "--json")
    assert (done.code, done.json()["worst_excess"], done.json()["worst_slip"]) == (1, 1.0, 1.0)


def test_scaling_resumes_after_a_kill_and_stays_within_the_limit(run: Run, tiny: str) -> None:
    figures = run("scaling")
    cells, folder = figures["cells"], Path(figures["kept"])
    assert [cell["varied"] for cell in cells] == ["context", "context", "ratio", "chunks"]
    methods = [m for cell in cells for name, m in cell["methods"].items() if name != "transformers"]
    assert all(0 < method["against_limit"]["share_of_limit"]["median"] < 1 for method in methods)
    lines = (folder / "cells.jsonl").read_text().splitlines()
    (folder / "cells.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:100])  # killed in the third
    options = BENCHES["scaling"]["options"].format(tmp=folder.parents[1])
    command = ("bench", "scaling", *options.split(), "--model", tiny, "--dtype", "float32")
    again, kept = (cli(*command).json()["cells"] for _ in range(2))
    assert again == kept  # the half-written line is gone
    assert again[:2] == cells[:2]
    assert again[2] != cells[2]


def test_serving_resumes_and_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_load, "LEAST", 2)
    write_passages(tmp_path, tmp_path / "index", print)
    out, methods = tmp_path / "out", list(serving_load.METHODS)
    small = shlex.split("--passages 2 --new-tokens 2 --clients 2 --seconds 0.1 --shares 1")
    with toy_server(tmp_path) as url:
        options = ("bench", "serving", "--url", url, "--index", tmp_path / "index", *small)
        none, first, again = (
            cli(*options, "--out", out, "--minutes", minutes) for minutes in (1e-9, 5, 1e-9)
        )
        failed = cli(*options, "--out", tmp_path / "failed", "--new-tokens", 10**5).json()
    assert (none.code, none.json()["missing"]) == (3, methods)
    assert (first.code, first.json()["missing"], first.json()["failed"]) == (1, [], 0)  # a toy gains nothing
    assert again.json() == first.json()  # nothing is measured twice
    found = json.loads((out / "serving.json").read_text())
    cells = {(cell["method"], cell["share"]) for cell in found["cells"]}
    assert cells == {(method, share) for method in methods for share in (None, 1.0)}
    most, ttft = found["saturation_rps"], found["p95_ttft_at_full_saturation"]
    assert found["throughput_ratio"] == most["blend"] / most["full"]
    assert found["p95_ttft_ratio"] == ttft["full"] / ttft["blend"]
    assert failed["failed"] == failed["requests"] > 0  # what is refused is no answer
    assert failed["throughput_ratio"] is None
