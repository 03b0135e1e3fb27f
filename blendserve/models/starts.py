"""What is kept of a model folder, so that its next start imports no transformers: configuration and tokenizer.

transformers' configuration has defaults that the folder's config.json leaves out, and they are part of the fingerprint.
A start whose fingerprint is not the kept one is none: transformers loads the folder again.
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
ABOUT, TOKENIZER = "about.json", "tokenizer.json"


class Configuration(SimpleNamespace):
    """A configuration by its values."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Start(NamedTuple):
    """What is kept of a folder, and its weights."""

    config: Configuration
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer
    end_tokens: frozenset[int]
    fingerprint: str | None  # that it must have; None = not known


def recall(folder: Path, dtype: torch.dtype) -> Start | None:
    """The folder's start; None where nothing is kept of it, and where anything is damaged."""
    kept = _kept(folder, dtype)
    try:
        about = json.loads((kept / ABOUT).read_text("utf-8"))
        config = Configuration(**about["config"])
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_file(str(kept / TOKENIZER)), about["tokenizer"])
        tensors = _weights(folder, dtype)
        if config.tie_word_embeddings:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        return Start(config, tensors, tokenizer, frozenset(about["end_tokens"]), about["fingerprint"])
    except Exception as error:  # of JSON, safetensors or tokenizers: transformers will say what is wrong
        log.debug("no kept start: %s", error)
        return None


def keep(
    folder: Path,
    dtype: torch.dtype,
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    end_tokens: frozenset[int],
    fingerprint: str | None = None,
) -> None:
    """Write what `recall` reads."""
    kept = _kept(folder, dtype)
    about = {
        "config": config,
        "tokenizer": tokenizer.about,
        "fingerprint": fingerprint,
        "end_tokens": sorted(end_tokens),
    }
    kept.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=kept.parent))
    try:
        tokenizer.backend_tokenizer.save(str(scratch / TOKENIZER))
        (scratch / ABOUT).write_text(json.dumps(about, default=str), "utf-8")
        shutil.rmtree(kept, ignore_errors=True)
        with suppress(OSError):  # another process was first
            scratch.rename(kept)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of the folder, mapped where it is of this dtype already."""
    names = {WEIGHTS}
    if not (folder / WEIGHTS).is_file():
        names = set(json.loads((folder / SHARDS).read_text())["weight_map"].values())
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for file in sorted(names)
        for name, tensor in load_file(folder / file).items()
    }


def _kept(folder: Path, dtype: torch.dtype) -> Path:
    """A folder for each state of the model's files, dtype and versions."""
    files = [
        (p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.iterdir()) if p.is_file()
    ]
    versions = __version__, torch.__version__, version("transformers")
    about = repr((str(folder.resolve()), files, str(dtype), versions))
    return cache_folder() / "starts" / hashlib.blake2b(about.encode(), digest_size=12).hexdigest()
