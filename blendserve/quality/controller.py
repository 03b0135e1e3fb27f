"""The ratio that keeps a target over one index: calibration chooses it, checks of answered requests adjust it.

    alarm of the ratio that serves            -> the next larger one, or exact answers        at once
    proof that the next smaller one keeps it  -> that one                                     by checks alone

The j-th step down needs a p-value of ERROR / 2^j, so all of them together err with that probability.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from blendserve.core import QualityReport
from blendserve.quality.calibration import Calibration
from blendserve.quality.risk import Detector, interval
from blendserve.quality.target import ERROR, RATIOS, Loss, Target

KEPT_CHECKS = 1_000  # latest ones, at each ratio
MIN_CHECKS = 30  # between two steps up
LEVELS: tuple[float | None, ...] = (*RATIOS, None)  # None: exact answers


class RatioController:
    """Controls the ratio of one target over one index. Thread-safe."""

    def __init__(self, target: Target, calibration: Calibration | None) -> None:
        """calibration: None if the index has none; answers are then exact."""
        self.target, self._calibration = target, calibration
        self._lock = threading.Lock()
        self.ratio = target.ratio(calibration.losses) if calibration else None
        self.checks = self.alarms = self.changes = 0
        self.checked_at = 0.0  # Unix time of the last check
        self._steps_down, self._was_raised = 0, False
        self._report: QualityReport | None = None  # since the last check: every answer has it
        self._restart()

    def _restart(self) -> None:
        """Counts of checks begin anew, as another ratio serves."""
        self._losses = {ratio: deque[Loss](maxlen=KEPT_CHECKS) for ratio in RATIOS}
        self._detector, self._since = Detector(self.target.limit), 0

    @property
    def checked_ratios(self) -> tuple[float, ...]:
        """The ratios that a check measures: the one that serves, the next smaller and the next larger one."""
        if self._calibration is None:
            return ()
        at = LEVELS.index(self.ratio)
        return tuple(ratio for ratio in LEVELS[max(0, at - 1) : at + 2] if ratio is not None)

    def add(self, ratio: float | None, losses: Mapping[float, Loss]) -> None:
        """A check of an answer that was served with `ratio` (None: exactly). losses: of `checked_ratios`."""
        with self._lock:
            self.checks, self.checked_at, self._report = self.checks + 1, time.time(), None
            if ratio != self.ratio:  # served before the last change
                return
            self._since += 1
            for at, loss in losses.items():
                self._losses[at].append(loss)
            served = [losses[ratio]] if ratio is not None else []
            has_risen = any(map(self._detector.add, self.target.losses(served)))
            if has_risen and self._since >= MIN_CHECKS:
                self.alarms += 1
                self._change(+1)
            elif self._may_step_down():
                self._steps_down += 1
                self._change(-1)

    def _may_step_down(self) -> bool:
        at = LEVELS.index(self.ratio)
        if at == 0 or self._calibration is None:
            return False
        smaller = LEVELS[at - 1]
        assert smaller is not None
        error = ERROR * 0.5 ** (self._steps_down + 1)
        return self.target.p_value([*self._losses[smaller]]) <= error

    def _change(self, step: int) -> None:
        self.ratio = LEVELS[LEVELS.index(self.ratio) + step]
        self.changes += 1
        self._was_raised = step > 0
        self._restart()

    def interval(self) -> tuple[float, float, float] | None:
        """Mean of what the target limits, by checks since the last change, and its interval; None without checks."""
        if self.ratio is None or not (losses := self.target.losses([*self._losses[self.ratio]])):
            return None
        return (sum(losses) / len(losses), *interval(losses, ERROR))

    def report(self) -> QualityReport:
        """What an answer's report says."""
        with self._lock:
            self._report = self._report or self._made_report()
            return self._report

    def _made_report(self) -> QualityReport:
        found, made = self.interval(), self._calibration
        report = QualityReport(str(self.target), self.ratio, "not calibrated", "")
        if made is None:
            return replace(report, status="answered exactly: run `blendserve calibrate INDEX`")
        basis = (
            f"calibrated on {made.prompts} {made.asked} questions, {made.made}; {self.checks} answers checked"
        )
        report = replace(report, basis=basis, status=self._status())
        if not found:
            return report
        mean, low, high = (1.0 - x if self.target.max_kl is None else x for x in found)
        return replace(report, estimate=mean, interval=(min(low, high), max(low, high)))

    def _status(self) -> str:
        if self._was_raised:
            return "raised to exact answers" if self.ratio is None else f"raised to {self.ratio:g}"
        if self.ratio is None:
            return "answered exactly: no ratio keeps the target"
        proven = self.target.p_value([*self._losses[self.ratio]]) <= ERROR
        return "kept" if proven else "not yet known"
