"""Requests are answered whatever happens to the server. `python -m tests.endurance.faults` measures each fault."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from blendserve.models.toy import toy_reader
from tests.endurance.faults import FAULTS, FaultFixture, FaultsConfig, fixture_of, run_fault
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
CONFIG = FaultsConfig(requests=4, chunks=3, chunk_tokens=40, pool=6, deadline_s=0.4)
PATIENT = replace(CONFIG, deadline_s=PATIENT_S)


@pytest.fixture(scope="module")
def fixtures() -> Iterator[dict[str, FaultFixture]]:
    with fixture_of(toy_reader(), CONFIG) as hasty, fixture_of(toy_reader(), PATIENT) as patient:
        yield {name: hasty if name in SLOW else patient for name in FAULTS}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_no_answer_and_ends(fixtures: dict[str, FaultFixture], name: str) -> None:
    result = run_fault(fixtures[name], name, CONFIG.requests)
    assert (result.wrong, result.hung) == (0, 0)
    assert len(result.extra) == CONFIG.requests
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
