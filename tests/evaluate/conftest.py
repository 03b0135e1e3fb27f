"""Runs whose plots nobody looks at."""

from __future__ import annotations

import pytest


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than a run of a tiny reader does; test_report.py and test_coded.py look at what is drawn."""
    monkeypatch.setattr("blendserve.evaluate.plots._image", lambda figure, format: b"<svg/>")
