"""A whole evaluation: data set -> engine -> runner -> metrics -> plots and report, in a run folder."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blendserve.config import Config, changed
from blendserve.engine.engine import Engine
from blendserve.errors import BlendserveError, InputError
from blendserve.evaluate.config import PROMPT, EvaluateConfig, settings_from
from blendserve.evaluate.datasets import load
from blendserve.evaluate.folder import RunFolder
from blendserve.evaluate.learning import corpus_of, uses_prior
from blendserve.evaluate.permutations import with_permutations
from blendserve.evaluate.progress import watching
from blendserve.evaluate.prompts import Setting, open_engine
from blendserve.evaluate.runner import Runner
from blendserve.evaluate.summary import Predictions, recompute_distribution, summarize
from blendserve.evaluate.tasks import PERPLEXITY, Task
from blendserve.extras import install_hint
from blendserve.provenance import environment
from blendserve.registry import CACHEBLEND

RUNS = Path("runs")
WORK = ".work"  # in the folder of runs: stored KV and indexes of all runs

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run."""

    folder: Path
    metrics: dict[str, Any]  # metrics.json


def evaluate(
    plan: EvaluateConfig,
    settings: Config | None = None,
    name: str | None = None,
    runs: Path = RUNS,
    say: Say = lambda _: None,
    engine: Engine | None = None,
) -> Outcome:
    """Run or resume an evaluation in runs/<name>; `engine` replaces one made from the settings.

    Raises CorpusError, ConfigError, InputError, ModelError, StoreError; finished predictions are kept.
    """
    _check_packages()
    settings = settings or settings_from()
    makes_room = settings.store.path is None  # nothing is evicted from a store of the user's
    variants = plan.variants
    dataset = load(plan.dataset, corpus=plan.corpus, limit=plan.limit, seed=plan.seed)
    settings = _settled(with_task_prompt(settings, dataset.task, say), runs)
    retrieved = min(plan.top_k, len(dataset.corpus)) if plan.setting == "open" else None
    examples = with_permutations(dataset.examples[plan.part], plan.shuffles, retrieved)
    where = environment()
    folder = RunFolder(runs / (name or plan.name), plan, settings, where)
    if folder.predictions:
        say(f"Resuming {folder.path}: {len(folder.predictions)} predictions done")
    with engine or open_engine(plan, dataset, settings, runs / WORK, say) as engine, folder:
        setting = Setting(engine, plan)
        runner = Runner(engine, setting, variants, makes_room, say)
        if any(map(uses_prior, variants)):
            runner.teach(corpus_of(plan, dataset, setting, engine), plan.half, folder.path)
        with watching(len(examples), variants, folder.predictions.values()) as watch:
            left_out = runner.run(examples, folder, watch)
        for example_id, why in left_out.items():
            say(f"left out {example_id}: {why}")
        reader = _about(engine)
    predictions = Predictions(
        folder.predictions, {e.id: e.permutation_of or e.id for e in examples}, variants
    )
    prompts = [folder.prompts[i] for i in predictions.ids]
    spent = {v.name: recompute_distribution(prompts, predictions.records(v.name)) for v in variants}
    metrics = {
        "dataset": dataset.name,
        "setting": plan.setting,
        "half": plan.half,
        "task": dataset.task.name,
        "metric": dataset.task.metric,
        "reader": reader,
        "environment": where,
        "began_with": folder.began,
        "left_out": left_out,
        **summarize(predictions, dataset.task.metric, CACHEBLEND),
        "spending": {method: found for method, found in spent.items() if found},
    }
    folder.write("metrics.json", json.dumps(metrics, indent=1, ensure_ascii=False).encode())
    _publish(folder, metrics)
    return Outcome(folder.path, metrics)


def evaluate_each(
    datasets: Sequence[str],
    plan: EvaluateConfig,
    settings: Config,
    runs: Path = RUNS,
    say: Say = lambda _: None,
) -> dict[str, Outcome | str]:
    """An evaluation for each data set, with answers as long as its task needs -> its outcome, or why it failed."""
    found: dict[str, Outcome | str] = {}
    for dataset in datasets:
        say(f"{dataset}:")
        try:
            own = changed(plan, dataset=dataset)
            task = load(dataset, corpus=own.corpus, limit=1, seed=own.seed).task
            decode = changed(settings.decode, max_new_tokens=task.answer_tokens)
            found[dataset] = evaluate(own, settings.model_copy(update={"decode": decode}), None, runs, say)
        except BlendserveError as error:
            found[dataset] = str(error)
    return found


def _publish(folder: RunFolder, metrics: dict[str, Any]) -> None:
    """Plots and page."""
    from blendserve.evaluate.plots import codecs, pareto  # start-up: matplotlib
    from blendserve.evaluate.report import render  # start-up: jinja2

    name, methods = folder.path.name, metrics["methods"]
    plots = {"pareto.svg": pareto(methods, name, metrics["metric"])}
    if any(method["codec"] for method in methods.values()):
        plots["codecs.svg"] = codecs(methods, name)
    for file, plot in plots.items():
        folder.write(file, plot)
    folder.write("report.html", render(name, metrics, folder.prompts, folder.predictions, plots).encode())


def _about(engine: Engine) -> dict[str, Any]:
    """The model, as it ran."""
    adapter = engine.reader.adapter
    return {
        "model": engine.reader.name,
        "dtype": str(adapter.dtype).removeprefix("torch."),
        "device": str(adapter.device),
        "threads": torch.get_num_threads(),
    }


def with_task_prompt(settings: Config, task: Task, say: Say) -> Config:
    """Use the task's own prompt, unless the user has set another."""
    if settings.decode.max_new_tokens < task.answer_tokens and task.metric != PERPLEXITY:
        say(
            f"answers of {task.name} may need {task.answer_tokens} tokens: these end after "
            f"{settings.decode.max_new_tokens} (--max-new-tokens)"
        )
    prompt = settings.prompt
    if (prompt.system, prompt.instruction) != (PROMPT.system, PROMPT.instruction):
        return settings
    words = changed(prompt, system=task.prompt.system, instruction=task.prompt.instruction)
    return settings.model_copy(update={"prompt": words})


def _settled(settings: Config, runs: Path) -> Config:
    """With a folder for the KV, and without method "auto": every method is named."""
    store = settings.store if settings.store.path else changed(settings.store, path=runs / WORK / "kv")
    blend = changed(settings.blend, method="blend")
    return settings.model_copy(update={"store": store, "blend": blend})


def _check_packages() -> None:
    """Hours of measuring should not end in an ImportError."""
    for package in ("matplotlib", "scipy"):
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"evaluation needs {package}, which is not installed: {install_hint('evaluate')}"
            )
