"""Where figures come from: versions, machine, and the reader as it ran."""

from __future__ import annotations

from typing import Any

from blendserve.bench.config import BenchConfig
from blendserve.bench.figures import Figures
from blendserve.models.loader import Reader
from blendserve.provenance import machine, versions


def where(config: BenchConfig, reader: Reader | None = None) -> Figures:
    """Settings, versions and machine, as the JSON line begins; `reader` where one was loaded."""
    settings = config.model_dump(mode="json")
    known: Figures = {"settings": settings, "versions": versions(), "machine": machine()}
    return known if reader is None else {**known, "reader": _about(reader)}


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
