"""Whole runs of a tiny model: every method on the same prompts, and a kill at any byte changes nothing."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from blendserve.blend import priors
from blendserve.cli import main
from blendserve.core import Document
from blendserve.engine.codec_fit import chunks_of, fit
from blendserve.engine.engine import Engine
from blendserve.errors import ConfigError, InputError, ModelUnsupported, TablesMissing
from blendserve.evaluate import datasets, fidelity
from blendserve.evaluate.config import EvaluateConfig
from blendserve.evaluate.datasets import load
from blendserve.evaluate.edits import EDITS
from blendserve.evaluate.job import Outcome, evaluate_each
from blendserve.evaluate.methods import parse_methods
from blendserve.evaluate.prompts import PromptSource, open_engine
from blendserve.evaluate.report import show_all, tables
from blendserve.evaluate.stores import codec_for, coded_copy, sizes_of
from blendserve.evaluate.summary import Predictions, summarize
from blendserve.models.runner import decode_in_int8, native_decoder
from blendserve.store import MemoryStore, read_record
from tests.support.evaluations import (
    CONFIG,
    HOSTILE,
    METHODS,
    QUESTIONS,
    passage,
    predictions,
    run,
    tiny_engine,
    tiny_loaded_model,
    toy_run,
    untimed,
    write_dataset,
)

Toy = Callable[[str], Outcome]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """One of RUNS, each run once; `coded` with its plots."""
    return cache(lambda kind: toy_run(kind, tmp_path_factory.mktemp(kind), draws=kind == "coded"))


def test_what_must_equal_full_prefill_does_and_reuse_does_not(toy: Toy) -> None:
    methods = toy("raw").metrics["methods"] | toy("coded").metrics["methods"]
    for name in ("full", "prefix", "all", "transformers", "exact"):
        assert methods[name]["mean_kl"]["mean"] < 1e-9, name
        assert methods[name]["identical"]["mean"] == methods[name]["agreement"]["mean"] == 1.0
        assert methods[name]["score_against_full"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "n": QUESTIONS}
    assert methods["reuse"]["mean_kl"]["mean"] > 1e-4
    assert toy("raw").metrics["kl_rounding"] < 1e-9


def test_work_is_counted_as_by_hand(toy: Toy) -> None:
    for line in predictions(toy("raw")):
        selected = sum(stop - start for start, stop in line["recomputed"])
        assert line["tokens_recomputed"] == selected, line["method"]
        n_run = line["tokens_prompt"] - line["tokens_exact"]
        if line["method"] in ("prefix", "all"):  # exact: what is not of the prefix is computed
            assert line["cost"] == pytest.approx(n_run / line["tokens_prompt"]), line["method"]
        elif line["method"] in ("full", "transformers"):
            assert (line["cost"], line["bytes_loaded"]) == (1.0, 0)


def test_of_an_edited_passage_the_changed_part_is_computed(toy: Toy) -> None:
    whole, edited = (
        next(line for line in predictions(toy("edited")) if line["method"] == f"query+shift@0.25{edit}")
        for edit in ("", "/answer")
    )
    assert whole["tokens_prompt"] == edited["tokens_prompt"]
    assert whole["tokens_computed"] == 0 < edited["tokens_computed"] < 40
    assert edited["bytes_loaded"] < whole["bytes_loaded"]


def test_figures_and_tables_are_those_of_the_predictions(toy: Toy) -> None:
    done, name = toy("raw"), "query+shift@0.25"
    lines = {(line["id"], line["method"]): line for line in predictions(done)}
    ids, found = [f"q{n}" for n in range(QUESTIONS)], done.metrics["methods"][name]
    ttft, full = ([lines[i, method]["seconds"]["ttft"] for i in ids] for method in (name, "full"))
    assert found["seconds"]["ttft"] == {"median": np.median(ttft), "p95": np.percentile(ttft, 95)}
    assert found["times_faster"]["mean"] == pytest.approx(np.median(full) / np.median(ttft))
    assert found["tokens_recomputed"] == np.mean([lines[i, name]["tokens_recomputed"] for i in ids])
    shown = {table.title: table for table in tables(done.metrics)}
    for title, column, wanted in (
        ("Time and work", "TTFT ms", f"{1e3 * np.median(ttft):.0f}"),
        ("Time and work", "MB loaded", f"{found['bytes_loaded'] / 1e6:.1f}"),
        ("Quality", "mean KL, nats", "{mean:.4f} ({low:.4f} to {high:.4f})".format(**found["mean_kl"])),
        (
            "Quality",
            "F1 - full's",
            "{mean:+.3f} ({low:+.3f} to {high:+.3f})".format(**found["score_against_full"]),
        ),
        ("Single prompts", "against", "reuse"),
    ):
        row = next(row for row in shown[title].rows if row[0] == name)
        assert row[shown[title].columns.index(column)] == wanted, column


def test_a_prompt_refined_as_a_whole_differs_at_the_first_token_alone(tmp_path: Path) -> None:
    done = run(tmp_path, write_dataset(tmp_path), methods=("query@0.25", "query@0.25~1"))
    lines = {(line["id"], line["method"]): line for line in predictions(done)}
    for i in (f"q{n}" for n in range(QUESTIONS)):
        plain, refined = lines[i, "query@0.25"], lines[i, "query@0.25~1"]
        assert refined["first_kl"] == plain["first_kl"] > 1e-6
        assert refined["mean_kl"] * refined["decisions"] == pytest.approx(plain["first_kl"], abs=1e-6)
        assert refined["recomputed"] == plain["recomputed"]
        assert refined["cost"] > plain["cost"]
        assert refined["seconds"]["decode"] >= refined["seconds"]["gap"] >= refined["seconds"]["refine"] > 0
        assert plain["seconds"]["refine"] == 0
    found = done.metrics["methods"]["query@0.25~1"]["seconds"]
    shown = next(table for table in tables(done.metrics) if table.title == "Time and work")
    row = next(row for row in shown.rows if row[0] == "query@0.25~1")
    assert row[shown.columns.index("second token")] == f"{1e3 * found['gap']['median']:.0f}"


def test_only_questions_that_every_method_answered_count(toy: Toy) -> None:
    lines = {(line["id"], line["method"]): {**line, "recall": 0.5} for line in predictions(toy("raw"))}
    questions, methods = {f"q{n}": f"q{n}" for n in range(QUESTIONS)}, parse_methods(METHODS, (0.25,))
    del lines["q0", "prefix"]
    answered = Predictions(lines, questions, methods)
    assert answered.ids == ["q1", "q2"]
    assert summarize(answered, "F1")["recall"] == {"mean": 0.5, "low": 0.5, "high": 0.5, "n": 2}
    del lines["q1", "full"], lines["q2", "full"]
    with pytest.raises(InputError):
        Predictions(lines, questions, methods)


def test_int8_weights_change_the_decoded_tokens_alone(tmp_path: Path) -> None:
    """Full prefill decodes with the model's own weights; the prefill of `prefix` is exact, its decoding is in int8."""
    model = tiny_loaded_model.__wrapped__(hidden_size=256, head_dim=64)
    if native_decoder(model.decoder, in_int8=True)[0] is None:
        pytest.skip("no native step here: no int8 weights")
    decode_in_int8(model.decoder)
    engine = Engine(CONFIG, model, MemoryStore(2**30))
    found = run(tmp_path, write_dataset(tmp_path), engine, methods=("prefix",)).metrics["methods"]["prefix"]
    assert found["first_kl"]["mean"] < 1e-9
    assert 1e-7 < found["mean_kl"]["mean"] < 0.05  # 0 with the model's own weights: see above


