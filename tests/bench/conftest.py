"""A model small enough for every bench to run in a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blendserve.bench.suite import TINY_MODEL
from blendserve.config import ModelConfig
from blendserve.models.loader import LoadedModel, load_model


def write_shape(folder: Path, **changes: Any) -> str:
    """Write a folder with nothing but a config.json, and return what --model takes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY_MODEL, **changes}))
    return f"random:{folder}"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shape(tmp_path_factory.mktemp("shape"))


@pytest.fixture(scope="session")
def model(tiny: str) -> LoadedModel:
    return load_model(ModelConfig(name=tiny, dtype="float32"))
