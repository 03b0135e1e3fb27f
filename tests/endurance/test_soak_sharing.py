"""The soak of a shared store, made short; and each of its promises can be seen to break."""

from __future__ import annotations

import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.endurance import soak_sharing
from tests.endurance.helpers import last_line
from tests.endurance.soak_sharing import figures
from tests.store.valkey.servers import needs_server


@needs_server
def test_engines_and_server_are_killed_and_no_answer_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["soak_sharing", "--requests", "50", "--engines", "2", "--json"])
    code, shown = soak_sharing.main(), capsys.readouterr()
    assert code == 0, shown
    found = last_line(shown.out)
    assert found["broken"] == []
    assert found["answers"] >= 50
    assert found["chunks_found"] > 0
    assert found["servers_killed"] + found["engines_killed"] > 0


@pytest.mark.parametrize("what", ["wrong", "hung", "failed", "books", "recovery"])
def test_a_broken_promise_is_told(what: str) -> None:
    counts = Counter({what: 1} if what in ("wrong", "hung", "failed") else {})
    trial: Any = SimpleNamespace(counts=counts, found_lately=what != "recovery", slowest=0.0)
    assert figures(trial, clean=what != "books")["broken"] == [what]
