"""scripts/train_reader.py on a tiny model: its loss, what it writes, its lessons, and going on after a kill."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from blendserve.config import PromptConfig
from blendserve.core import Passage
from blendserve.engine.prompt import PromptBuilder
from scripts import reading_lessons, train_reader
from scripts.reading_lessons import Lesson, Lessons
from tests.support.models import config
from tests.support.tokenizers import bundled_tokenizer

TEXTS = {f"T{n}": f"The river of town {n} is called Oruna {n}. " + 30 * "It is wide. " for n in range(12)}
ASKED = [(f"Which river is in town {n}?", f"Oruna {n}") for n in range(3)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny random model with the bundled tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("base"), bundled_tokenizer()
    torch.manual_seed(0)
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096, "num_hidden_layers": 2}
    AutoModelForCausalLM.from_config(config("llama", **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lessons' files."""
    folder, (question, answer) = tmp_path_factory.mktemp("data"), ASKED[0]
    asked = [{"question": question, "answers": [answer, answer + " of town 0"]}]
    files: tuple[Any, ...] = (
        [{"title": "A_b", "paragraphs": [{"context": text, "qas": asked} for text in TEXTS.values()]}],
        [
            {
                "question": question,
                "answer": answer,
                "supporting_facts": [["T0", 0]],
                "context": [[t, [x]] for t, x in TEXTS.items()],
            }
        ],
        [
            {
                "question": question,
                "answers": [answer],
                "ctxs": [{"title": t, "text": x, "supporting": t == "T0"} for t, x in TEXTS.items()],
            }
        ],
    )
    for name, records in zip(reading_lessons.FILES, files, strict=True):
        (folder / name).write_text(json.dumps(records))
    return folder


def test_a_lesson_costs_what_its_questions_cost_in_prompts_of_their_own(base: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    prompts, end = PromptBuilder(bundled_tokenizer(), PromptConfig()), bundled_tokenizer().eos_token_id
    passages = [Passage(text, title) for title, text in TEXTS.items()]
    losses: list[float] = []
    with torch.no_grad():
        packed = train_reader.loss_of(model, train_reader.encode(Lesson(passages, ASKED), prompts, end))
        for question, answer in ASKED:
            said = [*prompts.text_ids(answer), end]
            logits = model(torch.tensor([[*prompts.build(question, passages).ids, *said]])).logits[0]
            losses += F.cross_entropy(
                logits[-len(said) - 1 : -1], torch.tensor(said), reduction="none"
            ).tolist()
    torch.testing.assert_close(float(packed), sum(losses) / len(losses), rtol=1e-5, atol=1e-5)


def test_the_factors_of_a_layer_give_its_output() -> None:
    layer, x = train_reader.LoRA(torch.nn.Linear(40, 24)), torch.randn(5, 40)
    torch.nn.init.normal_(layer.a)
    a, b = (layer.factors()[name].float() for name in "ab")
    expected = x @ (layer.base.weight + a @ b).T + layer.base.bias
    torch.testing.assert_close(layer(x), expected, rtol=0.05, atol=0.1)


def test_two_steps_write_an_adapter_of_every_linear_layer(data: Path, base: str, tmp_path: Path) -> None:
    out = tmp_path / "adapter.safetensors"
    train_reader.train(data, out, 2, base)
    weights, factors = load_file(f"{base}/model.safetensors"), load_file(out)
    linear = {name for name, weight in weights.items() if weight.ndim == 2 and "layers" in name}
    assert {*factors} == {f"{name}.{x}" for name in linear for x in "ab"}
    for name in linear:
        assert (factors[f"{name}.a"] @ factors[f"{name}.b"]).shape == weights[name].shape
        assert factors[f"{name}.a"].any()
    with safe_open(out, "pt") as file:
        assert {"base", "data", "licences", "recipe"} == file.metadata().keys()
    assert [*tmp_path.iterdir()] == [out]


def test_a_killed_run_goes_on(data: Path, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_reader, "EVERY", 2)
    monkeypatch.setattr(train_reader, "ACCUMULATED", 2)
    whole, killed = tmp_path / "whole.safetensors", tmp_path / "killed.safetensors"
    train_reader.train(data, whole, 4, base)
    encode = train_reader.encode
    asked: list[Lesson] = []

    def dies(lesson: Lesson, *more: Any) -> Any:
        asked.append(lesson)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return encode(lesson, *more)

    monkeypatch.setattr(train_reader, "encode", dies)
    with pytest.raises(KeyboardInterrupt):
        train_reader.train(data, killed, 4, base)
    train_reader.train(data, killed, 4, base)
    assert asked[4:] == asked[2:4]
    expected, made = load_file(whole), load_file(killed)
    assert expected.keys() == made.keys()
    assert all(torch.equal(made[name], expected[name]) for name in expected)


def test_lessons_hold_what_they_ask_after(data: Path) -> None:
    made = [Lessons(data)(n) for n in range(60)]
    assert made == [Lessons(data)(n) for n in range(60)]
    kinds = Counter[str]()
    for lesson in made:
        titles, text = {p.title for p in lesson.passages}, " ".join(p.text for p in lesson.passages)
        assert 1 <= len(lesson.asked) <= reading_lessons.QUESTIONS
        kind = "squad" if titles == {"A b"} else "multi_hop" if titles <= {*TEXTS} else "generated"
        kinds[kind] += 1
        if kind == "generated":  # an answer stands in the passages, or is of a comparison
            assert all(answer in {*titles, "yes", "no"} or answer in text for _, answer in lesson.asked)
        else:
            assert lesson.asked == [ASKED[0]] * len(lesson.asked)
            assert 1 < len(lesson.passages) < len(TEXTS)
            assert kind == "squad" or "T0" in titles
    assert kinds.keys() == reading_lessons.SHARES.keys()
