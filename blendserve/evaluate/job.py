"""The whole evaluation: dataset -> engine -> runner -> figures -> plots and report, in a run folder."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blendserve.config import Config, changed
from blendserve.engine.engine import Engine
from blendserve.errors import InputError
from blendserve.evaluate.budget_use import spending
from blendserve.evaluate.config import PROMPT, EvaluateConfig, settings_from
from blendserve.evaluate.datasets import load
from blendserve.evaluate.folder import RunFolder
from blendserve.evaluate.learning import corpus_of, uses_prior
from blendserve.evaluate.progress import watching
from blendserve.evaluate.prompts import Setting, open_engine
from blendserve.evaluate.runner import Runner
from blendserve.evaluate.shuffles import with_shuffles
from blendserve.evaluate.summary import Table, summarise
from blendserve.evaluate.tasks import PERPLEXITY, Task
from blendserve.extras import install_hint
from blendserve.provenance import environment

RUNS = Path("runs")
WORK = ".work"  # in the folder of runs: stored KV and indexes, shared by all of them

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run."""

    folder: Path
    figures: dict[str, Any]  # metrics.json


def evaluate(
    plan: EvaluateConfig,
    settings: Config | None = None,
    name: str | None = None,
    runs: Path = RUNS,
    say: Say = lambda _: None,
    engine: Engine | None = None,
) -> Outcome:
    """Run what the plan asks for, or go on with it, into runs/<name>; `engine` instead of one made from the settings.

    Raises CorpusError, ConfigError, InputError, ModelError, StoreError; what was predicted until then is kept.
    """
    _check_drawing()
    settings = settings or settings_from()
    makes_room = settings.store.path is None  # in a store of the user's, nothing is given up
    variants = plan.variants
    dataset = load(plan.dataset, corpus=plan.corpus, limit=plan.limit, seed=plan.seed)
    settings = _settled(with_task_prompt(settings, dataset.task, say), runs)
    retrieved = min(plan.top_k, len(dataset.corpus)) if plan.setting == "open" else None
    examples = with_shuffles(dataset.examples[plan.part], plan.shuffles, retrieved)
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
    table = Table(folder.predictions, {e.id: e.shuffled or e.id for e in examples}, variants)
    figures = {
        "dataset": dataset.name,
        "setting": plan.setting,
        "half": plan.half,
        "task": dataset.task.name,
        "metric": dataset.task.metric,
        "reader": reader,
        "environment": where,
        "began_with": folder.began,
        "left_out": left_out,
        **summarise(table, dataset.task.metric),
        "spending": {
            v.name: spent
            for v in variants
            if (spent := spending([folder.prompts[i] for i in table.ids], table.rows(v.name)))
        },
    }
    folder.write("metrics.json", json.dumps(figures, indent=1, ensure_ascii=False).encode())
    _publish(folder, figures)
    return Outcome(folder.path, figures)


def _publish(folder: RunFolder, figures: dict[str, Any]) -> None:
    """Plots and page, made anew from what the run has kept."""
    from blendserve.evaluate.plots import coded, pareto  # start-up: matplotlib
    from blendserve.evaluate.report import render  # start-up: jinja2

    name, methods, plots = folder.path.name, figures["methods"], dict[str, bytes]()
    for format in ("svg", "png"):
        plots[f"pareto.{format}"] = pareto(methods, name, format, figures["metric"])
        if any(method["codec"] for method in methods.values()):
            plots[f"codecs.{format}"] = coded(methods, name, format)
    for file, plot in plots.items():
        folder.write(file, plot)
    folder.write("report.html", render(name, figures, folder.prompts, folder.predictions, plots).encode())


def _about(engine: Engine) -> dict[str, Any]:
    """The reader, as it ran."""
    adapter = engine.reader.adapter
    return {
        "model": engine.reader.name,
        "dtype": str(adapter.dtype).removeprefix("torch."),
        "device": str(adapter.device),
        "threads": torch.get_num_threads(),
    }


def with_task_prompt(settings: Config, task: Task, say: Say) -> Config:
    """With the task's own words around the passages, unless the user has given others."""
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
    """With a place for the KV; and no "auto", which would time this machine: every method is called by its name."""
    store = settings.store if settings.store.path else changed(settings.store, path=runs / WORK / "kv")
    blend = changed(settings.blend, method="blend")
    return settings.model_copy(update={"store": store, "blend": blend})


def _check_drawing() -> None:
    """Hours of measuring should not end in an ImportError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            f"evaluation plots with matplotlib, which is not installed: {install_hint('evaluate')}"
        )
