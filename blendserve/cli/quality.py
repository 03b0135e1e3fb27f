"""`blendserve calibrate`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from blendserve import console
from blendserve.cli.options import IndexArg, option, single_command, with_settings
from blendserve.config import BlendConfig, Config
from blendserve.console import Output
from blendserve.errors import InputError

if TYPE_CHECKING:
    from blendserve.quality.calibration import Calibration

DEFAULT = BlendConfig(quality=0.9)  # the target of the table without one in the settings

log = logging.getLogger(__name__)


@single_command
@with_settings(
    *("model.name", "blend.quality", "blend.max_kl", "blend.exceed"),
    *("retrieve.top_k", "decode.max_new_tokens"),
)
def calibrate(
    index: IndexArg,
    settings: Config,
    prompts: int = option(128, "Number of prompts; more of them certify a closer target.", min=1),
    questions: Path | None = option(
        None, "File of your users' questions, one a line; without it, questions are made of passages."
    ),
) -> Output:
    """Measure how far answers at every recompute ratio are from full prefill, on prompts of an index.

    With blend.quality or blend.max_kl set, the engine then serves with the least ratio that keeps the target with the
    given confidence, and answers exactly if none does. One calibration serves every target. A stopped run goes on where
    it was, and a larger --prompts adds to it.
    """
    from blendserve.engine.engine import Engine  # torch and all the rest: seconds

    own = _read(questions) if questions else []
    with Engine.open(index, settings) as engine, console.progress("Calibrating", "prompts") as measured:
        try:
            found = engine.calibrate(prompts, own, measured)
        except KeyboardInterrupt:
            log.info("stopped: what was measured is stored; run the same command to resume")
            raise typer.Exit(130) from None
    return _output(found, settings.blend if settings.blend.has_target else DEFAULT)


def _read(questions: Path) -> list[str]:
    try:
        lines = [line.strip() for line in questions.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the questions in {questions} cannot be read: {error}") from None
    if not any(lines):
        raise InputError(f"{questions} has no questions: write one a line")
    return [line for line in lines if line]


def _output(found: Calibration, blend: BlendConfig) -> Output:
    from blendserve.quality.risk import interval, losses_needed  # start-up: numpy
    from blendserve.quality.target import Target

    target = Target.of(blend)
    assert target
    rows, error = list[dict[str, Any]](), 1.0 - target.confidence
    for ratio, of in found.losses.items():
        losses = target.losses(of)
        mean, ends, p = sum(losses) / max(1, len(losses)), interval(losses, error), target.p_value(of)
        kls = sorted(loss.kl for loss in of)
        row = {"ratio": ratio, "loss": mean, "interval": ends, "p": p, "keeps": p <= error}
        row |= {"needed": None if p <= error else losses_needed(losses, target.limit, error)}
        row |= {"mean_kl": sum(kls) / max(1, len(kls)), "worst_kl": kls[-1] if kls else 0.0}
        rows.append(row | {"time": found.seconds[f"{ratio:g}"] / found.seconds["full"] if kls else None})
    chosen = target.ratio(found.losses)
    values = {"target": str(target), "prompts": found.prompts, "questions": found.asked, "chosen": chosen}
    columns = ("ratio", "loss", "interval", "KL mean, worst", "of full's time", "keeps the target")
    table = [
        (
            f"{row['ratio']:g}",
            f"{row['loss']:.3f}",
            "{:.3f} to {:.3f}".format(*row["interval"]),
            f"{row['mean_kl']:.3f}, {row['worst_kl']:.2f}",
            f"{row['time']:.2f}" if row["time"] else "",
            "yes" if row["keeps"] else f"not shown; {_needed(row['needed'])}",
        )
        for row in rows
    ]
    title = f"{target}, limit of the loss {target.limit:.3f}; {found.prompts} {found.asked} questions"
    says = "no ratio keeps it: answers are exact" if chosen is None else f"chosen ratio: {chosen:g}"

    def show() -> None:
        console.table(title, columns, table)
        console.out.print(says, markup=False)

    return Output(values | {"ratios": rows}, show)


def _needed(n: int | None) -> str:
    return "more prompts like these would not" if n is None else f"about {n} prompts might"
