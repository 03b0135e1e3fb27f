"""Compare ways to name the passages that an answer rests on with the passages that the question needs.

    python -m scripts.compare_citations DATA [--model NAME] [--answers FILE] [--json]

DATA: questions of `blendserve evaluate` that name the passages which an answer needs. The model answers greedily by full
prefill; FILE keeps each answer with the attention to its passages, so that a run that was stopped goes on there.

Ways: all passages (the baseline); by words (retrieve/citations.py) for the model's answers, and for the right ones; the
passage with most attention of the answer per token, by the layer that is best on the other half of the questions. Each
with precision, recall, their counts, and intervals that hold 95% of their bootstrap distributions. Also by words: each
passage's first two sentences as an answer to their own question, and to the next one, whose passages do not have them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blendserve.config import Config, ModelConfig
from blendserve.core import Passage
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import BlendserveError
from blendserve.evaluate.datasets import load
from blendserve.evaluate.formats import Example
from blendserve.models.loader import load_tokenizer
from blendserve.models.sources import source_of
from blendserve.retrieve.citations import Citer
from blendserve.retrieve.structure import sentences

MOST_TOKENS = 24  # of an answer
Cite = Callable[[Example, dict[str, Any]], set[int]]
"""A question and its saved answer -> numbers of the passages that are named."""


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("data")
    parser.add_argument("--model", default="smollm2-135m-reader")
    parser.add_argument("--answers", type=Path, default=Path("runs/citations.jsonl"))
    parser.add_argument("--json", action="store_true", help="print one JSON object a way")
    options = parser.parse_args()
    examples = [example for example in load(options.data).examples if example.supporting]
    saved = answered(examples, options.model, options.answers)
    pairs = [(example, saved[example.id]) for example in examples]
    for name, row in rows(pairs):
        if options.json:
            print(json.dumps({"way": name, **row}))
        else:
            print(f"{name:<28}", "  ".join(f"{key} {value}" for key, value in row.items()))
    return 0


def answered(examples: Sequence[Example], model: str, file: Path) -> dict[str, dict[str, Any]]:
    """Each question's answer: `text`, and `attention` [layers][passages] per token of the passage."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = file.read_text().splitlines() if file.exists() else []
    saved = {record["id"]: record for record in map(json.loads, lines)}
    left = [example for example in examples if example.id not in saved]
    answer = reader(model) if left else None
    for n, example in enumerate(left, 1):
        assert answer
        saved[example.id] = {"id": example.id, **answer(example)}
        with file.open("a") as lines_of:
            lines_of.write(json.dumps(saved[example.id]) + "\n")
        print(f"{n} of {len(left)} answers", file=sys.stderr)
    return saved


def reader(name: str) -> Callable[[Example], dict[str, Any]]:
    """A function that answers by transformers, whose attention can be read."""
    from transformers import AutoModelForCausalLM  # start-up: seconds, and not needed for saved answers

    settings = ModelConfig(name=name)
    tokenizer, folder = load_tokenizer(settings), source_of(name)
    prompts = PromptBuilder(tokenizer, Config().prompt)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def answer(example: Example) -> dict[str, Any]:
        prompt = prompts.build(example.question, example.contexts)
        model.set_attn_implementation("sdpa")
        out = model(torch.tensor([prompt.ids]), use_cache=True, logits_to_keep=1)
        model.set_attn_implementation("eager")
        tokens, shares = list[int](), list[torch.Tensor]()
        while len(tokens) < MOST_TOKENS:
            token = int(out.logits[0, -1].argmax())
            if token == tokenizer.eos_token_id:
                break
            tokens.append(token)
            step = {"past_key_values": out.past_key_values, "output_attentions": True, "use_cache": True}
            out = model(torch.tensor([[token]]), **step)
            rows = torch.stack([layer[0].float().mean((0, 1)) for layer in out.attentions])  # [L, T]
            shares.append(torch.stack([rows[:, s.start : s.stop].mean(1) for s in prompt.spans], 1))
        mean = torch.stack(shares).mean(0) if shares else torch.zeros(0, len(prompt.spans))
        return {"text": tokenizer.decode(tokens), "attention": mean.tolist()}

    return answer


def rows(pairs: Sequence[tuple[Example, dict[str, Any]]]) -> Iterator[tuple[str, dict[str, str]]]:
    """Each way with its figures."""
    yield "all passages", rates(pairs, lambda example, _: set(range(len(example.contexts))))
    yield "by words", rates(pairs, lambda example, saved: by_words(example, saved["text"]))
    yield "by words, right answers", rates(pairs, lambda example, _: by_words(example, example.answers[0]))
    counts, layers = np.zeros(5), len(pairs[0][1]["attention"])
    for half in (0, 1):
        others, own = pairs[1 - half :: 2], pairs[half::2]
        best = max(range(layers), key=lambda layer: named(others, by_attention(layer)).sum(0)[0])
        counts = np.vstack([counts, named(own, by_attention(best))])
    yield "by attention", of_counts(counts[1:])
    alone = [by_words(example, text) == {n} for example, _ in pairs for n, text in first_sentences(example)]
    yield "sentences of the passages", {"cited alone": f"{sum(alone)} of {len(alone)}"}
    nexts = zip(pairs, [*pairs[1:], pairs[0]], strict=True)
    foreign = [bool(by_words(a, text)) for (a, _), (b, _) in nexts for _, text in first_sentences(b)]
    yield "sentences of other passages", {"cited": f"{sum(foreign)} of {len(foreign)}"}


def by_words(example: Example, text: str) -> set[int]:
    return {each.passage for each in Citer(example.contexts, example.question).cite(text)}


def by_attention(layer: int) -> Cite:
    def cite(example: Example, saved: dict[str, Any]) -> set[int]:
        shares = saved["attention"]
        return {int(np.argmax(shares[layer]))} if shares else set()

    return cite


def first_sentences(example: Example) -> Iterator[tuple[int, str]]:
    for n, passage in enumerate(example.contexts):
        for start, end in sentences(passage.text)[:2]:
            yield n, passage.text[start:end]


def named(pairs: Iterable[tuple[Example, dict[str, Any]]], cite: Cite) -> np.ndarray:
    """Of each question: passages rightly named, named, needed; whether any is named; 1."""
    counts = list[tuple[int, ...]]()
    for example, saved in pairs:
        needed = {n for n, p in enumerate(example.contexts) if needs(example, p)}
        found = cite(example, saved)
        counts.append((len(found & needed), len(found), len(needed), bool(found), 1))
    return np.array(counts)


def needs(example: Example, passage: Passage) -> bool:
    return passage.title in example.supporting


def rates(pairs: Sequence[tuple[Example, dict[str, Any]]], cite: Cite) -> dict[str, str]:
    return of_counts(named(pairs, cite))


def of_counts(counts: np.ndarray) -> dict[str, str]:
    """Precision and recall of counts [questions, 5], with intervals over questions."""
    drawn = counts[np.random.default_rng(0).integers(0, len(counts), (2000, len(counts)))].sum(1)
    right, found, needed, answered, n = counts.sum(0).astype(int)
    figures = {"questions": f"{answered} of {n}"}
    for name, below, column in (("precision", found, 1), ("recall", needed, 2)):
        low, high = np.percentile(drawn[:, 0] / np.maximum(drawn[:, column], 1), (2.5, 97.5))
        figures[name] = f"{right / max(below, 1):.3f} [{low:.2f}, {high:.2f}] ({right} of {below})"
    return figures


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BlendserveError as error:
        sys.exit(f"error: {error}")
