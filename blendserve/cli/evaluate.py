"""`blendserve evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blendserve import console
from blendserve.cli.options import JsonOpt, Options, make_app, with_options
from blendserve.config import Config
from blendserve.evaluate.config import EvaluateConfig, settings_from

app = make_app()


@app.command()
@with_options(
    plan=Options(EvaluateConfig()),
    settings=Options(
        settings_from(),
        "prompt.kv_context",
        "decode.max_new_tokens",
        "reader.model",
        "store.path",
        load=settings_from,
        names={"store.path": "store"},
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
    """Compare methods on the questions of a data set.

    Prints fidelity to full prefill, scores against the labels, and times, and writes a report. The KV of all runs
    shares one store unless --store names another. A stopped run resumes with the same command.
    """
    from blendserve.evaluate.job import evaluate as job  # torch and all the rest: seconds
    from blendserve.evaluate.tables import asked, brief, brief_tail, edits, headline

    try:
        done = job(plan, settings, name, runs, console.say)
    except KeyboardInterrupt:
        console.say("stopped: predictions are saved; run the same command to resume")
        raise typer.Exit(130) from None
    if json:
        console.print_json({"folder": str(done.folder), **done.figures})
        return
    console.table(asked(done.figures), *brief(done.figures))
    columns, tails = brief_tail(done.figures)
    if tails:
        floor = f"KLs below {done.figures['kl_floor']:g} nats count as {done.figures['kl_floor']:g}"
        console.table(f"Single prompts, mean KL / another method's ({floor})", columns, tails)
    for sheet in edits(done.figures["methods"]):
        rows = [
            [" ".join((c.text, f"({c.below})" if c.below else "")).strip() for c in row] for row in sheet.rows
        ]
        console.table(f"{sheet.title}. {sheet.note}", sheet.columns, rows)
    for line in headline(done.figures):
        console.out.print(line, markup=False)
    console.out.print(f"More in {done.folder / 'report.html'}", markup=False)
