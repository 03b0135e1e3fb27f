"""A record of a model folder in the user's cache, from which the next start loads it without transformers.

It has the tokenizer, and the configuration with transformers' defaults: the fingerprint covers these, and config.json
leaves them out. A record whose fingerprint is not that of the weights does not count: transformers loads the folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
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
from blendserve.paths import cache_folder

log = logging.getLogger(__name__)

WEIGHTS, SHARDS = "model.safetensors", "model.safetensors.index.json"
RECORD, TOKENIZER = "about.json", "tokenizer.json"


class Configuration(SimpleNamespace):
    """A configuration by its values."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Loaded(NamedTuple):
    """What the record says of a folder, and the folder's weights."""

    config: Configuration
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer
    end_tokens: frozenset[int]
    fingerprint: str | None  # that the weights must have; None = any


def load(folder: Path, dtype: torch.dtype) -> Loaded | None:
    """The folder by its record; None without one, and where anything is damaged."""
    try:
        record = _record_folder(folder, dtype)
        about = json.loads((record / RECORD).read_text("utf-8"))
        config = Configuration(**about["config"])
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_file(str(record / TOKENIZER)), about["tokenizer"])
        tensors = _weights(folder, dtype)
        if config.tie_word_embeddings:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        return Loaded(config, tensors, tokenizer, frozenset(about["end_tokens"]), about["fingerprint"])
    except Exception as error:  # of JSON, safetensors or tokenizers: transformers will say what is wrong
        log.debug("no fast load: %s", error)
        return None


def save(
    folder: Path,
    dtype: torch.dtype,
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    end_tokens: frozenset[int],
    fingerprint: str | None = None,
) -> None:
    """Write what `load` reads."""
    record = _record_folder(folder, dtype)
    about = {
        "config": config,
        "tokenizer": tokenizer.about,
        "fingerprint": fingerprint,
        "end_tokens": sorted(end_tokens),
    }
    record.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=record.parent))
    try:
        tokenizer.backend_tokenizer.save(str(scratch / TOKENIZER))
        (scratch / RECORD).write_text(json.dumps(about, default=str), "utf-8")
        shutil.rmtree(record, ignore_errors=True)
        with suppress(OSError):  # another process was first
            scratch.rename(record)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of the folder, mapped where it has this dtype already."""
    files = {WEIGHTS}
    if not (folder / WEIGHTS).is_file():
        files = set(json.loads((folder / SHARDS).read_text())["weight_map"].values())
    parts = [load_file(folder / file) for file in sorted(files)]
    return {name: x.to(dtype) if x.is_floating_point() else x for part in parts for name, x in part.items()}


def _record_folder(folder: Path, dtype: torch.dtype) -> Path:
    """One for each state of the model's files, dtype and versions."""
    files = [
        (p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.iterdir()) if p.is_file()
    ]
    versions = __version__, torch.__version__, version("transformers")
    about = repr((str(folder.resolve()), files, str(dtype), versions))
    return cache_folder() / "starts" / hashlib.blake2b(about.encode(), digest_size=12).hexdigest()
