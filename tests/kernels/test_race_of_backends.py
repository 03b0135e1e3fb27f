"""Operations whose backends race: who serves, from when on, and for whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve.kernels import ops, race, race_times, reference, samples, team, verify
from blendserve.kernels.operation import Backend, Operation, Racing, Row
from blendserve.kernels.race import Times
from blendserve.kernels.rows import plan_rows
from blendserve.kernels.types import AttentionSpec
from tests.support.files import own_cache
from tests.kernels.cpu.test_attend import threads

ASKED: list[list[str]] = []  # who was raced, a list each time


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Times]]:
    """Races are on, and their outcome is said here: the last table, as often as it is asked for."""
    own_cache(tmp_path, monkeypatch)
    said: list[Times] = []
    monkeypatch.setenv(race.SWITCH, "1")
    monkeypatch.delenv(verify.SWITCH, raising=False)
    monkeypatch.setattr("blendserve.kernels.operation._unsettled", set())

    def measured(runs: Any, ours: Any) -> Times | None:
        for works in runs.values():
            for work in works:
                work()
        ASKED.append(list(runs))
        return said[-1] if said else None

    ASKED.clear()
    monkeypatch.setattr(race, "measure", measured)
    yield said
    for operation in ops.RACED:
        operation.forget()


def toy() -> Operation[..., str]:
    def size(x: torch.Tensor) -> Any:
        return "wide" if len(x) > 4 else None if len(x) == 4 else "narrow"

    def fits(x: torch.Tensor) -> bool:
        return x.stride(0) == 1

    return Operation(
        Backend("tiles", lambda x: "tiles", fits, lambda x: "no tiles", is_ours=True),
        Backend("vectors", lambda x: "vectors", fits, is_ours=True),
        Backend("plain", lambda x: "plain"),
        racing=Racing("toy", size, lambda x: [[(x.contiguous(),)] * 2]),
    )


def test_calls_go_to_the_winner_of_their_class(raced: list[Times]) -> None:
    operation = toy()
    raced.append({"vectors": [1.0], "plain": [0.5]})  # two calls
    assert operation(torch.zeros(8)) == "plain"
    raced.append({"vectors": [1.0], "plain": [2.0]})
    assert operation(torch.zeros(9)) == "plain", "a class is settled once"
    assert operation(torch.zeros(3)) == "vectors"
    assert operation(torch.zeros(6)[::2]) == "plain", "whom the winner does not fit"
    assert operation(torch.zeros(4)) == "vectors", "where nothing is measured, the table's order"
    assert ASKED == [["vectors", "plain"]] * 2
    assert operation.measured()[:3] == [
        Row("toy", "wide", "tiles", (), "no tiles"),
        Row("toy", "wide", "vectors", (500.0,), "slower than torch's own"),
        Row("toy", "wide", "plain", (250.0,), "serves"),
    ]


def test_a_race_has_all_threads_however_few_the_pass_has_that_asks(
    raced: list[Times], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[int]()

    def measured(runs: Any, ours: Any) -> None:
        found.append(team.size())

    monkeypatch.setattr(race, "measure", measured)
    with threads(3), team.at_most(1):
        toy()(torch.zeros(1))
        assert team.size() == 1
    assert found == [3]


def test_the_next_process_goes_by_what_the_first_found(raced: list[Times]) -> None:
    raced.append({"vectors": [2.0], "plain": [1.0]})
    assert toy()(torch.zeros(8)) == "plain"
    raced.append({"vectors": [1.0], "plain": [2.0]})
    assert toy()(torch.zeros(8)) == "plain"
    assert len(ASKED) == 1


def test_whom_a_kept_time_beats_is_proven_only_when_it_is_to_serve(raced: list[Times]) -> None:
    """Where ours won; where another did, that one is proven in every process."""
    proven: list[str] = []

    def prove(x: torch.Tensor) -> str:
        proven.append("torch's")
        return ""

    def made() -> Operation[..., str]:
        operation = toy()
        *ours, plain = operation.backends
        other = Backend("torch's", lambda x: "torch's", trouble=prove)
        operation.backends = (*ours, other, plain)
        return operation

    raced.append({"vectors": [1.0], "torch's": [2.0], "plain": [3.0]})
    assert made()(torch.zeros(8)) == "vectors"
    assert proven == ["torch's"]
    again = made()
    assert again(torch.zeros(8)) == "vectors"
    assert proven == ["torch's"]
    assert again(torch.zeros(12)[::2]) == "torch's"
    assert proven == ["torch's"] * 2
    raced.append({"vectors": [3.0], "torch's": [1.0], "plain": [3.0]})
    for _ in range(2):
        assert made()(torch.zeros(3)) == "torch's"
    assert proven == ["torch's"] * 4


def test_what_is_known_already_needs_no_samples(raced: list[Times]) -> None:
    raced.append({"vectors": [2.0], "plain": [1.0]})
    toy()(torch.zeros(8))
    operation = toy()
    operation._racing = replace(operation._racing, samples=lambda x: 1 / 0)  # type: ignore[type-var]
    assert operation(torch.zeros(8)) == "plain"


def test_an_odd_call_does_not_settle_for_others(raced: list[Times]) -> None:
    operation = toy()
    raced.append({"vectors": [1.0], "plain": [2.0]})
    assert operation(torch.zeros(20)[::2]) == "plain"
    assert operation(torch.zeros(8)) == "vectors"


def test_a_busy_machine_settles_nothing_and_is_asked_a_few_times_only(raced: list[Times]) -> None:
    for n in range(6):
        operation = toy()
        operation._racing = replace(operation._racing, class_of=lambda x, n=n: f"class {n}")  # type: ignore[type-var]
        assert operation(torch.zeros(8)) == "vectors"
        assert operation.measured()[2].note == "not measured: the machine was busy"
    assert len(ASKED) == 4
    raced.append({"vectors": [2.0], "plain": [1.0]})
    assert race_times.recall("toy", "class 0", ["vectors", "plain"]) is None


def test_switched_off_the_table_s_order_holds(raced: list[Times], monkeypatch: pytest.MonkeyPatch) -> None:
    raced.append({"vectors": [2.0], "plain": [1.0]})
    operation = toy()
    assert operation(torch.zeros(8)) == "plain"
    monkeypatch.setenv(race.SWITCH, "0")
    assert operation(torch.zeros(8)) == "vectors"


def attention(at: torch.Tensor, window: int | None = None) -> Any:
    q, keys = torch.randn(4, len(at), 32), torch.randn(2, int(at[-1]) + 1, 32)
    return q, keys, keys, AttentionSpec(0.2, window), plan_rows(at, 2, window)


CALLS: list[tuple[Operation[..., Any], tuple[Any, ...]]] = [
    *((ops.ATTEND, attention(at)) for at in (torch.tensor([9]), torch.arange(40), torch.arange(5, 9))),
    (ops.ATTEND, attention(torch.tensor([3, 9, 200]), window=50)),
    *(
        (ops.LINEAR, (torch.randn(rows, 64).bfloat16(), torch.randn(32, 64).bfloat16(), None))
        for rows in (1, 8, 9, 90)
    ),
    (ops.LINEAR, (torch.randn(50, 3000).bfloat16(), torch.randn(6000, 3000).bfloat16(), None)),
]


@pytest.mark.parametrize(("operation", "call"), CALLS)
@torch.inference_mode()
def test_samples_are_of_the_class_that_they_stand_for(operation: Operation[..., Any], call: Any) -> None:
    racing = operation._racing
    assert racing is not None
    before = torch.random.get_rng_state()
    shapes = racing.class_of(*call)
    assert shapes is not None
    for works in racing.samples(*call):
        for sample in works:
            found = racing.class_of(*sample)
            if operation is ops.LINEAR:  # a large layer is tried by a part of its outputs
                assert (found.depth, found.is_few) == (shapes.depth, shapes.is_few)  # type: ignore[union-attr]
            else:
                assert found == shapes
    assert torch.equal(before, torch.random.get_rng_state())


@torch.inference_mode()
def test_whoever_wins_the_result_is_the_same_to_rounding(raced: list[Times]) -> None:
    for operation, call in CALLS:
        works = operation._racing.samples(*call)  # type: ignore[union-attr]
        able = [b.name for b in operation.backends if b.serves(*works[0][0])]
        wanted = operation.backends[-1].run(*call)
        for winner in able:
            operation.forget()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(race_times, "recall", lambda *_: None)
                patch.setattr(race_times, "keep", lambda *args: args[2])
                raced.append({name: [1.0 + (name != winner)] * len(works) for name in able})
                assert operation.select_backend(*call).name == winner
                got = operation(*call)
            torch.testing.assert_close(got, wanted, rtol=2**-6, atol=0.02)


def test_torch_s_own_ways_are_always_asked() -> None:
    """Attention by SDPA and plainly, linear layers by torch; in fp32 nobody else does those."""
    names = [backend.name for backend in ops.ATTEND.backends if not backend.is_ours]
    assert names[-2:] == ["torch's SDPA", "plain torch"]
    assert ops.LINEAR.backends[-1].run is reference.linear_reference
    x = torch.randn(3, 64)
    with torch.inference_mode():
        assert samples.linear_class(x, x, None) is None
        assert [b.name for b in ops.LINEAR.backends if b.fits(x, x, None)] == ["torch"]


def test_on_a_gpu_nothing_is_raced() -> None:
    q = torch.zeros(2, 3, 64, device="meta")
    parts = q, q, q, AttentionSpec(1.0), plan_rows(torch.arange(3), 1)
    with torch.inference_mode():
        assert samples.attention_class(*parts) is None
        assert samples.linear_class(q[0].bfloat16(), q[0].bfloat16(), None) is None
