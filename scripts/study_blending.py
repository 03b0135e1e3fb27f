"""What no setting of the product turns, measured against full prefill: blendserve/evaluate/study.py tells what.

python scripts/study_blending.py --experiment enrich --dataset questions.json
python scripts/study_blending.py --experiment deviation --dataset musique.json --window 512 --chunks 6 --half second
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from blendserve import console
from blendserve.cli.app import run
from blendserve.cli.options import JsonOpt, Options, make_app, with_options
from blendserve.config import ReaderConfig
from blendserve.evaluate.config import EvaluateConfig

app = make_app()


@app.command()
@with_options(
    plan=Options(EvaluateConfig(), "dataset", "corpus", "window", "chunks", "limit", "half"),
    reader=Options(ReaderConfig(), "model"),
)
def main(
    experiment: Annotated[str, typer.Option(help="Run this experiment: enrich or deviation.")],
    plan: EvaluateConfig,
    reader: ReaderConfig,
    others: Annotated[int, typer.Option(min=1, help="Enrich a chunk by so many others.")] = 3,
    json: JsonOpt = False,
) -> None:
    """Run an experiment on chunks or on CacheBlend's rule, or go on with it."""
    from blendserve.evaluate import study  # torch and all the rest: seconds

    found = study.run(experiment, plan, reader.model, others)
    if not json:
        columns = ("case", "mean", "first token", "mean / plain case's")
        console.table("KL / full reuse's", columns, study.table(found["cases"]))
    console.print_json(found)


if __name__ == "__main__":
    sys.exit(run(app))
