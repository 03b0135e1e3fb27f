"""`blendserve calibrate`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from blendserve import console
from blendserve.cli.options import IndexArg, option, single_command, with_settings
from blendserve.config import Config, QualityConfig
from blendserve.console import Output
from blendserve.errors import InputError

if TYPE_CHECKING:
    from blendserve.quality.calibration import Calibration

DEFAULT = QualityConfig(min_agreement=0.9)  # the target of the table without one in the settings
COLUMNS = "ratio", "loss", "interval", "KL mean, worst", "of full prefill's time", "meets the target"

log = logging.getLogger(__name__)


@single_command
@with_settings(
    *("model.name", "quality.min_agreement", "quality.max_kl", "quality.violation_rate"),
    *("retrieve.top_k", "decode.max_new_tokens"),
)
def calibrate(
    index: IndexArg,
    settings: Config,
    prompts: int = option(128, "Number of prompts; more prompts can prove a closer target.", min=1),
    questions: Path | None = option(
        None, "File with questions of your users, one per line. [default: generate them from passages]"
    ),
) -> Output:
    """Measure how far answers at every recompute ratio are from full prefill, on prompts of an index.

    If quality.min_agreement or quality.max_kl is set, blendserve then uses the cheapest ratio that meets the target with
    90% confidence. If no ratio does, it answers exactly. One calibration serves every target. Run a stopped command again
    to resume it. A larger --prompts adds prompts.
    """
    from blendserve.engine.engine import Engine  # torch and all the rest: seconds

    own: list[str] = []
    try:
        own = questions.read_text("utf-8").split("\n") if questions else []
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the questions in {questions} cannot be read: {error}") from None
    own = [line.strip() for line in own if line.strip()]
    if questions and not own:
        raise InputError(f"{questions} has no questions: write one per line")
    with Engine.open(index, settings) as engine, console.progress("Calibrating", "prompts") as measured:
        try:
            found = engine.calibrate(prompts, own, measured)
        except KeyboardInterrupt:
            log.info("stopped: the measurements are stored; run the same command to resume")
            raise typer.Exit(130) from None
    return _output(found, settings.quality if settings.quality.has_target else DEFAULT)


def _output(found: Calibration, settings: QualityConfig) -> Output:
    from blendserve.quality.risk import interval, losses_needed  # start-up: numpy
    from blendserve.quality.target import ERROR, Target

    target = Target.of(settings)
    assert target
    rows, shown = list[dict[str, Any]](), list[tuple[str, ...]]()
    for ratio, measured in found.losses.items():
        losses = target.losses(measured)
        mean, (low, high) = sum(losses) / len(losses), interval(losses, ERROR)
        keeps = target.p_value(measured) <= ERROR
        needed = losses_needed(losses, target.limit, ERROR)
        kls = [loss.kl for loss in measured]
        mean_kl = sum(kls) / len(kls)
        of_full = found.seconds[f"{ratio:g}"] / found.seconds["full"]
        rows.append(
            {"ratio": ratio, "loss": mean, "low": low, "high": high, "mean_kl": mean_kl, "worst_kl": max(kls)}
        )
        rows[-1] |= {"of_full": of_full, "keeps": keeps, "needed": needed}
        advice = f"not proven; {f'about {needed}' if needed else 'more'} prompts might"
        advice = advice if mean < target.limit else "no"
        ends, worst = f"{low:.3f} to {high:.3f}", f"{mean_kl:.3f}, {max(kls):.2f}"
        cells = (f"{ratio:g}", f"{mean:.3f}", ends, worst, f"{of_full:.2f}")
        shown.append((*cells, "yes" if keeps else advice))
    chosen = target.ratio(found.losses)

    def show() -> None:
        title = f"{target}, largest loss {target.limit:.3f}; {found.prompts} {found.asked} questions"
        console.table(title, COLUMNS, shown)
        says = "no ratio meets it: answers are exact" if chosen is None else f"chosen ratio: {chosen:g}"
        console.out.print(says, markup=False)

    values = {"target": str(target), "prompts": found.prompts, "questions": found.asked, "chosen": chosen}
    return Output({**values, "ratios": rows}, show)
