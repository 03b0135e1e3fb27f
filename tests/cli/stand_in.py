"""A random reader under the bundled one's name, for commands of which not what the reader says is tested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from blendserve.config import ReaderConfig
from blendserve.models import loader
from blendserve.models.adapter import Adapter
from blendserve.models.loader import BUNDLED, DTYPES, Reader, Say, fingerprint
from blendserve.models.toy import toy_reader

CONTEXT = 8192  # the bundled reader's
WHERE = ("blendserve.engine.engine.load_reader", "blendserve.models.loader.load_reader")
_load_reader = loader.load_reader


def load(config: ReaderConfig, say: Say = lambda _: None) -> Reader:
    """`load_reader`, but for the bundled reader."""
    return made(config.model, config.dtype) if config.model in BUNDLED else _load_reader(config, say)


@cache
def made(name: str, dtype: str) -> Reader:
    toy = toy_reader(CONTEXT)
    model = toy.adapter.model.to(DTYPES.get(dtype, torch.float32))
    return replace(toy, name=name, adapter=Adapter(model), fingerprint=fingerprint(model))


def stand_in(put: Callable[[str, object], None]) -> None:
    """Wherever a command loads a reader; put(dotted name, value)."""
    for name in WHERE:
        put(name, load)
