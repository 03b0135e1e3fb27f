"""Whole runs of a tiny reader: every method on the same prompts, and a kill at any byte changes nothing."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve.blend import priors
from blendserve.config import StoreConfig, changed
from blendserve.core import Document
from blendserve.engine.codec_fit import chunks_of, fit
from blendserve.engine.engine import Engine
from blendserve.errors import ConfigError, InputError, ModelUnsupported, TablesMissing
from blendserve.evaluate import datasets, fidelity
from blendserve.evaluate.config import PROMPT, EvaluateConfig, settings_from
from blendserve.evaluate.datasets import load
from blendserve.evaluate.edits import EDITS
from blendserve.evaluate.job import Outcome, evaluate_each
from blendserve.evaluate.prompts import PromptSource, open_engine
from blendserve.evaluate.report import show_all
from blendserve.evaluate.stores import codec_for, coded_copy, sizes_of
from blendserve.models.runner import decode_in_int8, native_decoder
from blendserve.store import MemoryStore, read_record
from blendserve.store.policies import LRU
from tests.golden import research
from tests.support.evaluations import (
    CONFIG,
    QUESTIONS,
    RUNS,
    passage,
    predictions,
    run,
    tiny_engine,
    tiny_reader,
    untimed,
    write_dataset,
)

Toy = Callable[[str], Outcome]


@pytest.mark.parametrize("kind", RUNS)
def test_the_numbers_are_the_recorded_ones(toy: Toy, kind: str) -> None:
    """Within what the kernels of other CPUs round differently."""
    assert research.evaluation(toy(kind)) == research.golden("evaluate", 2e-3, 1e-7)[kind]


def test_every_question_meets_every_method_in_another_order(toy: Toy) -> None:
    done = toy("raw")
    order = [[p["method"] for p in predictions(done) if p["id"] == f"q{n}"] for n in range(QUESTIONS)]
    assert all(sorted(methods) == sorted(done.metrics["methods"]) for methods in order)
    assert all(methods[0] == "full" for methods in order)
    assert len({methods[1] for methods in order}) == QUESTIONS


def test_what_must_equal_full_prefill_does_and_reuse_does_not(toy: Toy) -> None:
    methods = toy("raw").metrics["methods"] | toy("coded").metrics["methods"]
    for name in ("full", "prefix", "all", "transformers", "exact"):
        assert methods[name]["mean_kl"]["mean"] < 1e-9, name
        assert methods[name]["identical"]["mean"] == methods[name]["agreement"]["mean"] == 1.0
        assert methods[name]["score_against_full"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "n": QUESTIONS}
    assert methods["reuse"]["mean_kl"]["mean"] > 1e-4
    assert toy("raw").metrics["kl_rounding"] < 1e-9


def test_int8_weights_change_the_decoded_tokens_alone(tmp_path: Path) -> None:
    """Full prefill decodes with the model's own weights; the prefill of `prefix` is exact, its decoding is in int8."""
    reader = tiny_reader.__wrapped__(hidden_size=256, head_dim=64)
    if native_decoder(reader.adapter, int8=True)[0] is None:
        pytest.skip("no native step here: no int8 weights")
    found, dataset = {}, write_dataset(tmp_path)
    for name in ("model", "int8"):
        if name == "int8":
            decode_in_int8(reader.adapter)
        engine = Engine(CONFIG, reader, MemoryStore(2**30))
        found[name] = run(tmp_path, dataset, engine, name, methods=("prefix",)).metrics["methods"]["prefix"]
        assert found[name]["first_kl"]["mean"] < 1e-9
    assert found["model"]["mean_kl"]["mean"] < 1e-9
    assert 1e-7 < found["int8"]["mean_kl"]["mean"] < 0.05


