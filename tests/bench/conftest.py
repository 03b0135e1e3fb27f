"""A reader small enough for every bench to run in a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blendserve.config import ReaderConfig
from blendserve.models.loader import Reader, load_reader

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 512,
}


def write_shape(folder: Path, **changes: Any) -> str:
    """Write a folder with nothing but a config.json, and return what --model takes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SHAPE, **changes}))
    return f"random:{folder}"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shape(tmp_path_factory.mktemp("shape"))


@pytest.fixture(scope="session")
def reader(tiny: str) -> Reader:
    return load_reader(ReaderConfig(model=tiny, dtype="float32"))
