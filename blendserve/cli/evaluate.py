"""`blendserve evaluate`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from blendserve import console
from blendserve.cli.options import JsonOpt, Options, make_app, split_list, with_options
from blendserve.config import Config
from blendserve.evaluate.config import EvaluateConfig, settings_from

log = logging.getLogger(__name__)

app = make_app()


@app.command()
@with_options(
    plan=Options(EvaluateConfig()),
    settings=Options(
        settings_from(),
        "prompt.kv_context",
        "decode.max_new_tokens",
        "model.name",
        "store.location",
        load=settings_from,
    ),
)
def evaluate(
    plan: EvaluateConfig,
    settings: Config,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the run; made from data set and setting if not given."),
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder for runs.")] = Path("runs"),
    json: JsonOpt = False,
) -> None:
    """Compare methods on the questions of one or several data sets.

    Prints fidelity to full prefill, scores against the labels, and times, and writes a report. Several data sets, with
    commas between them, make one table. The KV of all runs shares one store unless --store names another. A stopped run
    resumes with the same command.
    """
    from blendserve.evaluate import job, show  # torch and all the rest: seconds

    datasets = split_list(plan.dataset)
    try:
        if len(datasets) > 1:
            several = job.evaluate_each(datasets, plan, settings, runs)
            found = {d: one if isinstance(one, str) else one.metrics for d, one in several.items()}
            console.print_json(found) if json else show.show_all(found)
            return
        done = job.evaluate(plan, settings, name, runs)
    except KeyboardInterrupt:
        log.info("stopped: predictions are saved; run the same command to resume")
        raise typer.Exit(130) from None
    if json:
        console.print_json({"folder": str(done.folder), **done.metrics})
    else:
        show.show(done.metrics, done.folder / "report.html")
