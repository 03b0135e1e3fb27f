"""The scheduler on a manual clock: any history keeps its promises, and those histories that random ones seldom reach."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

from blendserve.engine.scheduler import BACKGROUND_EVERY, MAX_BACKGROUND
from tests.support.scheduler import SchedulerMachine, opened
from tests.support.scheduler_requests import REFINING, Question
from tests.support.waiting import eventually

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=30)


def test_retry_after_is_the_expected_wait() -> None:
    machine, start = opened(slots=2, decode_s=10.0), 0.0
    for _ in range(20):
        start = machine.clock.now
        machine.submit()
        machine.run()
    each = machine.clock.now - start
    for n in range(1, 40):
        assert machine.scheduler.retry_after("a") == pytest.approx(min(60.0, n * each / 2), abs=1)
        machine.submit()
    assert machine.scheduler.retry_after("a") == 60
    assert machine.scheduler.retry_after("b") == pytest.approx(each / 2, abs=1)


PREEMPTING = [(5, "c", 4.0, 0, 16.0), (1, "c", 2.0, 3, 0.0), (1, "c", 2.0, 4, 2.0), (1, "c", 5.0, 0, 0.0)]


@pytest.mark.parametrize(("n", "tenant", "cost", "layer", "total"), [*PREEMPTING, (1, "a", 1.0, 0, 0.0)])
def test_short_requests_of_others_preempt_within_the_cost_and_the_rest_of_a_pass_of_four_layers(
    n: int, tenant: str, cost: float, layer: int, total: float
) -> None:
    machine = opened(slots=4)
    long: Any = machine.submit(Question((0, 1, 2)), "a", 16.0)
    machine.step_until(lambda: bool(long.request.layer == layer))
    for _ in range(n):
        machine.submit(Question((3,), "reuse", 1), tenant, cost)
    machine.step()
    machine.step_until(lambda: long.request.layer == 4 or long.state == "runs")
    assert long.preempted_cost == total


def test_the_last_slot_is_kept_for_a_tenant_without_one() -> None:
    machine = opened(slots=2)
    done: Any = machine.submit(Question((0,), max_new_tokens=1), "b")  # from now on there are two tenants
    machine.step_until(lambda: done.state == "ended")
    requests: list[Any] = [machine.submit(Question((2, 3), max_new_tokens=20)) for _ in range(2)]
    one, two = requests
    machine.step_until(lambda: one.state == "runs")
    machine.step()
    other: Any = machine.submit(Question((0,), max_new_tokens=20), "b")
    machine.step_until(lambda: other.state == "runs")
    assert (one.state, two.state) == ("runs", "waits")


def test_the_last_slot_is_used_again_when_the_other_tenant_is_long_gone() -> None:
    machine = opened(slots=2)
    for tenant in "cba":  # and more tenants than are remembered
        done: Any = machine.submit(Question((0,), max_new_tokens=1), tenant)
    machine.step_until(lambda: done.state == "ended")
    machine.time_passes(100.0)
    requests: list[Any] = [machine.submit(Question((2, 3), max_new_tokens=20)) for _ in range(2)]
    machine.step_until(lambda: [sent.state for sent in requests] == ["runs", "runs"])


def test_one_tenant_alone_has_all_slots_and_kv_kept_for_a_cancelled_request_is_freed() -> None:
    machine = opened(slots=3)
    requests: list[Any] = [machine.submit(Question((2, 3), max_new_tokens=20)) for _ in range(4)]
    machine.step_until(lambda: [sent.state for sent in requests] == [*["runs"] * 3, "waits"])
    assert machine.fetcher.copies.shared.n_bytes > 0
    machine.cancel(requests[3])
    assert machine.fetcher.copies.shared.n_bytes == 0


@pytest.mark.parametrize("ends", [True, False])
def test_running_requests_decode_while_another_is_refined_and_it_can_be_cancelled(ends: bool) -> None:
    machine = opened(slots=2)
    running: Any = machine.submit(Question((2, 3), max_new_tokens=40))
    machine.step_until(lambda: bool(running.state == "runs"))
    other: Any = machine.submit(Question((1, 2, 3), refine=1.0), cancel_at=None if ends else REFINING + 2)
    machine.step_until(lambda: "refine" in machine.log)
    n_decoded = machine.log.count("decode")
    machine.step_until(lambda: other.state != "prefills")
    n_layers = 4 if ends else 2  # that were run
    assert machine.log.count("decode") - n_decoded >= n_layers
    assert other.state == ("runs" if ends else "ended")
    machine.step_until(lambda: bool(other.state == "ended"))
    machine.step()
    assert machine.scheduler.load == (0, 1)
    machine.run()


def test_an_answer_of_one_token_is_not_refined() -> None:
    machine = opened()
    for n in (1, 2):
        machine.submit(Question((1, 2, 3), refine=1.0, max_new_tokens=n))
        machine.run()
        assert machine.log.count("refine") == n - 1


def test_a_task_is_run_after_so_many_requests_however_many_wait() -> None:
    machine = opened(slots=1, background_share=1.0)
    for _ in range(3):
        machine.in_background(1)
    for _ in range(3 * BACKGROUND_EVERY):
        machine.submit(Question((2, 3), max_new_tokens=1))
    machine.run()
    assert machine.log == [*["prefill"] * BACKGROUND_EVERY, "layer"] * 3


def test_a_tenant_has_so_many_tasks_at_most() -> None:
    scheduler = opened().scheduler
    accepted = [scheduler.submit_background((_ for _ in ()), t) for t in [*"a" * (MAX_BACKGROUND + 1), "b"]]
    assert accepted == [*[True] * MAX_BACKGROUND, False, True]


@pytest.mark.parametrize("stops", [True, False])
def test_a_task_rests_while_a_request_is_planned_and_ends_with_the_scheduler(stops: bool) -> None:
    machine = opened(background_share=0.1)
    with machine.scheduler.preparing("a"):
        assert [machine.scheduler.has_other_tenants(t) for t in "ab"] == [False, True]
        machine.in_background(2)
        machine.scheduler.start()
        eventually(lambda: machine.log)
        if stops:
            machine.scheduler.stop()
        assert machine.log == ["layer"]
    if not stops:
        eventually(lambda: machine.log == ["layer"] * 2)
        machine.drain(stops=True)


def test_idle_tasks_rest_while_a_request_is_prepared() -> None:
    machine = opened()
    machine.when_idle(layers=3)
    machine.step()
    with machine.scheduler.preparing("a"):
        assert not machine.scheduler.has_work
        machine.scheduler.step()
        assert machine.log == ["idle"]
    machine.run()
    assert machine.log == ["idle"] * 3
