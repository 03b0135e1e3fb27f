"""Where figures come from: versions, machine, and the reader as it ran."""

from __future__ import annotations

import os
from typing import Any

import torch

from blendserve.bench.figures import Figures
from blendserve.bench.settings import BenchConfig
from blendserve.evaluate.folder import environment
from blendserve.models.loader import Reader


def where(config: BenchConfig, reader: Reader | None = None) -> Figures:
    """Settings, versions and machine, as the JSON line begins; `reader` where one was loaded."""
    known: Figures = {"settings": config.model_dump(mode="json"), **_surroundings()}
    return known if reader is None else {**known, "reader": _about(reader)}


def _surroundings() -> Figures:
    facts = environment()
    machine = {"cpu": facts.pop("machine"), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return {"versions": facts, "machine": machine}


def _about(reader: Reader) -> Figures:
    adapter, config = reader.adapter, reader.adapter.model.config
    return {
        "model": reader.name,
        "device": str(adapter.device),
        "dtype": str(adapter.dtype).removeprefix("torch."),
        "attention": _attention(config),
        "layers": adapter.n_layers,
        "kv_bytes_per_token": adapter.kv_bytes_per_token,
    }


def _attention(config: Any) -> str:
    """What transformers attends with."""
    return str(config._attn_implementation)
