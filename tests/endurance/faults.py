"""What a shared store's server can do to requests: it may cost time, never an answer.

    python -m tests.endurance.faults --requests 100

A Valkey server behind a proxy. Each fault lasts for some requests over chunks drawn from a pool. An answer is right if
its logits are, to the bit, those of a local store that holds the very chunks that were found: anything else that is
served is seen. Then the fault ends, and the same store, not opened again, has to find chunks again.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.support.proxy import LinkConditions, Proxy
from benchmarks.support.valkey import Server
from blendserve.blend.blender import Blender, Prefilled
from blendserve.config import BlendConfig, ValkeyConfig
from blendserve.core import Chunk, Prompt, run
from blendserve.errors import StoreError
from blendserve.kv import ChunkKV
from blendserve.store import ChunkKey, ChunkRecord, KVStore, MemoryStore, read_record
from blendserve.store.codecs.raw import Raw
from blendserve.store.valkey import ValkeyStore
from blendserve.store.valkey_client import Client, library
from blendserve.store.valkey_layout import CHUNK, HEADER
from blendserve.store.view import decode
from tests.endurance.driver import Promises, Workload, main, none
from tests.support.forked import process
from tests.support.toy import toy_model
from tests.support.waiting import eventually

HUNG_S = 60.0  # a request that lasts so long counts as hung
SLOW_BYTES_PER_S = 100_000
CLOSE_AFTER = 20_000  # bytes: in the middle of the first record
CHUNKS, POOL = 3, 6  # of a prompt; that prompts are drawn from
PREFIX, SUFFIX, CHUNK_TOKENS = 12, 12, 40
ROOM = 1 << 40
KILLS, KILL_S = 8, 0.05  # writers that are killed, and the longest that each may write


@dataclass(slots=True)
class FaultResult:
    """The requests of one fault."""

    found: int = 0  # chunks
    looked_for: int = 0
    wrong: int = 0  # answers
    longest_s: float = 0.0  # request
    reasons: set[str] = field(default_factory=set)  # why stored chunks were not used
    recovery_s: float = 0.0  # from the end of the fault to the next chunk found


class FaultFixture(contextlib.ExitStack):
    """A server, a link to it, the store over it, and a toy model that answers."""

    def __init__(self, deadline_s: float, seed: int = 0) -> None:
        """deadline_s: of a request for the server."""
        super().__init__()
        self._model, self._deadline_s, self.dice = toy_model(), deadline_s, random.Random(seed)
        self._prefix, self._suffix, *self.pool = (
            tuple(self.dice.choices(range(3, 40_000), k=size))
            for size in (PREFIX, SUFFIX, *[CHUNK_TOKENS] * POOL)
        )
        self.truth = self._blender(MemoryStore(ROOM))
        self.truth.writer.precompute(self.pool)
        self.server = self.enter_context(Server())
        self.link = self.enter_context(Proxy(self.server.port, seed))
        self.store = self.connect(deadline_s)
        self.callback(lambda: self.store.close())

    def connect(self, deadline_s: float) -> ValkeyStore:
        return ValkeyStore(ValkeyConfig(url=self.link.url, deadline_s=deadline_s), ROOM)

    def open(self) -> None:
        """A new store over a server that has the pool and nothing else."""
        self.store.close()
        self.store = self.connect(self._deadline_s)
        self._shared = self._blender(self.store)
        self.direct().flushall()
        with self.connect(HUNG_S) as patient:
            self._shared.over(patient, "").writer.precompute(self.pool)

    def direct(self) -> Client:
        """A client that goes past the link."""
        return library().Valkey(port=self.server.port)

    def ask(self, result: FaultResult) -> int:
        """One request, checked, and its missing chunks written back as an engine does -> chunks found."""
        chunks = tuple(map(Chunk, self.dice.sample(self.pool, CHUNKS)))
        prompt, blend = Prompt(self._prefix, chunks, self._suffix), BlendConfig(method="blend")
        began = time.monotonic()
        done = self._shared.run(prompt, blend)
        result.longest_s = max(result.longest_s, time.monotonic() - began)
        result.found += done.report.chunks_hit
        result.looked_for += CHUNKS
        expected = self._with_what_was_found(prompt, done).run(prompt, blend)
        result.wrong += not torch.equal(done.result.logits, expected.result.logits)
        result.reasons |= {unusable["kind"] for unusable in done.report.unusable}
        with contextlib.suppress(StoreError):
            run(self._shared.writer.write_back(done.missing))
        return int(done.report.chunks_hit)

    def _with_what_was_found(self, prompt: Prompt, done: Prefilled) -> Blender:
        """Over a local store of these chunks alone: its logits have to be the same, to the bit."""
        local, missing = self.truth.over(MemoryStore(ROOM), ""), {chunk.ids for chunk in done.missing}
        for ids in {chunk.ids for chunk in prompt.chunks} - missing:
            local.store.put(key := self.truth.key(ids), self.record(key))
        return local

    def record(self, key: ChunkKey) -> ChunkRecord:
        """As it was computed."""
        record = read_record(self.truth.store, key)
        assert record is not None
        return record

    def _blender(self, store: KVStore) -> Blender:
        return Blender(self._model.decoder, self._model.fingerprint, store, self._prefix, self._prefix)


Fault = Callable[[FaultFixture], object]


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


def _kill_writers(fixture: FaultFixture) -> None:
    """Processes that write the pool again and again, each killed by SIGKILL at a random moment."""
    keys = map(fixture.truth.key, fixture.pool)
    chunks = {key: decode(fixture.record(key)) for key in keys}
    for _ in range(KILLS):
        with process(_write, fixture.link.url, chunks) as (running, line):
            line.recv()
            time.sleep(KILL_S * fixture.dice.random())  # allow: the moment of a real kill
            running.kill()


def _write(line: Connection, url: str, chunks: Mapping[ChunkKey, ChunkKV]) -> None:
    """A writer's process."""
    records = {key: ChunkRecord.encode(key, kv, Raw()) for key, kv in chunks.items()}
    with ValkeyStore(ValkeyConfig(url=url, deadline_s=HUNG_S), ROOM) as store:
        line.send("begins")
        while True:
            for key, record in records.items():
                store.delete([key])
                store.put(key, record)


