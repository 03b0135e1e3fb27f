"""One table over all the data that is at hand, every method on each: blendserve/evaluate/overview.py.

python scripts/evaluate_all.py --limit 20 --methods query@0.15,query+prior@0.15
python scripts/evaluate_all.py wiki.test.txt musique.json --limit 10          # files of yours beside them
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from blendserve import console
from blendserve.cli.app import run
from blendserve.cli.options import Options, make_app, with_options
from blendserve.config import Config
from blendserve.evaluate.config import EvaluateConfig, settings_from

app = make_app()


@app.command()
@with_options(
    plan=Options(
        EvaluateConfig(), "window", "chunks", "limit", "half", "shuffles", "seed", "methods", "ratios"
    ),
    settings=Options(settings_from(), "reader.model", load=settings_from),
)
def main(
    plan: EvaluateConfig,
    settings: Config,
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files in a form that evaluate knows, or .txt files.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Keep runs in this folder.")] = Path("runs/all"),
) -> None:
    """Run every workload that is at hand, or go on with it, and print one table."""
    from blendserve.evaluate.overview import run_all, table  # torch and all the rest: seconds

    workloads = run_all(plan, settings, runs, files or [], console.say)
    console.table("Score (mean KL / full reuse's)", *table(workloads))


if __name__ == "__main__":
    sys.exit(run(app))
