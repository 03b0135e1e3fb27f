"""`python -m tests.endurance.faults`: what a shared store's server can do to requests. It may cost time, never an answer.

A Valkey server behind a proxy. Each fault lasts for some requests over chunks drawn from a pool. An answer is right if
its logits are, to the bit, those of a local store that holds the very chunks that were found: so anything served that is
not what was stored is seen. Then the fault ends, and the same store, not opened again, has to find chunks again. The last
line is JSON; the exit code is 1 if an answer was wrong, a request hung, or chunks were never found again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from dataclasses import asdict, dataclass, field, fields
from typing import cast

import numpy as np
import torch

from benchmarks.support.proxy import Proxy
from benchmarks.support.valkey import Server
from blendserve.bench.stores import TimedStore
from blendserve.blend.blender import Blender, Prefilled
from blendserve.config import BlendConfig, ReaderConfig, ValkeyConfig
from blendserve.core import Chunk, Prompt, TokenIds, run
from blendserve.errors import StoreError
from blendserve.models.loader import Reader, load_reader
from blendserve.store import KVStore, MemoryStore, read_record
from blendserve.store.policies import LRU
from blendserve.store.valkey import ValkeyStore
from blendserve.store.valkey_client import Client, library
from blendserve.store.valkey_layout import CHUNK, HEADER

HUNG_S = 60.0  # a request that takes so long counts as hung
RECOVERY_S = 60.0  # that finding chunks again may take
SLOW_BYTES_PER_S = 100_000
CLOSE_AFTER = 20_000  # bytes: in the middle of the first record
PREFIX, SUFFIX = 12, 12  # tokens
ROOM = 1 << 40
WARM, BASELINE = 2, 20  # requests that find nothing: not timed, and timed


@dataclass(frozen=True)
class FaultsConfig:
    """Requests over a shared store whose server fails."""

    model: str = "smollm2-135m"
    requests: int = 100  # under each fault
    chunks: int = 4  # of a prompt
    chunk_tokens: int = 64
    pool: int = 12  # chunks that prompts are drawn from
    deadline_s: float = 0.5  # for the server, per request
    kinds: str = ""  # separated by commas; all if empty
    seed: int = 0


@dataclass(slots=True)
class FaultResult:
    """What became of the requests of one fault."""

    extra: list[float] = field(default_factory=list)  # seconds above the median request that finds nothing
    waited: list[float] = field(default_factory=list)  # seconds of a request until the store had answered
    alone: list[float] = field(default_factory=list)  # the same, of requests that find nothing
    found: int = 0  # chunks
    looked_for: int = 0
    wrong: int = 0  # answers
    hung: int = 0
    reasons: set[str] = field(default_factory=set)  # why chunks that may have been there were not used
    recovery_s: float | None = None  # from the end of the fault to the next chunk found; None = it never was


class FaultFixture:
    """A server, a link to it, the store over it, and a reader who asks."""

    def __init__(self, reader: Reader, config: FaultsConfig, server: Server, link: Proxy) -> None:
        self.server, self.link = server, link
        self._reader, self._count = reader, config.chunks
        self._random = random.Random(config.seed)
        sizes = [PREFIX, SUFFIX, *[config.chunk_tokens] * config.pool]
        self._prefix, self._suffix, *self._pool = _some_ids(reader, sizes, config.seed)
        self._settings = ValkeyConfig(url=link.url, deadline_s=config.deadline_s)
        self._truth = self._blender(reader, MemoryStore(ROOM))
        self._truth.precompute(self._pool)
        self.store = ValkeyStore(self._settings, ROOM, eviction=LRU())
        self._shared = self._blender(reader, TimedStore(self.store))
        self._computing: list[float] = []
        self._asking = ThreadPoolExecutor(1)

    def open(self) -> None:
        """A store and a server without a past, filled with the pool."""
        self.store.close()
        self.store = ValkeyStore(self._settings, ROOM, eviction=LRU())
        self._shared = self._blender(self._reader, TimedStore(self.store))
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
        chosen = self._random.sample(self._pool, self._count)
        return Prompt(self._prefix, tuple(map(Chunk, chosen)), self._suffix)

    def ask(self, result: FaultResult) -> Prefilled | None:
        """One request, checked and timed, and its chunks written back as an engine does."""
        prompt, store = self.prompt(), cast(TimedStore, self._shared.store)
        before = store.seconds
        try:
            blended, seconds = self._watched(self._shared, prompt)
        except TimeoutError:
            result.hung += 1
            return None
        result.extra.append(seconds - self._median)
        result.waited.append(store.seconds - before)
        result.found += blended.report.chunks_hit
        result.looked_for += len(prompt.chunks)
        expected = self._timed(only_found(self._truth, prompt, blended), prompt)[0]
        result.wrong += not torch.equal(blended.result.logits, expected.result.logits)
        result.reasons |= {unusable.kind for unusable in blended.report.unusable}
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
        record = read_record(truth.store, key)
        assert record is not None
        local.store.put(key, record)
    return local


Fault = Callable[[FaultFixture], None]


def _full(fixture: FaultFixture) -> None:
    """Half of the chunks are gone, and no more is taken."""
    client = fixture.direct()
    names = sorted(client.scan_iter(match=CHUNK + b"*"))
    client.unlink(*names[::2])
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "1")


def _exchange(fixture: FaultFixture) -> None:
    """Under every key, the chunk of another."""
    client = fixture.direct()
    names = sorted(client.scan_iter(match=CHUNK + b"*"))
    records = [client.hgetall(name) for name in names]
    for name, record in zip(names, [*records[1:], records[0]], strict=True):
        client.hset(name, mapping=record)


def _damage(fixture: FaultFixture) -> None:
    """A bit of a layer of every chunk, where it is stored."""
    client = fixture.direct()
    for name in client.scan_iter(match=CHUNK + b"*"):
        layer = next(layer for layer in client.hkeys(name) if layer != HEADER)
        raw = bytearray(client.hget(name, layer))
        raw[len(raw) // 2] ^= 1
        client.hset(name, layer, bytes(raw))


def _conditions(**conditions: float) -> Fault:
    def fault(fixture: FaultFixture) -> None:
        for name, value in conditions.items():
            setattr(fixture.link.conditions, name, value)

    return fault


def _reset(fixture: FaultFixture) -> None:
    fixture.link.reset()


def _take_again(fixture: FaultFixture) -> None:
    fixture.direct().config_set("maxmemory", "0")


def _nothing(fixture: FaultFixture) -> None:
    pass


# name -> how it begins, how it ends
FAULTS: dict[str, tuple[Fault, Fault]] = {
    "none": (_nothing, _nothing),
    "killed": (lambda fixture: fixture.server.kill(), lambda fixture: fixture.server.start()),
    "hung": (lambda fixture: fixture.server.hang(), lambda fixture: fixture.server.resume()),
    "slow": (_conditions(bytes_per_s=SLOW_BYTES_PER_S), _reset),
    "full": (_full, _take_again),
    "restarted empty": (lambda fixture: fixture.server.restart(), _nothing),
    "damaged where stored": (_damage, _nothing),
    "damaged on the way": (_conditions(corrupt=True), _reset),
    "another chunk's bytes": (_exchange, _nothing),
    "cut within a record": (_conditions(close_after=CLOSE_AFTER), _reset),
}


@contextlib.contextmanager
def fixture_of(reader: Reader, config: FaultsConfig) -> Iterator[FaultFixture]:
    """A fixture whose processes end with it."""
    with Server() as server, Proxy(server.port, config.seed) as link:
        fixture = FaultFixture(reader, config, server, link)
        try:
            yield fixture
        finally:
            fixture.close()


def run_fault(fixture: FaultFixture, name: str, requests: int) -> FaultResult:
    """So many requests under a fault, and how long it takes to recover."""
    result = FaultResult()
    begin, end = FAULTS[name]
    fixture.open()
    result.alone = fixture.measure_computing()
    begin(fixture)
    for _ in range(requests):
        fixture.ask(result)
    end(fixture)
    start, after = time.monotonic(), FaultResult()
    while result.recovery_s is None and time.monotonic() - start < RECOVERY_S:
        blended = fixture.ask(after)
        if blended is not None and blended.report.chunks_hit:
            result.recovery_s = time.monotonic() - start
    result.wrong, result.hung = result.wrong + after.wrong, result.hung + after.hung
    return result


def _some_ids(reader: Reader, sizes: Sequence[int], seed: int) -> list[TokenIds]:
    """Random tokens; what they mean is nothing to KV."""
    rng, most = np.random.default_rng(seed), min(40_000, reader.adapter.vocab_size)
    return [tuple(rng.integers(3, most, size=size).tolist()) for size in sizes]


def main() -> int:
    """Every fault that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    for setting in fields(FaultsConfig):
        name = f"--{setting.name.replace('_', '-')}"
        parser.add_argument(name, type=type(setting.default), default=setting.default)
    config = FaultsConfig(**vars(parser.parse_args()))
    names = config.kinds.split(",") if config.kinds else list(FAULTS)
    results = {}
    with fixture_of(load_reader(ReaderConfig(model=config.model)), config) as fixture:
        for name in names:
            results[name] = result = run_fault(fixture, name, config.requests)
            print(
                f"{name:22} found {result.found / max(1, result.looked_for):4.0%}, wrong {result.wrong}, hung "
                f"{result.hung}, {max(result.extra):+.3f} s at most, found again after {result.recovery_s} s",
                flush=True,
            )
    print(json.dumps({name: {**asdict(r), "reasons": sorted(r.reasons)} for name, r in results.items()}))
    return int(any(r.wrong or r.hung or r.recovery_s is None for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())
