"""What was measured, in the place of what the settings say: an index's own store, or the JSON line of `bench codec`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blendserve.config import changed
from blendserve.cost.config import CostConfig
from blendserve.errors import InputError
from blendserve.store import KVStore

STORED = "as stored"


def with_store(config: CostConfig, store: KVStore) -> CostConfig:
    """A level more, of what the store's chunks take. Raises InputError where there are none."""
    stats = store.stats()
    if not stats.tokens:
        raise InputError(
            f"the store at {stats.path} holds no chunk to measure: run `blendserve precompute` first",
            path=stats.path,
        )
    level = {"bytes_per_token": stats.bytes / stats.tokens, "decode_seconds": None}
    if stats.bytes == stats.raw_bytes:
        level["decode_seconds"] = 0.0  # uncoded
    return changed(config, levels={**_levels(config), STORED: level})


def with_bench(config: CostConfig, file: Path) -> CostConfig:
    """Levels, seconds of prefilling and tokens of a chunk as `blendserve bench codec` found them. Raises InputError."""
    try:
        figures: dict[str, Any] = json.loads(file.read_text().splitlines()[-1])
        levels = {
            word: {
                "bytes_per_token": found["bytes_per_token"],
                "decode_seconds": 1 / found["decode"]["tokens_per_second"]["median"],
            }
            for word, found in figures["codecs"].items()
        }
        settings = figures["settings"]
        tokens = settings["chunks"] * settings["chunk_tokens"] + settings["suffix_tokens"]
        prefill = figures["prefill"]["median"] / tokens
    except OSError as error:
        raise InputError(f"the file {file} cannot be read: {error.strerror}", path=file) from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise InputError(
            f"the file {file} is no output of `blendserve bench codec --json`", path=file
        ) from None
    return changed(
        config,
        levels={**_levels(config), **levels},
        prefill_seconds=prefill,
        chunk_tokens=settings["chunk_tokens"],
    )


def _levels(config: CostConfig) -> dict[str, Any]:
    return {name: level.model_dump() for name, level in config.levels.items()}
