"""Whole runs over plain prompts, as clients send them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from blendserve.blend.runs import EDGE, MIN_SPAN
from blendserve.core import PLAIN_SUFFIX, Passage
from blendserve.errors import ConfigError
from blendserve.evaluate.config import EvaluateConfig, Layout
from blendserve.evaluate.datasets import load
from blendserve.evaluate.prompts import PromptSource
from tests.support.evaluations import (
    predictions,
    run,
    tiny_engine,
    untimed,
    write_dataset,
)

CLIENTS = get_args(Layout)[1:]


@pytest.mark.parametrize("layout", CLIENTS)
def test_plain_prompts_are_the_templates_and_their_passages_are_found(tmp_path: Path, layout: str) -> None:
    """Exact methods equal full prefill over the ids of a client; the others start from all stored passages."""
    path, methods = write_dataset(tmp_path, 1), ("prefix", "all", "query", "query/bos")
    outcome = run(tmp_path, path, layout=layout, window=64, methods=methods)
    lines, metrics = {line["method"]: line for line in predictions(outcome)}, outcome.metrics
    assert metrics["layout"] == layout
    for name in ("full", "prefix", "all"):
        assert metrics["methods"][name]["mean_kl"]["mean"] < 1e-9
    engine, plan = tiny_engine(), EvaluateConfig(layout=layout, window=64)
    source = PromptSource(engine, plan)
    example = source.with_passages(load(path).examples[0])[0]
    texts = [passage.text for passage in example.contexts]
    prompt, text = source.build(example), engine.model.tokenizer.decode(source.build(example).ids)
    assert prompt.is_plain
    assert text.count("<|im_start|>") == {"langchain": 3, "question_first": 3, "tool": 5}[layout]
    assert "\n\n".join(texts) in text
    assert (text.index(example.question) > text.index(texts[0])) == (layout == "langchain")
    stored = source.stored_chunks(example)
    assert stored == engine.prompts.chunk_ids(Passage(text) for text in texts)
    n_bytes = engine.model.decoder.kv_bytes_per_token
    long, cut = (
        sum(len(ids) for ids in stored if len(ids) >= MIN_SPAN + EDGE),
        EDGE * len(stored) + PLAIN_SUFFIX,
    )
    for name in ("reuse", "query@0.25", "query@0.25/bos"):
        assert long - cut <= lines[name]["bytes_loaded"] / n_bytes <= sum(map(len, stored)), name
        assert metrics["methods"][name]["mean_kl"]["mean"] > 1e-4


def test_a_plain_prompt_is_searched_for_its_own_passages_alone(tmp_path: Path) -> None:
    """What else is in the store changes nothing: here longer chunks of the same text."""
    plan: dict[str, Any] = {"layout": "langchain", "methods": ("query",), "window": 64}
    path = write_dataset(tmp_path, 1)
    alone, used = run(tmp_path, path, name="alone", **plan), tiny_engine()
    source = PromptSource(used, EvaluateConfig(layout="langchain", window=64))
    texts = [p.text for p in source.with_passages(load(path).examples[0])[0].contexts]
    used.precompute([Passage("\n\n".join(texts))])
    again = run(tmp_path, path, used, name="again", **plan)
    assert untimed(again.metrics["methods"]) == untimed(alone.metrics["methods"])


@pytest.mark.parametrize(
    "plan",
    [
        {"setting": "edited"},
        {"methods": ("query/int8",)},
        {"methods": ("exact",)},
        {"dataset": "reference"},
    ],
)
def test_what_plain_prompts_cannot_measure_is_refused(tmp_path: Path, plan: dict[str, Any]) -> None:
    dataset = plan.get("dataset", write_dataset(tmp_path, 1))
    with pytest.raises(ConfigError):
        run(tmp_path, **{"methods": ("query",), **plan, "dataset": dataset, "layout": "tool"})
