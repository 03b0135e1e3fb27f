"""A scheduler over an engine, without HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blendserve.config import changed
from blendserve.core import Passage
from blendserve.engine.queued import QueuedRequest
from blendserve.engine.request import Plan
from blendserve.engine.scheduler import Scheduler
from blendserve.engine.slots import Slots
from blendserve.serve.metrics import Metrics
from blendserve.timing import Clock
from tests.engine.helpers import CONTEXT, PASSAGES, Listener, engine, reader, wait_for


class Bench:
    """What tests of the scheduler begin with."""

    def __init__(self, slots: int = 3, queue: int = 100, gap_s: float = 0.0) -> None:
        self.engine = engine()
        self.engine.precompute(PASSAGES)
        self.slots = Slots(reader().adapter, slots, CONTEXT)
        self.scheduler = Scheduler(reader(), self.slots, queue, gap_s, 0.0, Metrics())
        self.blender = self.engine.blender.like(self.engine.store, "", self.scheduler.pause)

    def work(
        self, question: str, passages: Sequence[Passage], tenant: str = "", **options: Any
    ) -> tuple[QueuedRequest, Listener]:
        blend = {k: v for k, v in options.items() if k in type(self.engine.config.blend).model_fields}
        decode = {k: v for k, v in options.items() if k in type(self.engine.config.decode).model_fields}
        listener, config = Listener(), self.engine.config
        plan = Plan(
            self.engine.prompts.build(question, passages),
            tuple(passages),
            changed(config.blend, **blend),
            changed(config.decode, **decode),
            Clock(),
        )
        work = QueuedRequest(tenant, plan, self.blender, listener)
        return work, listener

    def submit(self, *args: Any, **options: Any) -> Listener:
        work, listener = self.work(*args, **options)
        self.scheduler.submit(work)
        return listener

    def wait_idle(self) -> None:
        wait_for(lambda: self.scheduler.load == (0, 0))
