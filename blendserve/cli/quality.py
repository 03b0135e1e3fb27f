"""`blendserve calibrate`."""

from __future__ import annotations

import logging
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import typer

from blendserve import console
from blendserve.cli.options import IndexArg, option, single_command, with_settings
from blendserve.config import Config, QualityConfig
from blendserve.console import Output
from blendserve.errors import InputError

if TYPE_CHECKING:
    from blendserve.quality.evidence import Evidence

COLUMNS = "ratio", "agreement", "interval", "KL mean, worst", "worse than reuse", "kept"

log = logging.getLogger(__name__)


@single_command
@with_settings(
    *("model.name", "quality.min_agreement", "retrieve.top_k", "decode.max_new_tokens"),
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

    blendserve uses the least ratio that keeps quality.min_agreement with 90% confidence. `precompute` and a server gather
    the same evidence in time; this command gathers it at once. It serves every target. Run a stopped command again to
    resume it. A larger --prompts adds prompts.
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
    return _output(found, settings.quality.min_agreement or QualityConfig().min_agreement or 0.0)


def _output(found: Evidence, least: float) -> Output:
    from blendserve.quality.controller import RatioController  # start-up: numpy
    from blendserve.quality.risk import interval
    from blendserve.quality.target import ERROR, RATIOS, Target

    target = Target(1.0 - least)
    weights = [1.0] * len(found.samples)
    rows: list[dict[str, Any]] = []
    shown: list[tuple[str, ...]] = []
    for ratio, losses in zip(RATIOS, found.losses, strict=True):
        differ = [1.0 - loss.agreement for loss in losses]
        kls = [loss.kl for loss in losses]
        agreement = 1.0 - fmean(differ)
        low, high = interval(differ, ERROR)
        worse = fmean(loss.is_worse for loss in losses)
        kept = target.p_value(losses, weights) <= ERROR
        row = {"ratio": ratio, "agreement": agreement, "low": 1.0 - high, "high": 1.0 - low}
        rows.append({**row, "mean_kl": fmean(kls), "worst_kl": max(kls), "worse": worse, "kept": kept})
        ends = f"{1.0 - high:.3f} to {1.0 - low:.3f}"
        kl = f"{fmean(kls):.3f}, {max(kls):.2f}"
        says = "yes" if kept else "no" if target.seems_missed(losses, weights) else "not proven"
        shown.append((f"{ratio:g}", f"{agreement:.3f}", ends, kl, f"{worse:.1%}", says))
    report = RatioController(target, found).report()

    def show() -> None:
        console.table(f"{target}; {len(found.samples)} prompts", COLUMNS, shown)
        console.out.print(report.summary, markup=False)

    return Output({**report.to_dict(), "ratios": rows}, show)
