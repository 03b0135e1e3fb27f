"""Requests are answered whatever happens to the server. `python -m tests.endurance.faults` measures each fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.endurance.faults import CHUNKS, FAULTS, FaultFixture, run_fault
from tests.support.valkey import PATIENT_S, needs_server

pytestmark = needs_server
AWAY, DAMAGED = {"unreachable"}, {"corrupt"}
REASONS = {  # that the reports name
    **dict.fromkeys(("killed", "hung", "slow", "cut within a record"), AWAY),
    **dict.fromkeys(("damaged where stored", "another chunk's bytes"), DAMAGED),
}
SLOW = {
    "hung",
    "slow",
    "damaged on the way",
    "cut within a record",
}  # seen after the deadline, others at once
REQUESTS, DEADLINE_S = 4, 0.4


@pytest.fixture(scope="module")
def fixtures() -> Iterator[dict[str, FaultFixture]]:
    with (
        pytest.MonkeyPatch.context() as patch,
        FaultFixture(DEADLINE_S) as hasty,
        FaultFixture(PATIENT_S) as patient,
    ):
        patch.setattr(
            "blendserve.fetch.incoming.FAILED_S", 0.5
        )  # a damaged chunk is read again after this time
        yield {name: hasty if name in SLOW else patient for name in FAULTS}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_no_answer_and_ends(fixtures: dict[str, FaultFixture], name: str) -> None:
    result = run_fault(fixtures[name], name, REQUESTS)
    assert (result.wrong, result.hung) == (0, 0)
    assert result.looked_for == REQUESTS * CHUNKS
    assert result.recovery_s is not None
    assert result.reasons >= REASONS.get(name, set())


class FitsAll(int):
    """A checksum that differs from none."""

    def __ne__(self, other: object) -> bool:
        return False


@pytest.mark.parametrize("name", ["damaged where stored", "another chunk's bytes"])
def test_the_bench_sees_damaged_chunks_that_are_served(
    fixtures: dict[str, FaultFixture], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendserve.store.record.xxhash.xxh3_64_intdigest", lambda *args: FitsAll())
    assert run_fault(fixtures[name], name, 3).wrong > 0
