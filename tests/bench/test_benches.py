"""Each bench on a tiny reader: its figures fit together, and a stranger's mistakes are one line each."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from blendserve.bench import auto, pagecache, scaling
from blendserve.bench.config import ScalingConfig, TtftConfig
from blendserve.bench.decode import run_generate, run_ours
from blendserve.bench.harness import Harness, scratch
from blendserve.bench.memory import peak_of
from blendserve.bench.rates import measure_rates
from blendserve.bench.workload import make_workload
from blendserve.blend.near import DONORS
from blendserve.cli import main
from blendserve.config import changed
from blendserve.errors import ConfigError, InputError, StoreError
from blendserve.evaluate.variants import variants
from blendserve.models.loader import Reader
from tests.bench.conftest import write_shape

Run = Callable[..., tuple[int, str, str]]
FAST = ("--dtype", "float32", "--repeats", "2")
SMALL = ("--chunks", "3", "--chunk-tokens", "40", "--suffix-tokens", "25")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a bench in this process -> exit code, stdout, stderr."""

    def call(*command: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["blendserve"])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(["bench", *map(str, command)])
        shown = capsys.readouterr()
        return int(end.value.code or 0), shown.out, shown.err

    return call


def figures_of(out: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return result


def test_ttft_reports_every_method_and_its_parts_fit(run: Run, tiny: str, tmp_path: Path) -> None:
    words = (
        "--methods",
        "query+shift,deviation@0.3",
        "--methods",
        "query/bos",
        "--ratio",
        "0.1",
        "--ratio",
        "0.2",
    )
    code, out, _ = run(
        "ttft", *SMALL, *words, "--model", tiny, "--folder", tmp_path / "kv", *FAST, "--cold", "--json"
    )
    assert code == 0
    assert len(out.strip().splitlines()) == 1
    figures = figures_of(out)
    methods = figures["methods"]
    assert next(iter(methods)) == "transformers"
    assert {
        "full",
        "prefix",
        "reuse",
        "query+shift@0.1",
        "query+shift@0.2",
        "deviation@0.3",
        "query@0.2/bos",
    } <= set(methods)
    assert figures["prompt"]["chunks"] == [40, 40, 40]
    prompt = figures["prompt"]["tokens"]
    assert prompt == figures["prompt"]["prefix"] + 120 + 25
    assert methods["full"]["tokens_run"] == prompt
    assert methods["reuse"]["tokens_run"] == 25
    assert methods["prefix"]["tokens_run"] == 80 + 25
    assert methods["query+shift@0.2"]["tokens_recomputed"] == round(0.2 * 120)
    for name, method in methods.items():
        assert len(method["ttft"]["rounds"]) == 2
        assert method["prefill"]["median"] < method["ttft"]["median"]
        pairs = zip(methods["transformers"]["ttft"]["rounds"], method["ttft"]["rounds"], strict=True)
        assert method["faster_than"]["transformers"]["ttft"]["rounds"] == [a / b for a, b in pairs]
        if name != "transformers":
            stages = sum(s["seconds"]["median"] for s in method["stages"].values())
            assert 0 < stages < method["prefill"]["median"]
    per_token = figures["reader"]["kv_bytes_per_token"]
    assert methods["reuse"]["bytes_loaded"] == (prompt - 25) * per_token
    assert figures["reader"]["attention"] == "sdpa"
    assert figures["versions"]["torch"]
    assert figures["machine"]["threads"] >= 1
    if figures["cold"]["done"]:
        assert set(figures["cold"]["methods"]) == set(methods) - {"transformers", "full"}
    assert list((tmp_path / "kv").iterdir()) == []  # it clears up behind it


def test_memory_is_measured_in_a_process_of_its_own(reader: Reader, tiny: str) -> None:
    config = TtftConfig(model=tiny, dtype="float32", chunks=3, chunk_tokens=40, ratios=(0.2,))
    workload = make_workload(reader, 3, 40, config.suffix_tokens, seed=0)
    with scratch(None) as folder, Harness(reader, workload, config.variants, folder) as contest:
        contest.precompute()
        memory = peak_of(config, "query+prior@0.2", folder)
    if not memory["done"]:
        pytest.skip(memory["why"])
    assert memory["kv_bytes"] == len(workload.prompt) * reader.adapter.kv_bytes_per_token
    assert memory["above_kv_bytes"] == memory["peak_bytes"] - memory["kv_bytes"]
    assert memory["above_kv_share"] == memory["above_kv_bytes"] / memory["kv_bytes"]


def test_a_measuring_process_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho loading >&2\necho no such model >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    with pytest.raises(InputError, match="memory of reuse ended early: no such model"):
        peak_of(TtftConfig(), "reuse", tmp_path)


def test_a_store_that_is_not_on_a_disk_is_said_to_give_no_cold_figure(
    run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagecache, "resident", lambda file: 1.0)
    code, out, _ = run("ttft", *SMALL, "--ratio", "0.2", "--model", tiny, *FAST, "--cold")
    assert code == 0
    assert figures_of(out)["cold"]["done"] is False
    assert "tmpfs" in figures_of(out)["cold"]["why"]
    code, out, _ = run("store", "--chunks", "2", "--model", tiny, *FAST)
    assert set(figures_of(out)["gigabytes_per_second"]) == {"put", "get"}


def test_decode_runs_both_over_the_same_tokens(run: Run, tiny: str) -> None:
    code, out, _ = run("decode", "--context", "60", "--new-tokens", "6", "--model", tiny, *FAST)
    assert code == 0
    figures = figures_of(out)
    theirs, ours = (figures["seconds_per_token"][who]["rounds"] for who in ("transformers", "blendserve"))
    assert figures["faster_than_transformers"]["rounds"] == [a / b for a, b in zip(theirs, ours, strict=True)]
    assert figures["tokens_agreeing"] == 6  # fp32: the same computation to rounding


def test_decode_is_timed_between_the_first_and_the_last_token(reader: Reader) -> None:
    from blendserve.bench.decode import prefilled

    ids = tuple(range(3, 50))
    theirs = run_generate(reader.adapter, ids, 5)
    ours = run_ours(reader.adapter, prefilled(reader.adapter, ids, 5), len(ids), 5)
    again = run_ours(reader.adapter, prefilled(reader.adapter, ids, 5), len(ids), 5)
    assert theirs.tokens == ours.tokens == again.tokens
    for run in (theirs, ours):
        assert len(run.tokens) == len(run.seconds) == 5
        assert run.per_token == pytest.approx((run.seconds[-1] - run.seconds[0]) / 4)


def test_precompute_counts_the_chunks_tokens_on_both_sides(run: Run, tiny: str, tmp_path: Path) -> None:
    code, out, _ = run(
        "precompute", "--chunks", "5", "--chunk-tokens", "30", "--model", tiny, *FAST, "--folder", tmp_path
    )
    assert code == 0
    figures = figures_of(out)
    assert figures["tokens"] == 150
    rates = figures["tokens_per_second"]
    pairs = zip(rates["blendserve"]["rounds"], rates["transformers"]["rounds"], strict=True)
    assert figures["faster_than_transformers"]["rounds"] == pytest.approx([a / b for a, b in pairs])
    assert list(tmp_path.iterdir()) == []


def test_store_counts_bytes_and_records(run: Run, tiny: str) -> None:
    code, out, _ = run("store", "--chunks", "3", "--chunk-tokens", "64", "--model", tiny, *FAST)
    assert code == 0
    figures = figures_of(out)
    assert (
        figures["bytes"] == 3 * 64 * 2 * 3 * 2 * 16 * 4
    )  # chunks, tokens, k and v, layers, heads, dim, fp32
    assert figures["records"] == 3 * (1 + 3)
    assert {"put", "get"} <= set(figures["gigabytes_per_second"])


def test_scaling_goes_on_where_a_kill_left_it(
    run: Run, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "measure_rates", partial(measure_rates, sides=(128,), copied=1 << 20))
    grid = (
        "--contexts",
        "40,80",
        "--chunk-tokens",
        "20",
        "--context",
        "80",
        "--ratios",
        "0,0.5,1",
        "--counts",
        "2",
    )
    command = (
        "scaling",
        *grid,
        "--model",
        tiny,
        *FAST,
        "--runs",
        tmp_path / "runs",
        "--plots",
        tmp_path / "plots",
    )
    code, out, _ = run(*command)
    assert code == 0
    cells = figures_of(out)["cells"]
    assert [cell["varied"] for cell in cells] == ["context", "context", "ratio", "chunks"]
    for cell in cells:
        for name, method in cell["methods"].items():
            if name != "transformers":
                bound = method["against_limit"]
                assert bound["limit"] == pytest.approx(
                    sum(bound["stages"][s]["limit"] for s in ("linear", "attention", "load"))
                )
                assert 0 < bound["share_of_limit"]["median"] < 1, (name, bound)
    for plot in ("ttft_context", "ttft_ratio"):
        assert "query+prior" in (tmp_path / "plots" / f"{plot}.svg").read_text()
    (file,) = (tmp_path / "runs").glob("*/cells.jsonl")
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:2]) + "\n" + lines[2][:100])  # killed while the third was written
    again = figures_of(run(*command, "--json")[1])["cells"]
    assert again[:2] == cells[:2]
    assert again[2] != cells[2]
    assert len(file.read_text().splitlines()) == 4
    assert figures_of(run(*command, "--json")[1])["cells"] == again
    limits = [again[2]["methods"][f"query+prior@{r}"]["against_limit"]["limit"] for r in ("0", "0.5", "1")]
    assert limits[0] < min(limits[1:])