def _nothing(fixture: FaultFixture) -> None: ...


def _link(**conditions: Any) -> tuple[Fault, Fault]:
    def begin(fixture: FaultFixture) -> None:
        fixture.link.conditions = LinkConditions(**conditions)

    return begin, lambda fixture: fixture.link.reset()


FAULTS: dict[str, tuple[Fault, Fault]] = {  # how each begins and ends
    "none": (_nothing, _nothing),
    "killed": (lambda fixture: fixture.server.kill(), lambda fixture: fixture.server.start()),
    "hung": (lambda fixture: fixture.server.hang(), lambda fixture: fixture.server.resume()),
    "slow": _link(bytes_per_s=SLOW_BYTES_PER_S),
    "full": (_full, lambda fixture: fixture.direct().config_set("maxmemory", "0")),
    "restarted empty": (lambda fixture: fixture.server.restart(), _nothing),
    "damaged where stored": (_damage, _nothing),
    "damaged on the way": _link(corrupt=True),
    "another chunk's bytes": (_exchange, _nothing),
    "cut within a record": _link(close_after=CLOSE_AFTER),
    "writers killed": (_kill_writers, _nothing),
}


def run_fault(fixture: FaultFixture, name: str, requests: int) -> FaultResult:
    """Requests under a fault, and then until chunks are found again. Raises AssertionError if they never are."""
    result, after, (begin, end) = FaultResult(), FaultResult(), FAULTS[name]
    fixture.open()
    begin(fixture)
    for _ in range(requests):
        fixture.ask(result)
    end(fixture)
    ended = time.monotonic()
    eventually(lambda: fixture.ask(after))
    result.recovery_s = time.monotonic() - ended
    result.wrong += after.wrong
    return result


def faults(requests: int, kinds: str, seed: int) -> Workload:
    """Each part is a fault. kinds: of faults, separated by commas; all if empty."""
    names, results = kinds.split(",") if kinds else list(FAULTS), dict[str, FaultResult]()
    with FaultFixture(deadline_s=0.5, seed=seed) as fixture:
        for n, name in enumerate(names):
            if (yield n, len(names)):
                break
            results[name] = run_fault(fixture, name, requests)
    return {
        "wrong": sum(result.wrong for result in results.values()),
        "longest_s": max((result.longest_s for result in results.values()), default=0.0),
        "faults": {n: {**asdict(result), "reasons": sorted(result.reasons)} for n, result in results.items()},
    }


PROMISES: Promises = {**none("wrong"), "no request hangs": lambda found: found["longest_s"] < HUNG_S}

if __name__ == "__main__":
    sys.exit(main(faults, PROMISES, requests=100, kinds="", seed=0))
