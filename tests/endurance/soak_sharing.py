"""Engine processes on one Valkey server, which is killed again and again, as they are: no answer is ever wrong or lost.

Each engine asks about random chunks of one pool, stores what was missing, and compares the logits of every answer, to the
bit, with those of a local store that holds what it found and nothing else. Meanwhile the server is killed by SIGKILL and
starts again empty, after a while or at once, and engines are killed and replaced.

    python -m tests.endurance.soak_sharing --requests 1000 --engines 4 --seed 0
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections import Counter
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from benchmarks.support.valkey import Server
from blendserve.blend.blender import Blender
from blendserve.config import BlendConfig, ValkeyConfig
from blendserve.core import Chunk, Prompt, run
from blendserve.errors import StoreError
from blendserve.models.model import DecoderModel
from blendserve.models.toy import toy_llama
from blendserve.store import MemoryStore
from blendserve.store.policies import LRU
from blendserve.store.valkey import ValkeyStore
from tests.endurance.driver import Figures, Promises, main, none
from tests.endurance.faults import only_found
from tests.support.forked import process

VOCABULARY = 500
PREFIX, SUFFIX = tuple(range(12)), tuple(range(20, 32))
POOL, ASKED, TOKENS = 24, 4, 40  # chunks; of them in a prompt; tokens of one
CAP = 1 << 30
DEADLINE_S, PATIENT_S = 0.5, 60.0  # of an engine's store; the longest that a store allows
HUNG_S = 300.0  # without a message from an engine
KILL_EVERY = 15, 45  # answers
RECOVERY_S = 60.0  # for chunks to be found after the last kill
DOWN_S = 0.0, 3.0


def engine(line: Connection, url: str, seed: int) -> None:
    """An engine's process: asks, checks and stores until it is killed; sends what to count of each answer."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    adapter, dice = DecoderModel.of(toy_llama(VOCABULARY, 512)), random.Random(0)
    pool = [tuple(dice.choices(range(VOCABULARY), k=TOKENS)) for _ in range(POOL)]
    dice = random.Random(seed)

    far, blend = ValkeyConfig(url=url, deadline_s=DEADLINE_S), BlendConfig(method="blend", ratio=0.3)
    shared = Blender(adapter, "toy", ValkeyStore(far, CAP, eviction=LRU()), PREFIX, PREFIX)
    truth = Blender(adapter, "toy", MemoryStore(CAP), PREFIX, PREFIX)
    truth.precompute(pool)
    while True:
        prompt = Prompt(PREFIX, tuple(map(Chunk, dice.sample(pool, ASKED))), SUFFIX)
        done = shared.run(prompt, blend)
        expected = only_found(truth, prompt, done).run(prompt, blend)
        right = torch.equal(done.result.logits, expected.result.logits)
        with contextlib.suppress(StoreError):
            run(shared.write_back(done.missing))
        missed = Counter(f"missed_{unusable.kind}" for unusable in done.report.unusable)
        line.send({"answers": 1, "wrong": not right, "chunks_found": done.report.chunks_hit, **missed})


class Sharing:
    """Each step is a message of an engine, and now and then a kill."""

    def __init__(self, requests: int, engines: int, seed: int) -> None:
        self.requests, self.n_engines, self._dice = requests, engines, random.Random(seed)
        names = ("answers", "wrong", "hung", "failed", "servers_killed", "engines_killed", "chunks_found")
        self.counts = Counter(dict.fromkeys(names, 0))
        self._stack, self._started, self._engines = ExitStack(), 0, dict[Connection, Any]()
        self._back_at: float | None = None  # when the server is started again
        self._next_kill = self._dice.randint(*KILL_EVERY)

    def __enter__(self) -> None:
        self.server = self._stack.enter_context(Server())
        for _ in range(self.n_engines):
            self._start()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def step(self) -> tuple[int, int]:
        self._hear()
        if self._next_kill < self.counts["answers"]:
            self._kill()
            self._next_kill = self.counts["answers"] + self._dice.randint(*KILL_EVERY)
        return min(self.counts["answers"], self.requests), self.requests

    def figures(self) -> Figures:
        """After everything is up again, and chunks are found, or RECOVERY_S are over."""
        self._back_at, before, end = 0.0, self.counts["chunks_found"], time.monotonic() + RECOVERY_S
        while self.counts["chunks_found"] == before and time.monotonic() < end:
            self._hear()
        with ValkeyStore(ValkeyConfig(url=self.server.url, deadline_s=PATIENT_S), CAP) as store:
            bad = len(store.verify().bad)
        return {**self.counts, "bad": bad, "found_lately": self.counts["chunks_found"] - before}

    def _hear(self) -> None:
        """Read messages; start the server where it is time."""
        if self._back_at is not None and time.monotonic() >= self._back_at:
            self.server.start()
            self._back_at = None
        lines: list[Any] = wait([*self._engines], HUNG_S)
        self.counts["hung"] += not lines
        for line in lines:
            try:
                self.counts.update(line.recv())
            except EOFError:  # it was not killed: an error that should have been a miss
                self.counts["failed"] += 1
                del self._engines[line]
                self._start()

    def _kill(self) -> None:
        """The server, or one engine."""
        if self._back_at is None and self._dice.random() < 0.5:
            self.server.kill()
            self.counts["servers_killed"] += 1
            self._back_at = time.monotonic() + self._dice.uniform(*DOWN_S)
        else:
            self._engines.pop(self._dice.choice(list(self._engines))).kill()
            self.counts["engines_killed"] += 1
            self._start()

    def _start(self) -> None:
        self._started += 1
        running, line = self._stack.enter_context(process(engine, self.server.url, self._started))
        self._engines[line] = running


PROMISES: Promises = {
    **none("wrong", "hung", "failed", "bad"),
    "chunks are found after the last kill": lambda found: found["found_lately"],
}

if __name__ == "__main__":
    sys.exit(main(Sharing, PROMISES, requests=1000, engines=4, seed=0))
