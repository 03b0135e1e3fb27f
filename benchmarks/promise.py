"""What the default promises, against fixed ratios: agreement, KL, and answers, on questions that nothing was tuned on.

    python -m benchmarks.promise --data FOLDER --model NAME --set 2wikimqa_open --minutes 4 --out FOLDER
    python -m benchmarks.promise --out FOLDER --report --record benchmarks/results/promise.json

A run goes on where the last one stopped. The promise answers each question at the ratio that the questions before it
chose, as a server does whose answers are all checked. FOLDER of the data has 2wikimqa/, musique/ and
reading/hotpot_70.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from blendserve.config import BlendConfig, Config
from blendserve.core import Document, Passage, Prompt, TokenIds, run
from blendserve.engine.engine import Engine
from blendserve.engine.request import Request
from blendserve.errors import IndexMissing
from blendserve.evaluate.datasets import load
from blendserve.evaluate.formats import Example
from blendserve.evaluate.tasks import f1
from blendserve.models.kv_cache import KVCache
from blendserve.models.runner import append_each
from blendserve.provenance import environment
from blendserve.quality.controller import RatioController
from blendserve.quality.evidence import MeasuredPrompt
from blendserve.quality.fidelity import Verifier, choices, forced, kl
from blendserve.quality.target import NO_WORSE, RATIOS, Loss, Target

SETS = {  # file, and whether passages are retrieved
    "2wikimqa_closed": ("2wikimqa/questions.json", False),
    "2wikimqa_open": ("2wikimqa/questions.json", True),
    "musique": ("musique/musique_60.json", False),
    "hotpotqa": ("reading/hotpot_70.json", False),
}
RULE = "deviation@0.15"
EXACT = "exact"
FIXED = ("reuse", "0.05", "0.15", RULE)
FITTED = 200  # passages whose KV is stored first, to fit the prior on
TOP_K = 8
TARGET = Target(0.1)


def measure(engine: Engine, prompt: Prompt, golds: Sequence[str]) -> dict[str, Any]:
    """Answer a prompt by full prefill and by each method -> their measurements, by name of the method."""
    model, blender = engine.model, engine.blender
    blender.writer.precompute([chunk.ids for chunk in prompt.chunks])
    verifier, end = Verifier(model, blender, prompt, engine.config.decode), engine.model.end_tokens

    def text(tokens: TokenIds) -> str:
        return str(model.tokenizer.decode(tokens, skip_special_tokens=True))

    def along(cache: KVCache, first: Any, answer: TokenIds) -> Any:
        return forced(model.decoder, cache, len(prompt), first, answer, append_each)

    full = run(verifier.full())
    answer = run(verifier.greedy(full))
    wanted, found = along(full.cache, full.logits, answer), dict[str, Any]()
    methods = {"reuse": BlendConfig(method="reuse")} | {
        f"{r:g}": BlendConfig(method="blend", ratio=r) for r in RATIOS
    }
    rule = BlendConfig(method="blend", policy="deviation", correction="none", ratio=0.15)
    for name, blend in {**methods, RULE: rule}.items():
        done = run(verifier.prefill(blend)).result
        kls = kl(wanted, given := along(done.cache, done.logits, answer))
        own = run(verifier.greedy(done))
        agreed = np.equal(choices(wanted, end), choices(given, end))
        own_agreed = np.equal(choices(along(full.cache, full.logits, own), end), own)
        found[name] = {
            "kl": sum(kls) / len(kls),
            "agreement": agreed.mean(),
            "own_agreement": own_agreed.mean(),
        }
        found[name] |= {"f1": f1(text(own), golds), "same": own == answer}
    return {"f1": f1(text(answer), golds), "tokens": len(prompt), "methods": found}


def open_engine(folder: Path, passages: Sequence[Passage], model: str) -> Engine:
    config = Config(
        model={"name": model}, retrieve={"top_k": TOP_K}, store={"cap_gb": 2.0}, decode={"max_new_tokens": 16}
    )
    config = config.replace("blend.method", "blend")
    try:
        engine = Engine.open(folder, config)
    except IndexMissing:
        documents = [Document(passage.text, passage.title, str(n)) for n, passage in enumerate(passages)]
        engine = Engine.build(folder, documents, config)
    assert engine.index is not None
    if engine.blender.priors.current() is None:
        engine.precompute(engine.index.passages[:FITTED])
    return engine


def run_set(engine: Engine, file: Path, examples: Sequence[Example], is_open: bool, until: float) -> None:
    """Measure the questions that a file does not have, until a time. Their chunks may be evicted afterwards."""
    store = engine.blender.store
    store.pin(list(store.keys()), pinned=False)
    for example in examples[len(lines(file)) :]:
        if time.perf_counter() >= until:
            break
        own = None if is_open else example.contexts
        prompt = engine.prepare(Request(example.question, own, blend={"ratio": 0.0})).prompt
        values = {"id": example.id, **measure(engine, prompt, example.answers)}
        store.pin([engine.blender.writer.key(chunk.ids) for chunk in prompt.chunks], pinned=False)
        with file.open("a") as out:
            out.write(json.dumps(values, default=float) + "\n")


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def losses(question: dict[str, Any]) -> MeasuredPrompt:
    """What a check of this question would have measured."""
    reuse, found = question["methods"]["reuse"]["kl"], list[Loss]()
    for ratio in RATIOS:
        given = question["methods"][f"{ratio:g}"]
        found.append(Loss(given["agreement"], given["kl"], given["kl"] > reuse + NO_WORSE))
    return MeasuredPrompt(tuple(found))


def promised(asked: Sequence[dict[str, Any]]) -> list[str]:
    """The method that answers each question, by checks of the questions before it."""
    controller = RatioController(TARGET)
    chosen = list[str]()
    for question in asked:
        chosen.append(EXACT if controller.ratio is None else f"{controller.ratio:g}")
        controller.add(controller.ratio, losses(question))
    return chosen


def row(asked: Sequence[dict[str, Any]], methods: Sequence[str]) -> dict[str, Any]:
    """Summarise questions, each answered by its method."""
    exact = {"kl": 0.0, "agreement": 1.0, "own_agreement": 1.0}
    given = [q["methods"].get(m) or {**exact, "f1": q["f1"]} for q, m in zip(asked, methods, strict=True)]
    reuse = [q["methods"]["reuse"]["kl"] for q in asked]
    kls = [x["kl"] for x in given]
    shares = [a / b for a, b in zip(kls, reuse, strict=True)]
    return {
        "agreement": fmean(x["agreement"] for x in given),
        "agreement_worst": min(x["agreement"] for x in given),
        "own_agreement": fmean(x["own_agreement"] for x in given),
        "kl": fmean(kls),
        "kl_share": sum(kls) / sum(reuse),
        "median": median(shares),
        "p95": float(np.quantile(shares, 0.95)),
        "worst": max(shares),
        "share_above_1": sum(share > 1 for share in shares),
        "worse": sum(a > b + NO_WORSE for a, b in zip(kls, reuse, strict=True)),
        "f1_minus_full": fmean(x["f1"] - q["f1"] for x, q in zip(given, asked, strict=True)),
        "ratios": dict(Counter(methods)),
    }


def summarise(out: Path) -> dict[str, Any]:
    """What was measured, by file: the model with the data set -> questions, F1 of full prefill, a row of each method."""
    found = dict[str, Any]()
    for file in sorted(out.glob("*.jsonl")):
        asked = lines(file)
        rows = {name: row(asked, [name] * len(asked)) for name in FIXED}
        rows["promise"] = row(asked, promised(asked))
        found[file.stem] = {"questions": len(asked), "f1": fmean(q["f1"] for q in asked), "methods": rows}
    return found


def report(sets: dict[str, Any]) -> None:
    for name, found in sets.items():
        print(f"\n{name}: {found['questions']} questions, F1 of full prefill {found['f1']:.3f}")
        for method, values in found["methods"].items():
            print(f"  {method:15}", *(f"{key} {_shown(value)}" for key, value in values.items()))


def _shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def record(file: Path, sets: dict[str, Any]) -> None:
    """Put these sets into the file, each with where it was measured. The file's sets of more questions stay."""
    kept = json.loads(file.read_text("utf-8")) if file.exists() else {}
    place = environment()
    for name, found in sets.items():
        if name not in kept or found["questions"] >= kept[name]["questions"]:
            kept[name] = {"environment": place, **found}
    file.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="Folder of indexes and measurements")
    parser.add_argument("--data", type=Path, help="Folder of the data sets")
    parser.add_argument("--model", default="smollm2-135m", help="Model, as in model.name")
    parser.add_argument("--set", choices=SETS, default="2wikimqa_open", help="Data set")
    parser.add_argument("--limit", type=int, default=20, help="Number of questions of the data set")
    parser.add_argument("--minutes", type=float, default=4.0, help="Minutes after which no question begins")
    parser.add_argument("--report", action="store_true", help="Print what was measured")
    parser.add_argument("--record", type=Path, help="With --report: put it into this file, too")
    options = parser.parse_args()
    if options.report:
        report(sets := summarise(options.out))
        if options.record:
            record(options.record, sets)
        return
    until = time.perf_counter() + 60 * options.minutes
    file, is_open = SETS[options.set]
    data = load(options.data / file)
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"{Path(options.model).name}-{options.set}"
    corpus = data.corpus if is_open else data.corpus[:FITTED]
    with open_engine(options.out / "indexes" / name, corpus, options.model) as engine:
        run_set(engine, options.out / f"{name}.jsonl", data.examples[: options.limit], is_open, until)


if __name__ == "__main__":
    main()
