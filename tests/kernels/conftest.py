"""Where kept times go while a test runs, and the marks of tests for a GPU and for the night."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: too slow for every push")
    config.addinivalue_line("markers", "gpu: runs on a CUDA device: TRITON_INTERPRET=0 pytest -m gpu")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "blendserve" / "kernels"
