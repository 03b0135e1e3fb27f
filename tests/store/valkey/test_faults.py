"""Requests are answered whatever happens to the server. `bench faults` measures how long each fault lasts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blendserve.bench.config import FaultsConfig
from blendserve.bench.faults import FAULTS, Scene, scene_of, suffer
from blendserve.models.toy import toy_reader
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
PATIENT = CONFIG.model_copy(update={"deadline_s": PATIENT_S})


@pytest.fixture(scope="module")
def scenes() -> Iterator[dict[str, Scene]]:
    with scene_of(toy_reader(), CONFIG) as hasty, scene_of(toy_reader(), PATIENT) as patient:
        yield {name: hasty if name in SLOW else patient for name in FAULTS}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_no_answer_and_ends(scenes: dict[str, Scene], name: str) -> None:
    outcome = suffer(scenes[name], name, CONFIG.requests)
    assert (outcome.wrong, outcome.hung) == (0, 0)
    assert len(outcome.extra) == CONFIG.requests
    assert outcome.recovery_s is not None
    assert outcome.reasons >= REASONS.get(name, set())


@pytest.mark.parametrize("name", ["damaged where stored", "another chunk's bytes"])
def test_the_bench_sees_damaged_chunks_that_are_served(
    scenes: dict[str, Scene], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendserve.store.record.xxhash.xxh3_64_intdigest", lambda *args: 0)
    assert suffer(scenes[name], name, 3).wrong > 0
