"""A whole evaluation: data set -> engine -> runner -> metrics -> plots and report, in a run folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from blendserve import console
from blendserve.config import Config
from blendserve.engine.engine import Engine
from blendserve.errors import BlendserveError, ConfigError
from blendserve.evaluate.config import DECODE, OWN, PROMPT, EvaluateConfig, settings_from
from blendserve.evaluate.datasets import load
from blendserve.evaluate.prompts import PromptSource, open_engine, with_permutations
from blendserve.evaluate.report import render
from blendserve.evaluate.run_dir import RunDir
from blendserve.evaluate.runner import Runner
from blendserve.evaluate.stores import PromptStores
from blendserve.evaluate.summary import Predictions, summarize
from blendserve.evaluate.tasks import CONTINUATION, Task
from blendserve.provenance import environment

log = logging.getLogger(__name__)

RUNS = Path("runs")
WORK = ".work"  # in the folder of runs: stored KV and indexes of all runs


class Outcome(NamedTuple):
    """A finished run."""

    folder: Path
    metrics: dict[str, Any]  # metrics.json


def evaluate(
    config: EvaluateConfig,
    settings: Config | None = None,
    name: str | None = None,
    runs: Path = RUNS,
    engine: Engine | None = None,
) -> Outcome:
    """Run or resume an evaluation in runs/<name>; `engine` replaces one made from the settings.

    Raises CorpusError, ConfigError, InputError, ModelError, StoreError; finished predictions are kept.
    """
    import matplotlib  # noqa: F401  a missing package fails now, not after hours of measuring

    settings = settings or settings_from()
    evicts = settings.store.path is None  # nothing is evicted from a store of the user's
    methods = config.specs
    dataset = load(config.dataset, corpus=config.corpus, limit=config.limit, seed=config.seed)
    if dataset.task == CONTINUATION and config.layout != OWN:
        raise ConfigError(f"{dataset.name} is text to continue, without questions: it needs --layout own")
    settings = with_task(settings, dataset.task, config.max_new_tokens).replace("blend.method", "blend")
    if not settings.store.location:
        settings = settings.replace("store.location", str(runs / WORK / "kv"))
    retrieved = min(config.top_k, len(dataset.corpus)) if config.setting == "open" else None
    examples = with_permutations(dataset.examples[config.subset], config.shuffles, retrieved)
    where = environment()
    run_dir = RunDir(runs / (name or config.run_name), config, settings, where)
    if run_dir.predictions:
        log.info("Resuming %s: %s predictions done", run_dir.path, len(run_dir.predictions))
    with engine or open_engine(config, dataset, settings, runs / WORK) as engine:
        source = PromptSource(engine, config)
        stores = PromptStores(engine, methods, evicts, source.is_plain)
        runner = Runner(engine, source, stores, methods)
        stores.fit_priors(lambda: source.prior_chunks(dataset), run_dir, config.half)
        with console.progress("Questions", "questions", refreshes=False) as update:
            left_out = runner.run(examples, run_dir, update)
        for example_id, why in left_out.items():
            log.info("skipped question %s: %s", example_id, why)
        model = {
            "model": engine.model.name,
            "dtype": str(engine.model.decoder.dtype).removeprefix("torch."),
            "device": str(engine.model.decoder.device),
            "threads": torch.get_num_threads(),
        }
    question_of = {e.id: e.permutation_of or e.id for e in examples}
    metrics = {
        "dataset": dataset.name,
        "setting": config.setting,
        "layout": config.layout,
        "half": config.half,
        "task": dataset.task.name,
        "metric": dataset.task.metric,
        "reader": model,
        "environment": where,
        "left_out": left_out,
        **summarize(Predictions(run_dir.predictions, question_of, methods), dataset.task.metric),
    }
    _publish(run_dir, metrics)
    return Outcome(run_dir.path, metrics)


def _publish(run_dir: RunDir, metrics: dict[str, Any]) -> None:
    """metrics.json, plots and page."""
    from blendserve.evaluate import plots  # start-up: matplotlib

    run_dir.write("metrics.json", json.dumps(metrics, indent=1, ensure_ascii=False).encode())
    title = run_dir.path.name
    methods = metrics["methods"]
    drawn = {"pareto.svg": plots.pareto(methods, title, metrics["metric"])}
    if any(method["codec"] for method in methods.values()):
        drawn["codecs.svg"] = plots.codecs(methods, title)
    for file, plot in drawn.items():
        run_dir.write(file, plot)
    run_dir.write("report.html", render(run_dir, metrics, drawn).encode())


def evaluate_each(
    datasets: Sequence[str], config: EvaluateConfig, settings: Config, runs: Path = RUNS
) -> dict[str, Outcome | str]:
    """An evaluation for each data set -> its outcome, or why it failed."""
    found: dict[str, Outcome | str] = {}
    for dataset in datasets:
        log.info("%s:", dataset)
        try:
            found[dataset] = evaluate(config.with_values(dataset=dataset), settings, None, runs)
        except BlendserveError as error:
            found[dataset] = str(error)
    return found


def with_task(settings: Config, task: Task, max_new_tokens: int | None = None) -> Config:
    """The task's own prompt and length of answers, where the user has not set others. max_new_tokens: of the user's."""
    prompt = settings.prompt
    decode = settings.decode
    if (prompt.system, prompt.instruction) == (PROMPT.system, PROMPT.instruction):
        prompt = prompt.with_values(system=task.prompt.system, instruction=task.prompt.instruction)
    if max_new_tokens or decode.max_new_tokens == DECODE.max_new_tokens:
        decode = decode.with_values(max_new_tokens=max_new_tokens or task.answer_tokens)
    return settings.model_copy(update={"prompt": prompt, "decode": decode})
