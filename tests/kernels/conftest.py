"""Where kept times go while a test runs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "blendserve" / "kernels"
