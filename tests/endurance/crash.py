"""Kill a precompute run again and again, at random moments, beside a reader that never stops reading.

A round: half of the chunks but the first few are deleted, so that pages are used again under the reader; a new process
precomputes what is missing, with the real Blender and LMDBStore, and is killed by SIGKILL at a seeded moment, mostly in
a write, as chunks are large; the store is opened and read. The reader keeps an old snapshot open beside the fresh ones.

    python -m tests.endurance.crash --rounds 50 --seed 0

No read gives other tensors than were computed (corrupt_reads) or finds damage (damaged_reads). What the writer reported
as stored, or a reader saw, is there and right after each later kill (lost_chunks), and as long as a snapshot that had it
(vanished_chunks). `verify` and the store's sums are clean after each round, and nothing is stored or computed twice.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from blendserve.blend import precompute
from blendserve.blend.blender import Blender
from blendserve.blend.chunk_kv import STACK_TOKENS
from blendserve.core import TokenIds
from blendserve.errors import CorruptRecord
from blendserve.kv import ChunkKV
from blendserve.models.model import DecoderModel
from blendserve.store import ChunkKey, ChunkRecord, KVStore, LMDBStore, Snapshot
from blendserve.store.view import decode
from tests.endurance.driver import Promises, Workload, main, none
from tests.support.forked import process
from tests.support.stores import same
from tests.support.toy import toy_llama

VOCABULARY = 500
PREFIX = tuple(range(20))
TOKENS = STACK_TOKENS // 2 + 8  # of a chunk: two do not fit a stack
KEPT = 0.2  # of the chunks, the first, are never deleted: they have to outlive each kill
AT_MOST = 10  # chunks reached before a kill
CAP = 1 << 30
AIMS = {"opens": 1, "begins": 5, "stored": 4}  # weights: the message after which a writer is killed

Chunks = dict[ChunkKey, ChunkKV]
Said = tuple[str, ChunkKey, float]  # a writer's message: opens | begins | stored | done; when it came


def corpus(chunks: int) -> list[TokenIds]:
    """The chunks, in the order in which they are precomputed."""
    dice = random.Random(0)
    return [tuple(dice.choices(range(VOCABULARY), k=TOKENS)) for _ in range(chunks)]


def blender(store: KVStore) -> Blender:
    """The same model in every process, on one thread: every process computes the same bits."""
    torch.set_num_threads(1)
    decoder = DecoderModel.of(toy_llama(VOCABULARY, 2 * TOKENS, layers=4, heads=4, kv_heads=4))
    return Blender(decoder, "crash-test", store, PREFIX, PREFIX)


def computed(store: KVStore, chunks: int) -> Chunks:
    """The KV of every chunk."""
    of = blender(store)
    return {of.key(ids): of.writer.chunks.compute([ids])[0] for ids in corpus(chunks)}


def look(snapshot: Snapshot, expected: Chunks, counts: Counter[str]) -> set[ChunkKey]:
    """Read and count every chunk that is there -> the right ones."""
    right = set()
    for key, kv in expected.items():
        try:
            if (record := snapshot.get(key)) is None:
                continue
            is_right = same(decode(record), kv)
            counts.update({"reads_checked": 1, "corrupt_reads": not is_right})
            right |= {key} if is_right else set()
        except CorruptRecord:
            counts["damaged_reads"] += 1
    return right


def read(line: Connection, folder: Path, chunks: int) -> None:
    """The reader: fresh snapshots one after another, and an old one from question to question."""
    with LMDBStore(folder, CAP, read_only=True) as store:
        expected = computed(store, chunks)
        line.send("ready")
        while True:
            counts = Counter[str]()
            with store.snapshot() as old:
                seen = held = look(old, expected, counts)
                while not line.poll():
                    with store.snapshot() as snapshot:
                        seen = seen | look(snapshot, expected, counts)
                line.recv()
                counts["vanished_chunks"] += len(held - look(old, expected, counts))
            line.send((counts, seen))


def write(line: Connection, folder: Path, chunks: int, is_doomed: bool) -> None:
    """The writer: precompute what is missing, and say so; a doomed one waits for its kill at the end."""

    class Announcing(LMDBStore):
        def put(self, key: ChunkKey, record: ChunkRecord, pin: bool = False) -> bool:
            line.send(("begins", key))
            stored = super().put(key, record, pin)
            line.send(("stored", key))
            return stored

    precompute.FIRST_TOKEN_S = 1e-4  # or it waits ten seconds for what the killed one has leased
    line.send(("opens", b""))
    with Announcing(folder, CAP) as store:
        blender(store).writer.precompute(corpus(chunks))
        line.send(("done", b""))
        if is_doomed:
            line.recv()


class Crashes:
    """Precompute runs that are killed, beside a reader."""

    def __init__(self, rounds: int, chunks: int, seed: int) -> None:
        self.rounds, self.chunks, self.dice = rounds, chunks, random.Random(seed)
        self.committed: set[ChunkKey] = set()
        self.counts: Counter[str] = Counter()
        self.lasts_s = dict.fromkeys(AIMS, 0.02)  # from such a message to the next, as met

    def run(self) -> Workload:
        """Each part is a round; at the end a writer is left alone: everything is there then."""
        with ExitStack() as stack:
            self.open(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            self.reader = stack.enter_context(process(read, self.folder, self.chunks))[1]
            self.reader.recv()
            for n in range(self.rounds):
                if (yield n, self.rounds):
                    break
                self.kill_one()
            self._write()
            self.counts["incomplete_at_end"] = len(self.expected) - len(self.committed)
            return {**dict.fromkeys(MUST_BE_0, 0), **self.counts}

    def open(self, folder: Path) -> None:
        """Make the store, and what has to be in it."""
        self.folder = folder
        with LMDBStore(folder, CAP) as store:
            self.expected = computed(store, self.chunks)
        self.veterans = set(list(self.expected)[: int(KEPT * self.chunks) + 1])  # and the prefix

    def kill_one(self) -> None:
        """Delete, write, kill, look. Half of the chunks go that may; what the reader saw of them is dropped."""
        deletable = sorted(self.committed - self.veterans)
        with LMDBStore(self.folder, CAP) as store:
            store.delete(gone := self.dice.sample(deletable, len(deletable) // 2))
        self._ask_reader()
        self.committed -= set(gone)
        (what,) = self.dice.choices(list(AIMS), list(AIMS.values()))
        room = min(AT_MOST, len(self.expected) - len(self.committed))
        nth = 1 if what == "opens" else self.dice.randint(1, room)
        self._write(what, nth, self.dice.random() * self.lasts_s[what])

    def _write(self, what: str = "", nth: int = 0, delay_s: float = 0.0) -> None:
        """Run a writer, and kill it `delay_s` after its n-th message of a kind, or at its end; never without a kind."""
        heard: list[Said] = []
        with process(write, self.folder, self.chunks, bool(what)) as (running, line):
            with suppress(EOFError, OSError):
                while True:  # until the process ends, and the connection with it
                    heard.append((*line.recv(), time.monotonic()))
                    said = [message[0] for message in heard]
                    if what and (said[-1] == "done" or (said[-1] == what and said.count(what) == nth)):
                        time.sleep(delay_s)  # allow: the moment of a real kill
                        running.kill()
            running.join()
        if running.exitcode == -signal.SIGKILL:
            self.counts[f"kills_after_{heard[-1][0]}"] += 1
        self.counts["writers_failed"] += running.exitcode not in ({0, -signal.SIGKILL} if what else {0})
        self.lasts_s |= {what: then - at for (what, _, at), (_, _, then) in pairwise(heard)}
        self.judge(heard)

    def judge(self, heard: list[Said]) -> None:
        """Compare the stored chunks with what the writer said and the reader saw."""
        begun, stored = ({key for what, key, _ in heard if what == word} for word in ("begins", "stored"))
        self.counts["computed_twice"] += len(begun & self.committed)
        self.counts["commits"] += len(stored)
        self.committed |= stored | self._ask_reader()
        with LMDBStore(self.folder, CAP) as store:  # as the next process would open it
            with store.snapshot() as snapshot:
                right = look(snapshot, self.expected, self.counts)
            keys, stats, report = list(store.keys()), store.stats(), store.verify()
        n_bytes = sum(self.expected[key].n_bytes for key in right)
        self.counts["unclean_verifies"] += bool(report.bad) or report.good != len(right)
        self.counts["stored_twice"] += len(keys) - len(set(keys))
        self.counts["wrong_sums"] += (stats.chunks, stats.bytes) != (len(right), n_bytes)
        self.counts["lost_chunks"] += len(self.committed - right)
        self.committed = right  # a loss is counted once

    def _ask_reader(self) -> set[ChunkKey]:
        """Add up what the reader met since it was last asked -> the chunks that it saw."""
        self.reader.send("what did you see?")
        counts, seen = self.reader.recv()
        self.counts.update(counts)
        return set(seen)


MUST_BE_0 = (
    *("corrupt_reads", "damaged_reads", "lost_chunks", "vanished_chunks", "unclean_verifies", "wrong_sums"),
    *("stored_twice", "computed_twice", "writers_failed", "incomplete_at_end"),
)
PROMISES: Promises = {**none(*MUST_BE_0), "the reader read": lambda found: found["reads_checked"]}


if __name__ == "__main__":
    sys.exit(main(lambda **o: Crashes(**o).run(), PROMISES, rounds=50, chunks=40, seed=0))
