"""Background tasks stand back for requests."""

from __future__ import annotations

import threading
from itertools import chain, count, repeat

import pytest

from blendserve.engine.queued import QueuedRequest
from blendserve.engine.standby import Standby
from tests.engine.helpers import PASSAGES, QUESTIONS, wait_for
from tests.engine.scheduling import Bench


class Ticking(Standby):
    """Each look at the clock is a second later: a unit of work takes one, and so does what is done in a rest."""

    def __init__(self, share: float) -> None:
        ticks = count()
        super().__init__(share, lambda: float(next(ticks)))


def test_a_background_task_stands_back_before_each_layer_for_what_waits_and_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer takes a second here, so do a prefill and a step; a fifth of the time is the task's."""
    bench = Bench(slots=2, gap_s=1e9)
    scheduler, log = bench.scheduler, list[str]()
    scheduler._standby = Ticking(0.2)
    admit, step = scheduler._admit, scheduler._step

    def prefilled(request: QueuedRequest) -> None:
        log.append("prefill")
        admit(request)

    def stepped() -> None:
        log.append("step")
        step()

    monkeypatch.setattr(scheduler, "_admit", prefilled)
    monkeypatch.setattr(scheduler, "_step", stepped)

    def task() -> None:
        for question in QUESTIONS[:2]:
            request, _ = bench.work(question, PASSAGES[:1], max_new_tokens=100, tenant=question)
            request.cost = 1.0  # neither is so short that it would go before the other's rest
            scheduler.submit(request)
        for l in range(3):
            scheduler.pause(l)
            log.append("layer")

    scheduler.in_background(task)
    scheduler.start()
    wait_for(lambda: log.count("layer") == 3)
    scheduler.stop()
    first = ["prefill", "prefill", "step", "step", "layer"]
    assert log[: len(first) + 10] == [*first, *["step"] * 4, "layer", *["step"] * 4, "layer"]


def test_a_background_task_rests_while_a_request_is_planned_and_goes_on_when_none_is() -> None:
    bench = Bench()
    ticks = chain(range(2), repeat(2))  # time stands still in the rest: only the end of planning ends it
    bench.scheduler._standby = Standby(0.1, lambda: float(next(ticks)))
    done = threading.Event()

    def task() -> None:
        bench.scheduler.pause(0)
        done.set()

    with bench.scheduler.planning("somebody"):
        assert bench.scheduler.in_flight
        assert bench.scheduler.others_in_flight("somebody else")
        assert not bench.scheduler.others_in_flight("somebody")
        bench.scheduler.in_background(task)
        bench.scheduler.start()
        assert not done.wait(0.05)
    assert done.wait(60)
    assert not bench.scheduler.in_flight
    bench.scheduler.stop()


def test_without_requests_a_background_task_does_not_rest() -> None:
    bench = Bench()
    bench.scheduler._standby = Ticking(1e-9)
    done = threading.Event()

    def task() -> None:
        for l in range(100):
            bench.scheduler.pause(l)
        done.set()

    bench.scheduler.in_background(task)
    bench.scheduler.start()
    assert done.wait(60)
    bench.scheduler.stop()


def test_what_rests_is_left_undone_when_the_server_stops() -> None:
    bench = Bench()
    ticks = chain(range(2), repeat(2))
    bench.scheduler._standby = Standby(0.1, lambda: float(next(ticks)))
    begun, done = threading.Event(), threading.Event()

    def task() -> None:
        begun.set()
        bench.scheduler.pause(0)
        done.set()

    with bench.scheduler.planning("somebody"):
        bench.scheduler.in_background(task)
        bench.scheduler.start()
        begun.wait()
        bench.scheduler.stop()
    assert not done.is_set()


def test_whose_requests_are_in_flight() -> None:
    bench = Bench(slots=1)
    scheduler = bench.scheduler
    assert not scheduler.in_flight
    for tenant in ("a", "b"):
        bench.submit(QUESTIONS[0], PASSAGES[:1], tenant=tenant, max_new_tokens=200)
        assert scheduler.in_flight
        assert scheduler.others_in_flight("c")
        assert scheduler.others_in_flight("a") == (tenant == "b")
    scheduler.start()
    wait_for(lambda: scheduler.load[0] == 1)  # a's runs, b's waits
    assert scheduler.others_in_flight("a")
    assert scheduler.others_in_flight("b")
    bench.wait_idle()
    assert not scheduler.in_flight
    assert not scheduler.others_in_flight("c")
    scheduler.stop()
