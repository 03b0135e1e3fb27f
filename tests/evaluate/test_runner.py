"""Whole runs of a tiny reader: every method on the same prompts, and a kill at any byte changes nothing."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from blendserve.config import changed
from blendserve.core import Passage
from blendserve.errors import ConfigError, InputError, ModelUnsupported
from blendserve.evaluate import runner as runner_module
from blendserve.evaluate.config import PROMPT, EvaluateConfig, settings_from
from blendserve.evaluate.formats import Example
from blendserve.evaluate.prompts import Setting, open_engine
from blendserve.evaluate.runner import pieces, ranges
from blendserve.evaluate.variants import split_list, variants
from blendserve.retrieve import Embedder, VectorIndex
from blendserve.store import MemoryStore
from blendserve.store.policies import LRU
from tests.evaluate.helpers import CONFIG, METHODS, predictions, run, tiny_engine, untimed, write_dataset
from tests.support.tokenizers import bundled_tokenizer

QUESTIONS = 3

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("done")
    return run(folder, write_dataset(folder, QUESTIONS))


def names(words: tuple[str, ...], ratios: tuple[float, ...] = (0.25,)) -> list[str]:
    return [v.name for v in variants(words, ratios)]


def test_words_become_variants_and_back() -> None:
    words = split_list("query+shift, deviation[1,2]@0.1,query@.05/bos,reuse/none, none+shift,full")
    found = variants(words, (0.05, 0.3))
    assert [v.name for v in found] == [
        "full", "reuse", "query+shift@0.05", "query+shift@0.3", "deviation[1,2]@0.1", "query@0.05/bos", "reuse/none",
        "none+shift",
    ]  # fmt: skip
    assert names(tuple(v.name for v in found)) == [v.name for v in found]
    assert [v.curve for v in found][2:6] == ["query+shift", "query+shift", "deviation[1,2]", "query/bos"]
    layers = found[4].blend
    assert (layers.policy, layers.check_layers, layers.ratio, layers.correction) == (
        "deviation",
        (1, 2),
        0.1,
        "none",
    )
    assert {v.blend.seed for v in variants(["random"], (0.1,), seed=7) if v.kind == "blend"} == {7}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("query@", "'query@' cannot be read"),
        ("qeury@0.1", "'qeury@0.1'.*policy.*cannot be 'qeury'"),
        ("query+shfit@0.1", "correction.*cannot be 'shfit'"),
        ("query@1.5", "ratio.*cannot be 1.5"),
        ("query@0.1/boss", "behind 'boss'.*did you mean 'bos'"),
        ("full@0.1", "'full' takes no"),
        ("query[1]@0.1", "only deviation.* has check layers"),
        ("deviation[0]@0.1", "check_layers"),
    ],
)
def test_a_word_that_is_no_method(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        variants([word], ())
    with pytest.raises(ConfigError, match="has no ratio"):
        variants(["query"], ())


def test_every_question_meets_every_method(done: Any) -> None:
    lines = predictions(done)
    wanted = names(METHODS)
    assert Counter((p["id"], p["method"]) for p in lines) == Counter(
        (f"q{n}", name) for n in range(QUESTIONS) for name in wanted
    )
    assert list(done.figures["methods"]) == wanted
    assert done.figures["questions"] == QUESTIONS
    order = [[p["method"] for p in lines if p["id"] == f"q{n}"] for n in range(QUESTIONS)]
    assert all(methods[0] == "full" for methods in order)
    assert len({methods[1] for methods in order}) == QUESTIONS  # nobody is always next


def test_what_must_equal_full_prefill_does_and_reuse_does_not(done: Any) -> None:
    methods = done.figures["methods"]
    for name in ("full", "prefix", "all", "transformers"):
        assert methods[name]["mean_kl"]["mean"] < 1e-9, name
        assert methods[name]["identical"]["mean"] == methods[name]["agreement"]["mean"] == 1.0
        assert methods[name]["against_full"]["f1"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "n": QUESTIONS}
    assert methods["reuse"]["mean_kl"]["mean"] > 1e-4
    assert methods["reuse"]["mean_kl_share"]["mean"] == 1.0
    assert 0 < methods["query+shift@0.25"]["mean_kl_share"]["mean"] < 1


def test_what_each_method_runs_and_reads_is_counted(done: Any) -> None:
    lines = {p["method"]: p for p in predictions(done) if p["id"] == "q0"}
    assert lines["full"]["bytes_loaded"] == lines["full"]["tokens_recomputed"] == 0
    assert lines["full"]["cost"] == pytest.approx(1.0)
    assert lines["reuse"]["bytes_loaded"] > lines["prefix"]["bytes_loaded"] > 0
    for method in ("query+shift@0.25", "deviation[1,2]@0.25", "random@0.25/bos"):
        assert lines[method]["share_recomputed"] == pytest.approx(0.25, abs=0.01)
        assert sum(b - a for a, b in lines[method]["recomputed"]) == lines[method]["tokens_recomputed"]
    assert lines["random@0.25/bos"]["tokens_exact"] < lines["random@0.25/bos"]["tokens_prompt"]
    assert lines["random@0.25/bos"]["tokens_exact"] < lines["query+shift@0.25"]["tokens_exact"]
    assert all(p["seconds"]["ttft"] >= p["seconds"]["prefill"] > 0 for p in lines.values())


def test_kv_is_computed_once_and_reused_by_all_methods(tmp_path: Path) -> None:
    puts: Counter[bytes] = Counter()

    class Counting(MemoryStore):
        def put_uncoded(self, key: Any, kv: Any, pin: bool = False) -> bool:
            puts[key] += 1  # `put` of an uncoded store comes here, too
            return super().put_uncoded(key, kv, pin)

    store = Counting(2**30)
    run(
        tmp_path,
        write_dataset(tmp_path),
        tiny_engine(store),
        methods=("query", "deviation", "random", "prefix"),
    )
    assert len(puts) == 6 + 1  # six passages in three questions of four, and the prefix
    assert set(puts.values()) == {1}


@pytest.mark.parametrize("cut", [0.0, 0.3, 0.62, 0.999])
def test_a_killed_run_goes_on_and_ends_with_the_same_metrics(done: Any, cut: float, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / done.folder.name
    shutil.copytree(done.folder, folder)
    path = folder / "predictions.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(cut * len(whole))])
    kept = {(p["id"], p["method"]): p for p in map(json.loads, path.read_bytes().split(b"\n")[:-1])}
    for name in ("metrics.json", "report.html"):
        (folder / name).unlink()
    again = run(tmp_path, done.folder.parent.parent / "tiny.json")
    after = {(p["id"], p["method"]): p for p in predictions(again)}
    assert untimed(json.loads((folder / "metrics.json").read_text())) == untimed(done.figures)
    assert kept.items() <= after.items()
    assert len(predictions(again)) == len(after) == QUESTIONS * len(names(METHODS))
    assert (folder / "report.html").exists()


def test_a_complete_run_measures_nothing_again(done: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("measured again")

    before = predictions(done)
    monkeypatch.setattr(runner_module, "answer", never)
    folder = done.folder.parent.parent
    again = run(folder, folder / "tiny.json")
    assert predictions(again) == before
    assert untimed(again.figures) == untimed(done.figures)


def test_a_run_can_be_extended(done: Any, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, QUESTIONS)
    run(tmp_path, dataset, limit=1, methods=("query+shift",), name="tiny-closed")
    more = run(tmp_path, dataset)
    assert untimed(more.figures["methods"]) == untimed(done.figures["methods"])


def test_the_halves_of_a_run_are_its_questions(done: Any, tmp_path: Path) -> None:
    dataset, methods = write_dataset(tmp_path, QUESTIONS), ("query+shift",)
    parts = [run(tmp_path, dataset, half=half, methods=methods, name="x") for half in ("first", "second")]
    asked = list(dict.fromkeys(line["id"] for line in predictions(parts[1])))
    assert asked == [f"q{n}" for n in (*range(0, QUESTIONS, 2), *range(1, QUESTIONS, 2))]
    assert [part.figures["half"] for part in parts] == ["first", "second"]
    counts = [part.figures["methods"]["reuse"]["mean_kl"]["n"] for part in parts]
    assert sum(counts) == QUESTIONS


def test_a_run_over_other_prompts_is_not_gone_on_with(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, 1)
    outcome = run(tmp_path, dataset, methods=("none",), name="mine")
    with pytest.raises(
        ConfigError, match=r"holds a run with window = None, not 16: give this one another name"
    ):
        run(tmp_path, dataset, methods=("none",), name="mine", window=16)
    other = changed(CONFIG, decode={"max_new_tokens": 7})
    with pytest.raises(ConfigError, match=r"decode.max_new_tokens = 6, not 7"):
        run(tmp_path, dataset, tiny_engine(config=other), methods=("none",), name="mine")
    dataset.write_text(dataset.read_text().replace("painted", "sank"))
    with pytest.raises(InputError, match="another prompt for question 'q0'"):
        run(tmp_path, dataset, methods=("none", "query"), name="mine")
    asked = yaml.safe_load((outcome.folder / "config.yaml").read_text())
    assert asked["run"]["methods"] == ["none", "query"]
    assert asked["environment"]["torch"]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, 1)
    outcome = run(tmp_path, dataset, methods=("none",))
    path = outcome.folder / "predictions.jsonl"
    path.write_text("{half\n" + path.read_text())
    with pytest.raises(InputError, match=r"predictions.jsonl, line 1: not JSON"):
        run(tmp_path, dataset, methods=("none",))


def test_a_question_that_does_not_fit_is_left_out_and_said(tmp_path: Path) -> None:
    outcome = run(tmp_path, write_dataset(tmp_path, 3, long=1), methods=("query",))
    assert list(outcome.figures["left_out"]) == ["q1"]
    assert "too many" in outcome.figures["left_out"]["q1"]
    assert outcome.figures["questions"] == 2
    with pytest.raises(InputError, match="no question was answered by every method"):
        run(tmp_path, write_dataset(tmp_path, 1, long=0), methods=("query",), name="none")


def test_at_its_cap_the_store_makes_room_for_the_next_question(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, 6)
    free = run(tmp_path, dataset, methods=("query",), name="free")
    per_token = tiny_engine().reader.adapter.kv_bytes_per_token
    store = MemoryStore(150 * per_token, LRU())  # a question's four passages and the prefix, not six
    tight = run(tmp_path, dataset, tiny_engine(store), methods=("query",), name="tight")
    assert untimed(tight.figures) == untimed(free.figures)
    assert (store.stats().evictions or 0) > 0


def test_sampling_and_check_layers_that_are_not_there_are_refused(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, 1)
    hot = changed(CONFIG, decode={"temperature": 0.5})
    with pytest.raises(ConfigError, match="evaluation compares whole greedy answers"):
        run(tmp_path, dataset, tiny_engine(config=hot), methods=("none",))
    with pytest.raises(ConfigError, match="reader's last, 3"):
        run(tmp_path, dataset, methods=("deviation[9]",), name="layers")


EXAMPLE = Example(
    "e", "Who?", ("x",), tuple(Passage(f"Some text of passage {n}.", f"T{n}") for n in range(5))
)


@pytest.mark.parametrize(("window", "chunks"), [(None, None), (None, 2), (7, None), (7, 3), (1000, None)])
def test_windows_are_the_passages_joined_and_cut(window: int | None, chunks: int | None) -> None:
    engine = tiny_engine()
    setting = Setting(engine, EvaluateConfig(window=window, chunks=chunks))
    prompt = setting.prompt("Who?", setting.context(EXAMPLE))
    plain = engine.prompts.build("Who?", EXAMPLE.contexts)
    assert (prompt.prefix, prompt.suffix) == (plain.prefix, plain.suffix)
    joined = [i for chunk in plain.chunks for i in chunk.ids]
    sizes = [len(chunk) for chunk in prompt.chunks]
    assert [i for chunk in prompt.chunks for i in chunk.ids] == joined[: sum(sizes)]
    if window is None:
        assert prompt.chunks == plain.chunks[:chunks]
    else:
        assert sizes == [min(window, len(joined) - at) for at in range(0, len(joined), window)][:chunks]


def test_open_retrieves_and_reports_recall(tmp_path: Path) -> None:
    config = changed(CONFIG, retrieve={"top_k": 2})
    engine = tiny_engine(config=config)
    engine.index = VectorIndex.create(
        tmp_path,
        Embedder.load("minilm-l6"),
        reader="tiny",
        reader_fingerprint="",
        chunk_tokens=64,
        count=lambda _: 1,
    )
    texts = {
        "Lund": "Maria Lund built the lighthouse.",
        "Bees": "Bees dance.",
        "Tea": "Tea is grown in Assam.",
    }
    engine.index.add([{"text": text, "title": title} for title, text in texts.items()])
    setting = Setting(engine, EvaluateConfig(setting="open", top_k=1))
    found = setting.context(
        Example("e", "Who built the lighthouse?", ("Lund",), (), supporting=("Lund", "Tea"))
    )
    assert [p.title for p in found.passages] == ["Lund"]
    assert found.recall == 0.5
    assert found.seconds > 0
    assert setting.context(Example("e", "Who?", ("Lund",), ())).recall is None


def test_a_reader_that_fails_the_gate_is_no_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blendserve.engine.engine import Engine

    class Failing:
        def require(self) -> None:
            raise ModelUnsupported("fails the gate")

    engine = tiny_engine()
    engine.__dict__["gate"] = Failing()
    monkeypatch.setattr(Engine, "open", lambda *_, **__: engine)
    with pytest.raises(ModelUnsupported, match="fails the gate"):
        open_engine(EvaluateConfig(), None, CONFIG, tmp_path, print)  # type: ignore[arg-type]


def test_evaluations_own_defaults_give_way_to_what_a_file_says(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("decode: {max_new_tokens: 5}\nblend: {ratio: 0.3}")
    settings = settings_from(file)
    assert settings.decode.max_new_tokens == 5
    assert settings.prompt == settings_from().prompt == PROMPT
    file.write_text("prompt: {instruction: Read.}")
    assert settings_from(file).prompt.instruction == "Read."


def test_ranges_and_pieces_lose_nothing() -> None:
    assert ranges([3, 4, 5, 9, 11, 12]) == [[3, 6], [9, 10], [11, 13]]
    text = " Zoë said “žluťoučký kůň” 🐎 twice.\n\n"
    tokenizer = bundled_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = pieces(tokenizer, ids)
    assert len(found) == len(ids)
    assert "".join(found) == text
