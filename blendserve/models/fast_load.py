"""A record of a model folder in the user's cache, from which the next start loads it without transformers.

It has the tokenizer, and the configuration with transformers' defaults: the fingerprint covers these, and config.json
leaves them out. A record whose fingerprint is not that of the weights does not count: transformers loads the folder.
"""

from __future__ import annotations

import json
import logging
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import tokenizers
import torch
from safetensors.torch import load_file
from torch import Tensor

from blendserve import __version__
from blendserve.models.tokenizer import Tokenizer
from blendserve.paths import cached_file, read_cached, write_cached

log = logging.getLogger(__name__)

WEIGHTS, SHARDS = "model.safetensors", "model.safetensors.index.json"


class Configuration(SimpleNamespace):
    """A configuration by its values."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Start(NamedTuple):
    """What a start must know of a folder beside its weights."""

    config: dict[str, Any]  # with defaults
    tokenizer: Tokenizer
    end_tokens: frozenset[int]
    fingerprint: str | None  # that the weights must have; None = any


def load(folder: Path, dtype: torch.dtype) -> tuple[Start, dict[str, Tensor]] | None:
    """The folder's record and weights; None without a record, and where anything is damaged."""
    try:
        head, _, backend = read_cached(record_file(folder, dtype)).partition("\n")
        record = json.loads(head)
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(backend), **record["tokenizer"])
        ends = frozenset(record["end_tokens"])
        tensors = _weights(folder, dtype)
        if record["config"]["tie_word_embeddings"]:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        return Start(record["config"], tokenizer, ends, record["fingerprint"]), tensors
    except Exception as error:  # of JSON, safetensors or tokenizers: transformers will say what is wrong
        log.debug("no fast load: %s", error)
        return None


def save(folder: Path, dtype: torch.dtype, start: Start) -> None:
    """Write what `load` reads: a line of JSON, and the Rust tokenizer."""
    about = {name: value for name, value in vars(start.tokenizer).items() if name != "backend_tokenizer"}
    values = {**start._asdict(), "tokenizer": about, "end_tokens": sorted(start.end_tokens)}
    write_cached(
        record_file(folder, dtype),
        f"{json.dumps(values, default=str)}\n{start.tokenizer.backend_tokenizer.to_str()}",
    )


def _weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of the folder, mapped where it has this dtype already."""
    files = {WEIGHTS}
    if not (folder / WEIGHTS).is_file():
        files = set(json.loads((folder / SHARDS).read_text())["weight_map"].values())
    parts = [load_file(folder / file) for file in sorted(files)]
    return {name: x.to(dtype) if x.is_floating_point() else x for part in parts for name, x in part.items()}


def record_file(folder: Path, dtype: torch.dtype) -> Path:
    """One for each state of the model's files, dtype and versions."""
    files = [
        (p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.iterdir()) if p.is_file()
    ]
    versions = __version__, torch.__version__, version("transformers")
    return cached_file("starts", (str(folder.resolve()), files, str(dtype), versions), ".record")
