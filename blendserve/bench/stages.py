"""Where a prefill's time goes: linear layers, attention, load, correction.

The adapter is wrapped, and its matmul steps are timed; load and correction are timed by the request's own clock. What is
left is attention, with planning, rotation of the fresh rows and KV writes. Runs through this wrapper are of their own, so
that the timed ones stay as they are.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from blendserve.bench.harness import Run
from blendserve.models.adapter import Adapter, Projected
from blendserve.timing import Clock

STAGES = ("linear", "attention", "load", "correct")


class StagedAdapter:
    """An adapter that counts the seconds of its linear layers, norms included, in `clock`."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self.clock = Clock(adapter.device)

    def project(self, l: int, hidden: Tensor) -> Projected:
        with self.clock.stage("linear"):
            return self._adapter.project(l, hidden)

    def finish(self, l: int, hidden: Tensor, attended: Tensor) -> Tensor:
        with self.clock.stage("linear"):
            return self._adapter.finish(l, hidden, attended)

    def logits(self, hidden: Tensor) -> Tensor:
        with self.clock.stage("linear"):
            return self._adapter.logits(hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def as_adapter(self) -> Adapter:
        """What blenders may take it for."""
        return cast(Adapter, self)

    def split(self, took: Run) -> dict[str, float]:
        """The seconds of each stage of the run that just ended, which add up to its prefill; starts anew."""
        linear = self.clock.seconds.pop("linear", 0.0)
        load, correct = took.seconds["load"], took.seconds["correct"]
        rest = took.prefill - linear - load - correct
        return {"linear": linear, "attention": rest, "load": load, "correct": correct}