def test_kv_makes_room_for_the_next_question(tmp_path: Path) -> None:
    """A store that holds a question's four passages and the prefix, but not six, gives the same numbers."""
    dataset, methods = write_dataset(tmp_path, 6), ("query", "prefix")
    tight = MemoryStore(260 * tiny_engine().model.decoder.kv_bytes_per_token)
    free, at_cap = (
        run(tmp_path, dataset, tiny_engine(store), name, methods=methods)
        for name, store in (("free", None), ("tight", tight))
    )
    assert untimed(at_cap.metrics) == untimed(free.metrics)
    assert tight.stats().evictions


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999, 1.0])
def test_a_killed_run_goes_on_and_ends_with_the_same_metrics(
    toy: Toy, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = toy("raw")
    folder = tmp_path / "runs" / done.folder.name
    shutil.copytree(done.folder, folder)
    path = folder / "predictions.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    kept = {(p["id"], p["method"]): p for p in map(json.loads, path.read_bytes().split(b"\n")[:-1])}
    for name in ("metrics.json", "report.html"):
        (folder / name).unlink()
    if share == 1:
        monkeypatch.setattr(fidelity, "answer", lambda *_: pytest.fail("measured again"))
    again = predictions(run(tmp_path, done.folder.parents[1] / "tiny.json"))
    assert untimed(json.loads((folder / "metrics.json").read_text())) == untimed(done.metrics)
    assert kept.items() <= {(p["id"], p["method"]): p for p in again}.items()
    assert len(again) == QUESTIONS * len(done.metrics["methods"])
    assert (folder / "report.html").exists()


def test_a_run_is_extended_by_halves_and_permutations(toy: Toy, tmp_path: Path) -> None:
    """Predictions are kept, prompts of one question count as one, and the whole is the run in one piece."""
    dataset, methods = write_dataset(tmp_path), ("query", "query+shift")
    plans: tuple[dict[str, Any], ...] = (
        {"limit": 1, "methods": ("query",)},
        {"half": "first", "methods": ("query",), "shuffles": 1},
        {"half": "second", "methods": methods, "shuffles": 1},
        {"methods": methods, "shuffles": 2},
    )
    parts = [(run(tmp_path, dataset, name="tiny-closed", **plan).metrics, plan) for plan in plans]
    assert [(f["questions"], f["prompts"]) for f, _ in parts] == [(1, 1), (2, 4), (1, 2), (3, 9)]
    assert untimed(parts[-1][0]["methods"]) == untimed(toy("permuted").metrics["methods"])


def test_a_run_over_other_prompts_is_not_gone_on_with(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"methods": ("none",), "name": "mine"}
    dataset = write_dataset(tmp_path, 1)
    folder = run(tmp_path, dataset, **plan).folder
    other = tiny_engine(config=CONFIG.with_values(decode={"max_new_tokens": 7}))
    for engine, window, setting in ((None, 16, "window"), (other, None, "decode.max_new_tokens")):
        with pytest.raises(ConfigError) as error:
            run(tmp_path, dataset, engine, window=window, **plan)
        assert error.value.setting == setting
    text, path, config = dataset.read_text(), folder / "predictions.jsonl", folder / "config.yaml"
    dataset.write_text(text.replace("painted", "sank"))
    with pytest.raises(InputError) as changed_data:
        run(tmp_path, dataset, **{**plan, "methods": ("none", "query")})
    assert changed_data.value.path == str(folder)
    dataset.write_text(text)
    for file, content, line in (
        (path, "{half\n" + path.read_text(), 1), (config, "- no mapping", None), (config, "{half", None),
    ):  # fmt: skip
        file.write_text(content)
        with pytest.raises(InputError) as damaged:
            run(tmp_path, dataset, **plan)
        assert (damaged.value.path, damaged.value.line) == (str(file), line)


@pytest.mark.parametrize("decode", [{"temperature": 0.5}, {"stop": ["x"]}])
def test_sampling_and_stop_strings_are_refused(tmp_path: Path, decode: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        run(tmp_path, write_dataset(tmp_path, 1), tiny_engine(config=CONFIG.with_values(decode=decode)))
    assert error.value.setting == f"decode.{next(iter(decode))}"


def test_a_model_whose_full_prefill_is_no_reference_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine()
    engine.__dict__["gate"] = Mock(**{"require.side_effect": ModelUnsupported})
    monkeypatch.setattr(Engine, "open", Mock(return_value=engine))
    with pytest.raises(ModelUnsupported):
        open_engine(EvaluateConfig(), load(write_dataset(tmp_path, 1)), CONFIG, tmp_path)


def test_a_question_that_does_not_fit_is_left_out(tmp_path: Path) -> None:
    figures = run(tmp_path, write_dataset(tmp_path, 2, long=1), methods=("query",)).metrics
    assert (list(figures["left_out"]), figures["questions"]) == (["q1"], 1)
    with pytest.raises(InputError):
        run(tmp_path, write_dataset(tmp_path, 1, long=0), methods=("query",), name="none")


def test_codecs_begin_with_uncoded_kv_and_the_store_s_tables() -> None:
    pytest.importorskip("constriction")
    with pytest.raises(ConfigError) as error:
        codec_for(tiny_engine(config=CONFIG.replace("store.codec", "int8")), "int8")
    assert error.value.setting == "store.codec"
    engine = tiny_engine()
    with pytest.raises(TablesMissing):
        codec_for(engine, "cachegen@1")
    document = Document(" ".join(passage(n)["text"] for n in range(40)))
    chunks = chunks_of([document], 300, engine.config, engine.prompts)
    fit("cachegen", chunks, engine.model, engine.prompts, engine.store)
    engine.blender.writer.precompute([ids := chunks[0][:50]])
    copy = coded_copy(engine, codec_for(engine, "cachegen@2"), [key := engine.blender.key(ids)])
    sizes = sizes_of([read_record(copy, key)])
    assert sizes["raw_bytes"] == 50 * engine.model.decoder.kv_bytes_per_token > 8 * sizes["bytes"]
    assert copy.stats().tables == 1


def test_nothing_is_fitted_on_the_half_that_is_asked(tmp_path: Path) -> None:
    data, engine = load(write_dataset(tmp_path, 4)), tiny_engine()
    source = PromptSource(engine, EvaluateConfig())
    chunks = [[c.ids for c in source.build(e).chunks] for e in data.examples]
    for half, fitted in (("first", chunks[1::2]), ("second", chunks[::2]), ("both", chunks)):
        found = PromptSource(engine, EvaluateConfig(half=half)).prior_chunks(data)
        assert found == [ids for prompt in fitted for ids in prompt]


def test_priors_are_fitted_once_for_each_context_and_kept_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(priors, "MIN_TOKENS", 1)
    path, methods = write_dataset(tmp_path, 1), ("query", "query+prior", "none+prior/bos")
    outcome = run(tmp_path, path, methods=methods)
    bos, own = files = [outcome.folder / f"priors-{name}-both.safetensors" for name in ("bos", "prefix")]
    kls = {line["method"]: line["mean_kl"] for line in predictions(outcome)}
    assert kls["query+prior@0.25"] != kls["query@0.25"]
    fitted, written = [file.read_bytes() for file in files], own.stat().st_mtime_ns
    bos.write_bytes(b"of another version, or damaged")
    run(tmp_path, path, methods=(*methods, "query+prior@0.5"))
    assert [file.read_bytes() for file in files] == fitted
    assert own.stat().st_mtime_ns == written


def test_a_run_compares_every_edit_with_exact_hits() -> None:
    plan = EvaluateConfig(dataset="facts", setting="edited")
    assert [v.name for v in plan.specs][2:] == ["query+prior@0.05", "query+prior@0.05/answer"]
    assert {v.edit for v in plan.model_copy(update={"dataset": "generated"}).specs} == {None, *EDITS}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Excerpts that the tiny model has room for: 75 words."""
    for name, value in {"PIECES": 3, "PIECE_WORDS": 20, "LEAD_WORDS": 6, "CONTINUATION_WORDS": 9}.items():
        monkeypatch.setattr(datasets, name, value)


def text_of(n: int) -> str:
    return " ".join(f"w{i}" + ("\n\n" if i % 50 == 49 else "") for i in range(n))


def test_perplexity_is_that_of_the_models_own_forward(tmp_path: Path, small: None) -> None:
    path = tmp_path / "book.txt"
    path.write_text(text_of(2 * 75))
    outcome = run(tmp_path, path, methods=("prefix", "transformers"), window=16)
    engine, plan = tiny_engine(), EvaluateConfig(window=16)
    source, model, nlls = PromptSource(engine, plan), tiny_loaded_model().decoder.reference, []
    for example in load(path).examples:
        prompt = source.build(example)
        text = engine.model.tokenizer.decode([i for c in prompt.chunks for i in c.ids])
        assert text == "".join(p.text for p in example.contexts)
        ids = engine.prompts.text_ids(example.answers[0])
        assert len(ids) > CONFIG.decode.answer_tokens  # longer than what is decoded
        logits = model(torch.tensor([[*prompt.ids, *ids]])).logits[0].detach().double().log_softmax(-1)
        nlls.append(-sum(float(logits[len(prompt) + n - 1, t]) for n, t in enumerate(ids)) / len(ids))
    methods = outcome.metrics["methods"]
    for name in ("full", "prefix", "transformers"):
        assert methods[name]["score"]["mean"] == pytest.approx(math.exp(sum(nlls) / len(nlls)), rel=1e-4)
        assert methods[name]["score_against_full"]["mean"] == pytest.approx(1.0, rel=1e-4)


def test_several_data_sets_make_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Engine, "open", lambda settings: tiny_engine(config=settings))
    book, broken = tmp_path / "book.txt", tmp_path / "broken.json"
    book.write_text(text_of(75))
    broken.write_text("[")
    plan = EvaluateConfig(methods=("query",), ratios=(0.25,), limit=1, chunks=2)
    found = evaluate_each(["generated", str(book), str(broken)], plan, CONFIG, tmp_path / "runs")
    metrics = {name: one.metrics for name, one in found.items() if isinstance(one, Outcome)}
    assert {n: m["metric"] for n, m in metrics.items()} == {"generated": "F1", str(book): "perplexity"}
    show_all({name: metrics.get(name, "unreadable") for name in found})
    assert capsys.readouterr().out.count("unreadable") == 1


def test_the_page_stands_alone_and_shows_the_prompts(toy: Toy) -> None:
    done = toy("coded")
    page = (done.folder / "report.html").read_text(encoding="utf-8")
    assert HOSTILE not in page  # neither as HTML nor within a script
    refers = re.findall(r'(?:src|href)="([^"]*)"', page)
    pictures = [reference for reference in refers if reference.startswith("data:")]
    assert all(reference.startswith(("data:", "#")) for reference in refers)
    assert len(pictures) == 2
    for picture in pictures:
        assert ElementTree.fromstring(base64.b64decode(picture.partition(",")[2])).tag.endswith("svg")
    data = json.loads(re.findall("<script[^>]*>(.*?)</script>", page, re.DOTALL)[0])
    assert data["methods"] == list(done.metrics["methods"])
    for prompt in data["prompts"]:
        assert HOSTILE in "".join(t for part in prompt["parts"] for t in part)
        n = sum(map(len, prompt["parts"][:-1]))
        for shown in data["lines"][prompt["id"]].values():
            assert all(0 <= a < b <= n for a, b in shown["recomputed"])


def test_without_matplotlib_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError):
        run(tmp_path, tmp_path / "none.json", draws=True)
    assert not list(tmp_path.iterdir())


def test_evaluate_with_the_bundled_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "evaluate --limit 1 --chunks 4 --methods deviation,query+shift --ratios 0.15 --max-new-tokens 4"
    assert main([*words.split(), "--runs", str(tmp_path), "--name", "run"]) == 0
    figures = json.loads((tmp_path / "run" / "metrics.json").read_text())
    share = {name: m["mean_kl_share"]["mean"] for name, m in figures["methods"].items()}
    assert share["query+shift@0.15"] < share["deviation@0.15"] < share["reuse"] == 1.0
    assert "query+shift@0.15" in capsys.readouterr().out