def test_kv_makes_room_for_the_next_question(tmp_path: Path) -> None:
    """A store that holds a question's four passages and the prefix, but not six, gives the same numbers."""
    dataset, methods = write_dataset(tmp_path, 6), ("query", "prefix")
    tight = MemoryStore(260 * tiny_engine().reader.adapter.kv_bytes_per_token, LRU())
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
    dataset = write_dataset(tmp_path, 1)
    outcome = run(tmp_path, dataset, methods=("none",), name="mine")
    other = tiny_engine(config=changed(CONFIG, decode={"max_new_tokens": 7}))
    for engine, window, setting in ((None, 16, "window"), (other, None, "decode.max_new_tokens")):
        with pytest.raises(ConfigError) as error:
            run(tmp_path, dataset, engine, methods=("none",), name="mine", window=window)
        assert error.value.setting == setting
    text = dataset.read_text()
    dataset.write_text(text.replace("painted", "sank"))
    with pytest.raises(InputError) as changed_data:
        run(tmp_path, dataset, methods=("none", "query"), name="mine")
    assert changed_data.value.path == str(outcome.folder)
    dataset.write_text(text)
    path = outcome.folder / "predictions.jsonl"
    path.write_text("{half\n" + path.read_text())
    with pytest.raises(InputError) as damaged:
        run(tmp_path, dataset, methods=("none",), name="mine")
    assert (damaged.value.path, damaged.value.line) == (str(path), 1)
    for content in ("- no mapping", "{half"):
        (outcome.folder / "config.yaml").write_text(content)
        with pytest.raises(InputError) as unreadable:
            run(tmp_path, dataset, methods=("none",), name="mine")
        assert unreadable.value.path == str(outcome.folder / "config.yaml")


def test_a_run_that_cannot_compare_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling, and a reader whose full prefill is no reference."""

    class Failing:
        def require(self) -> None:
            raise ModelUnsupported

    dataset = write_dataset(tmp_path, 1)
    hot = tiny_engine(config=changed(CONFIG, decode={"temperature": 0.5}))
    with pytest.raises(ConfigError) as error:
        run(tmp_path, dataset, hot, methods=("none",))
    assert error.value.setting == "decode.temperature"
    engine = tiny_engine()
    engine.__dict__["gate"] = Failing()
    monkeypatch.setattr(Engine, "open", lambda *_, **__: engine)
    with pytest.raises(ModelUnsupported):
        open_engine(EvaluateConfig(), load(dataset), CONFIG, tmp_path)


def test_a_question_that_does_not_fit_is_left_out(tmp_path: Path) -> None:
    figures = run(tmp_path, write_dataset(tmp_path, 2, long=1), methods=("query",)).metrics
    assert (list(figures["left_out"]), figures["questions"]) == (["q1"], 1)
    with pytest.raises(InputError):
        run(tmp_path, write_dataset(tmp_path, 1, long=0), methods=("query",), name="none")


def test_evaluations_own_defaults_give_way_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("decode: {max_new_tokens: 5}\nblend: {ratio: 0.3}")
    settings = settings_from(file)
    assert settings.decode.max_new_tokens == 5
    assert settings.prompt == settings_from().prompt == PROMPT


# Codecs


def test_codecs_begin_with_uncoded_kv_and_the_store_s_tables() -> None:
    pytest.importorskip("constriction")
    coded = changed(CONFIG, store=StoreConfig(codec="int8").model_dump())
    with pytest.raises(ConfigError) as error:
        codec_for(tiny_engine(config=coded), "int8")
    assert error.value.setting == "store.codec"
    engine = tiny_engine(MemoryStore(2**30))
    with pytest.raises(TablesMissing):
        codec_for(engine, "cachegen@1")
    document = Document(" ".join(passage(n)["text"] for n in range(40)))
    chunks = chunks_of([document], 300, engine.config, engine.prompts)
    fit("cachegen", chunks, engine.reader, engine.prompts, engine.store)
    engine.blender.writer.precompute([ids := chunks[0][:50]])
    copy = coded_copy(engine, codec_for(engine, "cachegen@2"), [key := engine.blender.key(ids)])
    sizes = sizes_of([read_record(copy, key)])
    assert sizes["raw_bytes"] == 50 * engine.reader.adapter.kv_bytes_per_token > 8 * sizes["bytes"]
    assert copy.stats().tables == 1


# Corrections that are fitted


def test_nothing_is_fitted_on_the_half_that_is_asked(tmp_path: Path) -> None:
    path = write_dataset(tmp_path, 4)
    engine, data = tiny_engine(), load(str(path))

    def corpus(half: Any) -> list[Any]:
        plan = EvaluateConfig(dataset=str(path), half=half)
        return PromptSource(engine, plan).prior_chunks(data)

    source = PromptSource(engine, EvaluateConfig())
    chunks = [[c.ids for c in source.build(e, source.passages(e)).chunks] for e in data.examples]
    assert corpus("first") == [*chunks[1], *chunks[3]]
    assert corpus("second") == [*chunks[0], *chunks[2]]
    assert corpus("both") == [ids for prompt in chunks for ids in prompt]


def test_priors_are_fitted_once_for_each_context_and_kept_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(priors, "MIN_TOKENS", 1)
    path, methods = write_dataset(tmp_path, 1), ("query", "query+prior", "none+prior/bos")

    def files() -> dict[str, tuple[int, bytes]]:
        return {f.name: (f.stat().st_mtime_ns, f.read_bytes()) for f in outcome.folder.glob("priors-*")}

    outcome = run(tmp_path, path, methods=methods)
    kept = files()
    assert sorted(kept) == ["priors-bos-both.safetensors", "priors-run-both.safetensors"]
    kls = {line["method"]: line["mean_kl"] for line in predictions(outcome)}
    assert kls["query+prior@0.25"] != kls["query@0.25"]
    (outcome.folder / min(kept)).write_bytes(b"of another version, or damaged")
    run(tmp_path, path, methods=(*methods, "query+prior@0.5"))
    assert {name: content for name, (_, content) in files().items()} == {n: c for n, (_, c) in kept.items()}
    assert [files()[name][0] == kept[name][0] for name in sorted(kept)] == [False, True]


# Other data: edits, continuations, several data sets


def test_a_run_compares_every_edit_with_exact_hits() -> None:
    plan = EvaluateConfig(dataset="facts", setting="edited")
    assert [v.name for v in plan.specs][2:] == ["query+prior@0.05", "query+prior@0.05/answer"]
    assert {v.edit for v in plan.model_copy(update={"dataset": "generated"}).specs} == {None, *EDITS}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Excerpts that the tiny reader has room for: 75 words."""
    for name, value in {"PIECES": 3, "PIECE_WORDS": 20, "LEAD_WORDS": 6, "CONTINUATION_WORDS": 9}.items():
        monkeypatch.setattr(datasets, name, value)


