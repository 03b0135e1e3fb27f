"""Chooses the ratio that keeps a target over one index, from calibrations and checks of answered requests.

proof at all ratios from the largest down to this one     -> the smallest of them
no proof                                                  -> the start, or the next larger one that seems to keep it
alarm: the current ratio loses more than it did before    -> the next larger one at once; older evidence is dropped
"""

from __future__ import annotations

import threading
import time

from blendserve.blend.policies import START_RATIO
from blendserve.core import QualityReport
from blendserve.quality.evidence import Evidence, MeasuredPrompt
from blendserve.quality.risk import Detector, interval
from blendserve.quality.target import ERROR, LEVELS, RATIOS, WORSE, Loss, Target

MIN_CHECKS = 30  # between two alarms; an alarm drops all evidence but this much


class RatioController:
    """Controls the ratio of one target over one index. Thread-safe."""

    def __init__(self, target: Target, evidence: Evidence | None = None, passages: int = 0) -> None:
        """passages: of the index."""
        self.target = target
        self.evidence = evidence or Evidence()
        self._passages = passages
        self._lock = threading.Lock()
        self._start: float | None = START_RATIO  # the smallest ratio that is used without proof
        self.checks = self.alarms = self.changes = 0
        self.checked_at = 0.0  # Unix time of the last check
        self._report: QualityReport | None = None  # for all answers until the next check
        self._choose()

    def _choose(self) -> None:
        weights = self.evidence.weights(self._passages)
        self.ratio = self.target.ratio(self.evidence.losses, weights, self._start)
        self._detectors = [Detector(self.target.limit), Detector(WORSE)]
        self._since = 0

    def add(self, ratio: float | None, sample: MeasuredPrompt, stored: Evidence | None = None) -> None:
        """Add the check of an answer that was served with `ratio` (None: exactly), and choose the ratio again.

        stored: evidence in the store, to which another process may have added; default: this controller's.
        """
        with self._lock:
            self.checks += 1
            self.checked_at = time.time()
            self._report = None
            self.evidence = (stored or self.evidence).plus(sample)
            self._passages = sample.passages
            before = self.ratio
            detectors = self._detectors
            since = self._since + 1
            if (
                ratio is not None
                and ratio == before
                and self._has_risen(sample.at(ratio))
                and since >= MIN_CHECKS
            ):
                self.alarms += 1
                self.evidence = self.evidence.latest(MIN_CHECKS)
                self._start = LEVELS[max(LEVELS.index(ratio) + 1, LEVELS.index(START_RATIO))]
            self._choose()
            if self.ratio == before:
                self._detectors = detectors
                self._since = since
            else:
                self.changes += 1

    def _has_risen(self, loss: Loss) -> bool:
        differs, is_worse = self._detectors
        alarms = differs.add(1.0 - loss.agreement), is_worse.add(float(loss.is_worse))
        return any(alarms)

    def losses(self) -> tuple[list[Loss], list[float]]:
        """Return the losses at the current ratio, and their weights; none for exact answers."""
        if self.ratio is None:
            return [], []
        return self.evidence.losses[RATIOS.index(self.ratio)], self.evidence.weights(self._passages)

    def interval(self) -> tuple[float, float, float] | None:
        """Return the mean share of tokens that differ at the current ratio, and its interval; None without evidence."""
        losses, weights = self.losses()
        if not sum(weights):
            return None
        differ = [1.0 - loss.agreement for loss in losses]
        mean = sum(weight * x for weight, x in zip(weights, differ, strict=True)) / sum(weights)
        return (mean, *interval(differ, ERROR, weights))

    def report(self) -> QualityReport:
        """Return the state of the target, for the reports of answers."""
        with self._lock:
            self._report = self._report or self._make_report()
            return self._report

    def _make_report(self) -> QualityReport:
        least = self.target.min_agreement
        prompts = round(sum(self.evidence.weights(self._passages)))
        if self.ratio is None:
            return QualityReport("answered exactly", least, None, prompts)
        found = self.interval()
        losses, weights = self.losses()
        if found is None:
            return QualityReport("no evidence yet", least, self.ratio, prompts)
        mean, low, high = found
        n_worse = sum(weight * loss.is_worse for loss, weight in zip(losses, weights, strict=True))
        worse = n_worse / sum(weights)
        status = "kept" if self.target.p_value(losses, weights) <= ERROR else "not yet proven"
        return QualityReport(status, least, self.ratio, prompts, 1.0 - mean, (1.0 - high, 1.0 - low), worse)
