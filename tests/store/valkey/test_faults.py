"""Requests outlive whatever happens to the server. No test asks how long something took: `bench faults` measures that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blendserve.bench import faults
from blendserve.bench.config import FaultsConfig
from blendserve.bench.faults import FAULTS, Scene, scene_of, suffer
from blendserve.errors import ConfigError
from blendserve.models.toy import toy_reader
from tests.store.valkey.servers import PATIENT_S, needs_server

pytestmark = needs_server
AWAY, DAMAGED = {"unreachable"}, {"corrupt"}
REASONS = {
    **dict.fromkeys(("killed", "hung", "slow", "cut within a record"), AWAY),
    **dict.fromkeys(("damaged where stored", "another chunk's bytes"), DAMAGED),
}
WAITED_OUT = {
    "hung",
    "slow",
    "damaged on the way",
    "cut within a record",
}  # the others are known at once: a busy machine may take its time
CONFIG = FaultsConfig(requests=4, chunks=3, chunk_tokens=40, pool=6, deadline_s=0.4)
PATIENT = CONFIG.model_copy(update={"deadline_s": PATIENT_S})


@pytest.fixture(scope="module")
def hasty() -> Iterator[Scene]:
    with scene_of(toy_reader(), CONFIG) as scene:
        yield scene


@pytest.fixture(scope="module")
def patient() -> Iterator[Scene]:
    with scene_of(toy_reader(), PATIENT) as scene:
        yield scene


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_no_answer_and_is_recovered_from(hasty: Scene, patient: Scene, name: str) -> None:
    outcome = suffer(hasty if name in WAITED_OUT else patient, name, CONFIG.requests)
    assert (outcome.wrong, outcome.hung) == (0, 0)
    assert len(outcome.extra) == CONFIG.requests
    assert outcome.recovery_s is not None
    assert outcome.reasons >= REASONS.get(name, set())  # what the reports say


@pytest.mark.parametrize("name", ["damaged where stored", "another chunk's bytes"])
def test_the_check_sees_what_is_served_though_it_is_damaged(
    patient: Scene, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("blendserve.store.record.xxhash.xxh3_64_intdigest", lambda *args: 0)
        assert suffer(patient, name, 3).wrong > 0


def test_every_fault_is_in_the_table() -> None:
    figures = {
        "settings": {"requests": 1, "deadline_s": 0.5},
        "faults": {name: faults._figures(faults.Outcome()) for name in FAULTS},
    }
    (_, columns, rows) = faults.tables(figures)[0]
    assert [row[0] for row in rows] == list(FAULTS)
    assert {len(row) for row in rows} == {len(columns)}


def test_a_fault_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no fault 'hanged': did you mean 'hung'"):
        faults.chosen(["slow", "hanged"])