def test_auto_is_compared_with_the_best_fixed_method(
    run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, values in {"COUNTS": (1, 3), "SIZES": (20, 200), "HITS": (0.0, 1.0), "DOUBT": math.inf}.items():
        monkeypatch.setattr(auto, name, values)
    code, out, _ = run("auto", "--model", tiny, *FAST, "--tolerance", "1000")
    figures = figures_of(out)
    assert code == 0
    assert "measured on" in out
    assert [(c["chunks"], c["size"], c["hits"]) for c in figures["cells"]] == [
        (n, size, hits) for n, size in ((1, 20), (1, 200), (3, 20)) for hits in (0.0, 1.0)
    ]  # three of the larger chunks are more than the reader's context
    for cell in figures["cells"]:
        assert cell["best"] == min(("full", "prefix", "blend"), key=cell["seconds"].__getitem__)
        assert cell["chosen"] in cell["seconds"]
    assert figures["worst_excess"] == round(max(c["excess"] for c in figures["cells"]), 4)
    slow = {"auto": [2.0], "full": [2.0], "prefix": [1.0], "blend": [3.0]}
    monkeypatch.setattr(auto, "_cell", lambda *_: auto.Cell(1, 20, 0.0, slow, "full"))
    code, out, _ = run("auto", "--model", tiny, *FAST, "--json")
    assert code == 1
    assert (figures_of(out)["worst_excess"], figures_of(out)["worst_slip"]) == (1.0, 1.0)


def test_the_default_grid_is_the_one_that_was_asked_for() -> None:
    cells = ScalingConfig().cells
    contexts = [c.chunks * c.chunk_tokens for a, c in cells if a["varied"] == "context"]
    assert (min(contexts), max(contexts)) == (512, 7680)
    (ratios,) = [c.ratios for a, c in cells if a["varied"] == "ratio"]
    assert (min(ratios), max(ratios)) == (0.0, 1.0)
    assert {c.chunks * c.chunk_tokens for a, c in cells if a["varied"] == "chunks"} == {3072}


def test_a_context_that_cannot_be_cut_evenly() -> None:
    with pytest.raises(ConfigError, match="1,000 tokens cannot be cut into equal parts by 512"):
        changed(ScalingConfig(), contexts=(1000,)).cells  # noqa: B018


def test_kv_that_vanishes_is_an_error_and_not_a_slow_method(reader: Reader) -> None:
    (variant,) = [v for v in variants(("query@0.2",), ()) if v.kind == "blend"]
    workload = make_workload(reader, 2, 20, 25, seed=0)
    with scratch(None) as folder, Harness(reader, workload, (variant,), folder) as contest:
        contest.precompute()
        contest.run(variant)
        contest.store.delete(next(iter(contest.store.keys())))
        with pytest.raises(StoreError, match="not in its store"):
            contest.run(variant)


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown shape": (("ttft", "--model", "random:gpt-9"), "Qwen2.5-0.5B"),
    "empty shape": (("store", "--model", "random:"), "Llama-3.1-8B"),
    "bad shape": (("ttft", "--model", "{bad}"), "cannot share evenly"),
    "ratio above one": (("ttft", "--ratio", "0.1,1.7"), "1.7"),
    "ratio below none": (("ttft", "--ratio", "-0.1"), "-0.1"),
    "ratio no number": (("ttft", "--ratio", "much"), "much"),
    "unknown method": (("ttft", "--methods", "magic@0.1"), "magic"),
    "no such check layer": (("ttft", "--model", "{tiny}", *SMALL, "--methods", "deviation[9]@0.1"), "check_layers"),
    "no chunks": (("ttft", "--chunks", "0"), "chunks"),
    "no rounds": (("decode", "--repeats", "0"), "repeats"),
    "no threads": (("store", "--threads", "0"), "threads"),
    "unknown dtype": (("precompute", "--dtype", "int3"), "int3"),
    "beyond the context": (("ttft", "--model", "{tiny}", "--chunks", "50"), "context of reader"),
    "decode beyond it": (("decode", "--model", "{tiny}", "--context", "510"), "context"),
    "chunk beyond it": (("precompute", "--model", "{tiny}", "--chunk-tokens", "600"), "context"),
    "grid beyond it": (("scaling", "--model", "{tiny}"), "longest prompt"),
    "one new token": (("decode", "--new-tokens", "1"), "new_tokens"),
    "suffix too short": (("ttft", "--model", "{tiny}", *SMALL, "--suffix-tokens", "2"), "suffix"),
    "folder not writable": (("ttft", "--model", "{tiny}", *SMALL, "--folder", "/proc/nowhere"), "--folder"),
    "no such model": (("store", "--model", "nobody/nothing"), "smollm2-135m"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_clear_line(case: str, run: Run, tiny: str, tmp_path: Path) -> None:
    bad = write_shape(tmp_path, num_key_value_heads=3)
    command, expected = WRONG[case]
    code, _, err = run(*(word.format(tiny=tiny, bad=bad) for word in command))
    last = err.strip().splitlines()[-1]
    assert code == 2, err
    assert last.startswith("error: "), err
    assert expected in last
    assert "Traceback" not in err


def test_codec_counts_every_byte_and_its_parts_fit(run: Run, tiny: str, tmp_path: Path) -> None:
    words = ("--codecs", "int8", "--method", "reuse", "--folder", tmp_path / "kv")
    code, out, _ = run("codec", *SMALL, *words, "--model", tiny, *FAST, "--json")
    assert code == 0
    figures = figures_of(out)
    assert list(figures["codecs"]) == ["raw", "int8"]
    raw, int8 = figures["codecs"]["raw"], figures["codecs"]["int8"]
    assert figures["tokens"] == 120
    assert raw["bytes"] > figures["raw_bytes"]  # headers count
    assert raw["bytes_per_token"] == raw["bytes"] / 120
    assert 32 < raw["bits_per_element"] < 33
    assert 3 < int8["smaller"] < 4  # of 32 bits
    for codec in (raw, int8):
        assert len(codec["decode"]["seconds"]["rounds"]) == 2
        pairs = zip(codec["decode"]["seconds"]["rounds"], figures["prefill"]["rounds"], strict=True)
        assert codec["decode_share_of_prefill"]["rounds"] == [a / b for a, b in pairs]
        assert codec["ttft"]["median"] > 0
    assert raw["ttft_of_raw"]["median"] == 1
    assert list((tmp_path / "kv").iterdir()) == []


def test_codecs_with_tables_are_fitted_and_their_tables_told_apart(run: Run, tiny: str) -> None:
    pytest.importorskip("constriction")
    words = ("--codecs", "cachegen@1,cachegen@2", "--fit-tokens", "300", "--method", "reuse")
    code, out, _ = run("codec", *SMALL, *words, "--model", tiny, *FAST)
    assert code == 0
    assert "every byte" in out
    found = figures_of(out)["codecs"]
    assert found["cachegen@1"]["smaller"] > 6
    assert found["cachegen@2"]["bytes"] < found["cachegen@1"]["bytes"]
    for codec in (found["cachegen@1"], found["cachegen@2"]):
        assert codec["tables_bytes"] > 0
        few, many = codec["bytes_per_token_with_tables"].values()
        assert few - codec["bytes_per_token"] == pytest.approx(codec["tables_bytes"] / 1000 / 40)
        assert codec["bytes_per_token"] < many < few


def test_a_codec_that_is_none_is_told_before_anything_is_loaded(run: Run) -> None:
    code, _, err = run("codec", "--codecs", "int9")
    assert code == 2
    assert "did you mean 'int8'" in err


def test_near_counts_what_an_edit_costs(run: Run, tiny: str, tmp_path: Path) -> None:
    sizes = ("--chunks", "3", "--chunk-tokens", "80", "--suffix-tokens", "25", "--signatures", "5000")
    code, out, _ = run("near", *sizes, "--share", "0.1", "--model", tiny, "--folder", tmp_path / "kv", *FAST)
    assert code == 0
    figures = figures_of(out)
    methods, index = figures["methods"], figures["index"]
    assert [len(m["near"]) for m in methods.values()] == [0, 0, 1, 0, 3]
    run_of = {name: m["tokens_run"] for name, m in methods.items()}
    assert run_of["exact hits"] < run_of["one edited"] < run_of["one edited, not looked for"]
    assert run_of["one edited"] < run_of["all edited"] < run_of["full prefill"]
    assert figures["unrelated"]["false_donors"] == index["false_donors"] == 0
    assert (index["chunks"], index["donors_found"]) == (5003, "3 of 3")
    assert 1 <= figures["boilerplate"]["donors"] <= DONORS
    assert index["array_bytes"] >= 8 * 5000 * index["fingerprints"]
    assert "one edited" in out
    assert not list((tmp_path / "kv").iterdir())
