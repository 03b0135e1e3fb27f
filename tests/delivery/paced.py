"""A peer that sends each layer when a test lets it go, and a prefill that tells which layers it has reached."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

from blendserve.blend.blender import Blender
from blendserve.config import BlendConfig
from blendserve.core import Prompt
from blendserve.engine.engine import Engine
from blendserve.store import ChunkKey, KVStore, MemoryStore
from blendserve.store.base import TimeSaved
from blendserve.store.kdn.collection import LENGTH
from blendserve.store.kdn.store import KdnStore
from blendserve.store.record import decode_header
from tests.delivery.helpers import PATIENT_S, Liar, Service, settings
from tests.engine.helpers import CONFIG, reader

BLEND = BlendConfig(method="blend")
LAYERS = reader().adapter.n_layers
HEADER = -1

Before = Callable[[ChunkKey, int, bytearray], None]  # a chunk's header or layer goes; what it raises cuts


class Paced:
    """Says what a service says, and chunks piece by piece."""

    def __init__(self, service: Service, before: Before) -> None:
        self._service, self._before = service, before
        self.asked: Counter[ChunkKey] = Counter()

    def __call__(self, line: socket.socket, path: str) -> None:
        body = self._service.http.get(self._service.url + path).content
        line.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        asked = keys_asked(path)
        self.asked.update(asked)
        if not asked:
            line.sendall(body)
        for key, l, n in parts_of(asked, body):
            part, body = bytearray(body[:n]), body[n:]
            self._before(key, l, part)
            line.sendall(part)


def keys_asked(path: str) -> list[ChunkKey]:
    """Of one chunk, of several in step, or of none."""
    split = urlsplit(path)
    if "/chunks/" in split.path:
        return [bytes.fromhex(split.path.rpartition("/")[2])]
    chunks = parse_qs(split.query).get("chunks", [""])[0] if split.path.endswith("/layers") else ""
    return [bytes.fromhex(one.partition(":")[0]) for one in chunks.split(",") if one]


def parts_of(keys: list[ChunkKey], body: bytes) -> Iterator[tuple[ChunkKey, int, int]]:
    """What a body consists of, in order: whose, which layer, and bytes of it."""
    lengths = []
    for key in keys:
        (length,) = LENGTH.unpack_from(body)
        end = LENGTH.size + length
        lengths.append(decode_header(key, body[LENGTH.size : end]).lengths)
        yield key, HEADER, end
        body = body[end:]
    for l, layer in enumerate(zip(*lengths, strict=True)):
        for key, n in zip(keys, layer, strict=True):
            yield key, l, n


@contextmanager
def delivered(
    service: Service,
    before: Before,
    rule: Any = None,
    early: bool = True,
    saved: TimeSaved | None = None,
) -> Iterator[tuple[KdnStore, Paced]]:
    paced = Paced(service, before)
    with Liar(paced) as peer, KdnStore(settings(peer.url), rule, early=early, saved=saved) as store:
        list(store.keys())  # description and directory are here
        yield store, paced


def blender(store: KVStore, before_layer: Callable[[int], None] = lambda l: None) -> Blender:
    return Engine(CONFIG, reader(), store).blender.like(store, "", before_layer)


def local(prompt: Prompt, n: int) -> tuple[MemoryStore, Blender]:
    """A store with the first n chunks, and the prefix."""
    store = MemoryStore(2**30)
    of = blender(store)
    of.precompute([chunk.ids for chunk in prompt.chunks[:n]])
    return store, of


def late_key(prompt: Prompt) -> ChunkKey:
    """Of the last chunk."""
    return last_two(prompt)[1]


def last_two(prompt: Prompt) -> list[ChunkKey]:
    """Of the chunks that are under way when nothing is left to begin."""
    return [blender(MemoryStore(1)).key(chunk.ids) for chunk in prompt.chunks[-2:]]


def whole(service: Service, prompt: Prompt, blend: BlendConfig = BLEND, rule: Any = None) -> torch.Tensor:
    """Of a prefill that begins when all chunks are here."""
    with KdnStore(settings(service.url), rule, early=False) as store:
        return blender(store).run(prompt, blend).prefilled.logits


class Steps:
    """A prefill's layers as they are reached."""

    def __init__(self) -> None:
        self._reached = [threading.Event() for _ in range(LAYERS)]

    def __call__(self, l: int) -> None:
        self._reached[l].set()

    def reached(self, l: int) -> bool:
        return self._reached[l].wait(PATIENT_S / 2)
