"""Files of a test's own, without what is large and only read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from blendserve.paths import cache_folder


def own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's cache, in which the kernels are those that this machine has compiled already.

    Compiling them again takes half a minute, and proves nothing about what else is kept.
    """
    compiled = cache_folder() / "native"
    compiled.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    cache_folder().mkdir(parents=True, exist_ok=True)
    (cache_folder() / "native").symlink_to(compiled)


def copied_model(folder: Path, copy: Path) -> Path:
    """A model's folder to change files in; its weights are a link, and must not be written to."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    for weights in folder.rglob("*.safetensors"):
        (copy / weights.relative_to(folder)).symlink_to(weights.resolve())
    return copy
