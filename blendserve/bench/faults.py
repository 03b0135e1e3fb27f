"""`blendserve bench faults`: what a shared store's server can do to requests. It may cost time, never an answer.

A real server, behind a link that can be made bad. Each fault lasts for some requests over chunks drawn from a pool. A
request's answer is right if its logits are, to the bit, those of a store in this process that holds the very chunks that
were found: so anything served that is not what was stored is seen. Afterwards the fault ends, and the same store, not
opened again, has to find chunks again.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from blendserve.bench.config import FaultsConfig
from blendserve.bench.figures import Figures, Update
from blendserve.bench.link import Link
from blendserve.bench.machine import where
from blendserve.bench.servers import Server
from blendserve.bench.tables import Table
from blendserve.bench.watched import Watched
from blendserve.bench.workload import check_room
from blendserve.blend.blender import Blender, Prefilled
from blendserve.config import BlendConfig, ValkeyConfig
from blendserve.core import Chunk, Prompt, TokenIds, run
from blendserve.errors import ConfigError, StoreError
from blendserve.models.loader import Reader, load_reader
from blendserve.registry import nearest
from blendserve.store import KVStore, MemoryStore
from blendserve.store.policies import LRU
from blendserve.store.valkey.client import Client, library
from blendserve.store.valkey.names import CHUNK, HEADER
from blendserve.store.valkey.store import ValkeyStore

Say = Callable[[str], None]

HUNG_S = 60.0  # a request that takes so long counts as hung
RECOVERY_S = 60.0  # that finding chunks again may take
SLOW_BYTES_PER_S = 100_000
CUT_AFTER = 20_000  # bytes: in the middle of the first record
PREFIX, SUFFIX = 12, 12  # tokens
ROOM = 1 << 40
WARM, BASELINE = 2, 20  # requests that find nothing: not timed, and timed


@dataclass(slots=True)
class Outcome:
    """What became of the requests of one fault."""

    extra: list[float] = field(default_factory=list)  # seconds above the median request that finds nothing
    waited: list[float] = field(default_factory=list)  # seconds of a request until the store had answered
    alone: list[float] = field(
        default_factory=list
    )  # seconds above that median of requests that find nothing
    found: int = 0  # chunks
    looked_for: int = 0
    wrong: int = 0  # answers
    hung: int = 0
    reasons: set[str] = field(default_factory=set)  # why chunks that may have been there were not used
    recovery_s: float | None = None  # from the end of the fault to the next chunk found; None = it never was


class Scene:
    """A server, a link to it, the store over it, and a reader who asks."""

    def __init__(self, reader: Reader, config: FaultsConfig, server: Server, link: Link) -> None:
        self.server, self.link = server, link
        self._adapter, self._count = reader.adapter, config.chunks
        self._dice = random.Random(config.seed)
        sizes = [PREFIX, SUFFIX, *[config.chunk_tokens] * config.pool]
        self._prefix, self._suffix, *self._pool = _some_ids(reader, sizes, config.seed)
        self._settings = ValkeyConfig(url=link.url, deadline_s=config.deadline_s)
        self._truth = self._blender(reader, MemoryStore(ROOM))
        self._truth.precompute(self._pool)
        self.store = ValkeyStore(self._settings, ROOM, eviction=LRU())
        self._shared = self._blender(reader, Watched(self.store))
        self._computing: list[float] = []
        self._asking = ThreadPoolExecutor(1)

    def open(self) -> None:
        """A store and a server without a past, filled with the pool."""
        self.store.close()
        self.store = ValkeyStore(self._settings, ROOM, eviction=LRU())
        self._shared.store = Watched(self.store)
        self.direct().flushall()
        patient = self._settings.model_copy(update={"deadline_s": HUNG_S})
        with ValkeyStore(patient, ROOM, eviction=LRU()) as filled:
            self._shared.like(filled, "").precompute(self._pool)

    def measure_computing(self) -> list[float]:
        """Requests that find nothing, in a local store: the same work, without a server -> seconds above their median."""
        empty = self._truth.like(MemoryStore(ROOM), "")
        self._computing = [self._watched(empty, self.prompt())[1] for _ in range(WARM + BASELINE)][WARM:]
        return [seconds - self._median for seconds in self._computing]

    @property
    def _median(self) -> float:
        return statistics.median(self._computing)

    def direct(self) -> Client:
        """A client that goes past the link."""
        return library().Valkey(port=self.server.port)

    def prompt(self) -> Prompt:
        chosen = self._dice.sample(self._pool, self._count)
        return Prompt(self._prefix, tuple(map(Chunk, chosen)), self._suffix)

    def ask(self, outcome: Outcome) -> Prefilled | None:
        """One request, checked and timed, and its chunks written back as an engine does."""
        prompt, store = self.prompt(), cast(Watched, self._shared.store)
        before = store.seconds
        try:
            blended, seconds = self._watched(self._shared, prompt)
        except TimeoutError:
            outcome.hung += 1
            return None
        outcome.extra.append(seconds - self._median)
        outcome.waited.append(store.seconds - before)
        outcome.found += blended.report.chunks_hit
        outcome.looked_for += len(prompt.chunks)
        expected = self._timed(only_found(self._truth, prompt, blended), prompt)[0]
        outcome.wrong += not torch.equal(blended.result.logits, expected.result.logits)
        outcome.reasons |= {unusable.kind for unusable in blended.report.unusable}
        with contextlib.suppress(StoreError):
            run(self._shared.write_back(blended.missing))
        return blended

    def close(self) -> None:
        self.store.close()

    def _watched(self, blender: Blender, prompt: Prompt) -> tuple[Prefilled, float]:
        """In a thread that always is the same, as a new one would first gather threads to compute with.

        Raises TimeoutError for a request that hangs, and leaves it its thread.
        """
        try:
            return self._asking.submit(self._timed, blender, prompt).result(HUNG_S)
        except TimeoutError:
            self._asking = ThreadPoolExecutor(1)
            raise

    def _timed(self, blender: Blender, prompt: Prompt) -> tuple[Prefilled, float]:
        start = time.perf_counter()
        done = blender.run(prompt, BlendConfig(method="blend"))
        return done, time.perf_counter() - start

    def _blender(self, reader: Reader, store: KVStore) -> Blender:
        return Blender(reader.adapter, reader.fingerprint, store, self._prefix, self._prefix)


def only_found(truth: Blender, prompt: Prompt, blended: Prefilled) -> Blender:
    """Over a local store that holds what a request found, and nothing else: its logits are to be the same, to the bit.

    truth: over a store that has all chunks of the prompt.
    """
    local = truth.like(MemoryStore(ROOM), "")
    there: list[tuple[TokenIds, TokenIds | None]] = [
        (chunk.ids, None) for chunk in prompt.chunks if chunk.ids not in blended.missing
    ]
    if () not in blended.missing:
        there.append((prompt.prefix, ()))
    for ids, context in there:
        key = truth.key(ids, context)
        coded = truth.store.coded(key)
        assert coded is not None
        local.store.put_coded(key, coded)
    return local


Fault = Callable[[Scene], None]


def _full(scene: Scene) -> None:
    """Half of the chunks are gone, and no more is taken."""
    client = scene.direct()
    names = sorted(client.scan_iter(match=CHUNK + b"*"))
    client.unlink(*names[::2])
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "1")


def _exchange(scene: Scene) -> None:
    """Under every key, the chunk of another."""
    client = scene.direct()
    names = sorted(client.scan_iter(match=CHUNK + b"*"))
    records = [client.hgetall(name) for name in names]
    for name, record in zip(names, [*records[1:], records[0]], strict=True):
        client.hset(name, mapping=record)


def _damage(scene: Scene) -> None:
    """A bit of a layer of every chunk, where it is stored."""
    client = scene.direct()
    for name in client.scan_iter(match=CHUNK + b"*"):
        layer = next(layer for layer in client.hkeys(name) if layer != HEADER)
        raw = bytearray(client.hget(name, layer))
        raw[len(raw) // 2] ^= 1
        client.hset(name, layer, bytes(raw))


def _weather(**weather: float) -> Fault:
    def fault(scene: Scene) -> None:
        for name, value in weather.items():
            setattr(scene.link.weather, name, value)

    return fault


def _heal(scene: Scene) -> None:
    scene.link.heal()


def _take_again(scene: Scene) -> None:
    scene.direct().config_set("maxmemory", "0")


def _nothing(scene: Scene) -> None:
    pass


# name -> how it begins, how it ends
FAULTS: dict[str, tuple[Fault, Fault]] = {
    "none": (_nothing, _nothing),
    "killed": (lambda scene: scene.server.kill(), lambda scene: scene.server.start()),
    "hung": (lambda scene: scene.server.hang(), lambda scene: scene.server.resume()),
    "slow": (_weather(bytes_per_s=SLOW_BYTES_PER_S), _heal),
    "full": (_full, _take_again),
    "restarted empty": (lambda scene: scene.server.restart(), _nothing),
    "damaged where stored": (_damage, _nothing),
    "damaged on the way": (_weather(flip=True), _heal),
    "another chunk's bytes": (_exchange, _nothing),
    "cut within a record": (_weather(cut_after=CUT_AFTER), _heal),
}


def measure(
    config: FaultsConfig, say: Say = lambda text: None, update: Update = lambda done, total: None
) -> Figures:
    """Everything that the bench prints. Raises ModelError, ConfigError, InputError where there is no server to start."""
    names = chosen(config.kinds)
    reader = load_reader(config.reader, say)
    tokens = PREFIX + config.chunks * config.chunk_tokens + SUFFIX
    check_room(reader, tokens, "the prompt")
    outcomes = {}
    with scene_of(reader, config) as scene:
        for done, name in enumerate(names, start=1):
            outcomes[name] = suffer(scene, name, config.requests)
            update(done, len(names))
    figures = {name: _figures(outcome) for name, outcome in outcomes.items()}
    bad = [name for name, o in outcomes.items() if o.wrong or o.hung or o.recovery_s is None]
    return {"bench": "faults", **where(config, reader), "faults": figures, "failed": bad}


def chosen(kinds: Sequence[str]) -> tuple[str, ...]:
    """The faults of these names, all for none. Raises ConfigError."""
    for kind in kinds:
        if kind not in FAULTS:
            raise ConfigError(f"there is no fault {kind!r}: {nearest(kind, list(FAULTS))}")
    return tuple(kinds) or tuple(FAULTS)


@contextlib.contextmanager
def scene_of(reader: Reader, config: FaultsConfig) -> Iterator[Scene]:
    """A scene whose processes end with it."""
    with Server() as server, Link(server.port, config.seed) as link:
        scene = Scene(reader, config, server, link)
        try:
            yield scene
        finally:
            scene.close()


def suffer(scene: Scene, name: str, requests: int) -> Outcome:
    """So many requests under a fault, and how long it takes to recover."""
    outcome = Outcome()
    begin, end = FAULTS[name]
    scene.open()
    outcome.alone = scene.measure_computing()
    begin(scene)
    for _ in range(requests):
        scene.ask(outcome)
    end(scene)
    start, after = time.monotonic(), Outcome()
    while outcome.recovery_s is None and time.monotonic() - start < RECOVERY_S:
        blended = scene.ask(after)
        if blended is not None and blended.report.chunks_hit:
            outcome.recovery_s = time.monotonic() - start
    outcome.wrong, outcome.hung = outcome.wrong + after.wrong, outcome.hung + after.hung
    return outcome


def tables(figures: Figures) -> list[Table]:
    """A row a fault."""
    settings = figures["settings"]
    columns = (
        "",
        "found",
        "why not",
        "wrong",
        "hung",
        "worst ms above computing",
        "median",
        "waited at most",
        "computing alone",
        "found again after s",
    )
    rows = []
    for name, f in figures["faults"].items():
        again = "never" if f["recovery_s"] is None else f"{f['recovery_s']:.1f}"
        above = f"{f['worst_s'] * 1e3:+.0f}", f"{f['median_s'] * 1e3:+.0f}"
        times = *above, f"{f['waited_s'] * 1e3:.0f}", f"{f['alone_s'] * 1e3:+.0f}"
        found, why = f"{f['found']:.0%}", ", ".join(f["reasons"]) or "-"
        rows.append((name, found, why, str(f["wrong"]), str(f["hung"]), *times, again))
    title = f"{settings['requests']} requests a fault, deadline {settings['deadline_s'] * 1e3:.0f} ms"
    return [(title, columns, rows)]


def _figures(outcome: Outcome) -> Figures:
    return {
        "found": outcome.found / max(1, outcome.looked_for),
        "reasons": sorted(outcome.reasons),
        "wrong": outcome.wrong,
        "hung": outcome.hung,
        "worst_s": max(outcome.extra, default=0.0),
        "median_s": statistics.median(outcome.extra or [0.0]),
        "waited_s": max(outcome.waited, default=0.0),
        "alone_s": max(outcome.alone, default=0.0),
        "recovery_s": outcome.recovery_s,
    }


def _some_ids(reader: Reader, sizes: Sequence[int], seed: int) -> list[TokenIds]:
    """Random tokens; what they mean is nothing to KV."""
    rng, most = np.random.default_rng(seed), min(40_000, reader.adapter.vocab_size)
    return [tuple(rng.integers(3, most, size=size).tolist()) for size in sizes]