def text_of(n: int) -> str:
    return " ".join(f"w{i}" + ("\n\n" if i % 50 == 49 else "") for i in range(n))


def test_perplexity_is_that_of_the_models_own_forward(tmp_path: Path, small: None) -> None:
    path = tmp_path / "book.txt"
    path.write_text(text_of(2 * 75))
    outcome = run(tmp_path, path, methods=("prefix", "transformers"), window=16)
    engine, plan = tiny_engine(), EvaluateConfig(window=16)
    source, model, nlls = PromptSource(engine, plan), tiny_reader().adapter.reference, []
    for example in load(path).examples:
        prompt = source.build(example, source.passages(example))
        text = engine.reader.tokenizer.decode([i for c in prompt.chunks for i in c.ids])
        assert text == "".join(p.text for p in example.contexts)
        ids = engine.prompts.text_ids(example.answers[0])
        assert len(ids) > CONFIG.decode.max_new_tokens  # longer than what is decoded
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
    files = [str(tmp_path / "book.txt"), str(tmp_path / "broken.json")]
    Path(files[0]).write_text(text_of(75))
    Path(files[1]).write_text("[")
    plan = EvaluateConfig(methods=("query",), ratios=(0.25,), limit=1, chunks=2)
    found = evaluate_each(["generated", *files], plan, CONFIG, tmp_path / "runs")
    metrics = {name: one.metrics for name, one in found.items() if isinstance(one, Outcome)}
    assert {name: m["metric"] for name, m in metrics.items()} == {
        "generated": "F1",
        files[0]: "perplexity",
    }
    show_all({name: metrics.get(name, "unreadable") for name in found})
    assert capsys.readouterr().out.count("unreadable") == 1
