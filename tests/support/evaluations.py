"""Whole evaluations of a tiny model over a small data set, in seconds each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from blendserve.config import BlendConfig, Config, DecodeConfig, PromptConfig
from blendserve.engine.engine import Engine
from blendserve.evaluate.config import EvaluateConfig
from blendserve.evaluate.job import Outcome, evaluate
from blendserve.models.loader import LoadedModel
from blendserve.store import KVStore, MemoryStore
from tests.support.models import BASE
from tests.support.tokenizers import bundled_tokenizer
from tests.support.toy import loaded

LIMIT = 700  # tokens of the model's context
CONFIG = Config(
    prompt=PromptConfig(system="Be brief.", instruction="Read."),
    blend=BlendConfig(method="blend"),
    decode=DecodeConfig(max_new_tokens=6),
)
QUESTIONS = 3
METHODS = ("prefix", "transformers", "all", "query+shift", "deviation[1,2]", "random/bos")
PLACES = ("Oslo", "Lima", "Cairo", "Hanoi", "Quito", "Riga")
HOSTILE = "</script><b>&amp; Zoë</b>"  # in every passage: a page that shows it must not run it

# Evaluations that many tests read.
RUNS: Mapping[str, Mapping[str, Any]] = {
    "raw": {"methods": METHODS},
    "coded": {
        "methods": (
            *("query@0.25", "query@0.25/int8", "reuse/int8", "query@0.25/bos/int8"),
            *("exact", "exact/int8", "prefix/int8"),
        )
    },
    "edited": {
        "dataset": "facts", "setting": "edited", "methods": ("query+shift",), "chunks": 3, "limit": 1,
    },
    "permuted": {"methods": ("query", "query+shift"), "shuffles": 2},
}  # fmt: skip


@cache
def tiny_loaded_model(**shape: int) -> LoadedModel:
    torch.manual_seed(0)
    made: dict[str, Any] = {**BASE, "vocab_size": 49152, "max_position_embeddings": LIMIT, **shape}
    model: Any = tf.LlamaForCausalLM(tf.LlamaConfig(**made)).eval()
    return loaded(model, bundled_tokenizer())


def tiny_engine(store: KVStore | None = None, config: Config = CONFIG) -> Engine:
    return Engine(config, tiny_loaded_model(), store or MemoryStore(2**30))


def passage(n: int, repeat: int = 1) -> dict[str, str]:
    place = PLACES[n % len(PLACES)]
    text = f"Person {n} was born in {place} and painted {n + 3} boats {HOSTILE}. " * repeat
    return {"title": f"Person {n}", "text": text}


def write_dataset(folder: Path, questions: int = QUESTIONS, long: int | None = None) -> Path:
    """CacheBlend's form, four passages a question; question number `long` is too long for the model."""
    records = [
        {
            "id": f"q{n}",
            "question": f"{HOSTILE} Where was person {n} born?",
            "answers": [PLACES[n % len(PLACES)]],
            "ctxs": [passage(n + k, repeat=60 if n == long else 1) for k in range(4)],
        }
        for n in range(questions)
    ]
    (path := folder / "tiny.json").write_text(json.dumps(records))
    return path


def run(
    folder: Path,
    dataset: str | Path,
    engine: Engine | None = None,
    name: str | None = None,
    draws: bool = False,
    **plan: Any,
) -> Outcome:
    """An evaluation into folder/runs; without `draws` its plots are empty, as drawing takes longer than the rest."""
    asked = EvaluateConfig(**{"dataset": str(dataset), "methods": METHODS, "ratios": (0.25,), **plan})
    with pytest.MonkeyPatch.context() as patch:
        for plot in () if draws else ("pareto", "codecs"):
            patch.setattr(f"blendserve.evaluate.plots.{plot}", lambda *_: b"<svg/>")
        settings = engine.config if engine else CONFIG
        return evaluate(asked, settings, name, folder / "runs", engine=engine or tiny_engine())


def toy_run(kind: str, folder: Path, draws: bool = False) -> Outcome:
    """One of RUNS."""
    plan = dict(RUNS[kind])
    return run(folder, plan.pop("dataset", None) or write_dataset(folder), draws=draws, **plan)


def predictions(outcome: Outcome) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (outcome.folder / "predictions.jsonl").read_text().splitlines()]


def untimed(value: Any) -> Any:
    """Figures without what a clock said."""
    timed = {"seconds", "times_faster", "ttft_ratio", "ttft_times", "headline", "environment", "began_with"}
    if isinstance(value, dict):
        return {name: untimed(part) for name, part in value.items() if name not in timed}
    return [untimed(part) for part in value] if isinstance(value, list) else value
