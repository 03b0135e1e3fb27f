"""What the short runs share."""

from __future__ import annotations

import json
from typing import Any

import torch

from blendserve.core import ChunkKV
from blendserve.store.codecs.base import ChunkShape, Codec


def last_line(text: str) -> dict[str, Any]:
    """The verdict that a run prints at its end."""
    result: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return result


def through(codec: Codec, kv: ChunkKV) -> ChunkKV:
    """As it comes out of the codec, where nothing is wrong."""
    decoder = codec.decoder(ChunkShape.of(kv))
    layers = [decoder.layer(l, segment) for l, segment in enumerate(codec.encode(kv))]
    return ChunkKV(*(torch.stack(part) for part in zip(*layers, strict=True)))
