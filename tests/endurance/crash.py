"""Kill a precompute run again and again, at random moments, beside a reader that never stops reading.

A round: some chunks are deleted, a new process precomputes what is missing (a random Llama through the real Blender and
LMDBStore), is killed by SIGKILL at a seeded moment, and the store is opened and looked through. Chunks are large, so that
kills land inside writes. Half of what came after the first few is deleted between rounds, so that pages are used again
under the reader, who keeps one old snapshot a round open beside the fresh ones. Each chunk is a stack of its own in
precompute, so that its tensors are known to the bit.

    python -m tests.endurance.crash --rounds 50 --seed 0

What must hold: no read gives other tensors than were computed (corrupt_reads) or finds damage (damaged_reads); what the
writer reported as stored, or anybody saw, is there and right after every later kill (lost_chunks), and as long as a
snapshot that had it (vanished_chunks); `verify` and the store's sums are clean after every round; nothing is stored or
computed twice; the last run, which is left alone, completes. The last line of stdout is JSON; the exit code is 1 if
anything of this fails.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from blendserve import console
from blendserve.blend.blender import Blender
from blendserve.blend.precompute import STACK_TOKENS
from blendserve.core import ChunkKV, TokenIds
from blendserve.errors import CorruptRecord, StoreError
from blendserve.models.adapter import Adapter
from blendserve.models.toy import toy_llama
from blendserve.registry import CODECS
from blendserve.store import ChunkKey, KVStore, LMDBStore, Snapshot
from blendserve.store.codecs.base import Codec, known_codec
from tests.endurance.helpers import through
from tests.forked import process

VOCABULARY = 500
PREFIX = tuple(range(20))
TOKENS = STACK_TOKENS // 2 + 8  # of a chunk: two do not fit a stack
CHUNKS = 40
KEPT = 0.2  # of them, the first, are never deleted: they have to outlive every kill
AT_MOST = 10  # chunks reached before a kill
CAP = 1 << 30
NOBODY = bytes(28)  # the key of no chunk

MUST_BE_0 = (
    "corrupt_reads",
    "damaged_reads",
    "lost_chunks",
    "vanished_chunks",
    "unclean_verifies",
    "wrong_sums",
    "stored_twice",
    "computed_twice",
    "readers_died",
    "writers_failed",
    "store_errors",
    "incomplete_at_end",
)
MOMENTS = {"opens": "opening", "begins": "mid_write", "stored": "between_writes", "done": "after_the_last"}
AIMS = {"opens": 1, "begins": 5, "stored": 4}  # how often a kill is aimed behind which message


def corpus(chunks: int) -> list[TokenIds]:
    """The chunks, in the order in which they are precomputed."""
    dice = random.Random(0)
    return [tuple(dice.choices(range(VOCABULARY), k=TOKENS)) for _ in range(chunks)]


def blender(store: KVStore) -> Blender:
    """The same model in every process, on one thread: every process computes the same bits."""
    torch.set_num_threads(1)
    adapter = Adapter(toy_llama(VOCABULARY, 2 * TOKENS, layers=4, heads=4, kv_heads=4))
    return Blender(adapter, "crash-test", store, PREFIX, PREFIX)


def computed(store: KVStore, chunks: int) -> dict[ChunkKey, ChunkKV]:
    """The KV of the prefix, which comes first, and of every chunk."""
    made = blender(store)
    found = {made.key(ids): made.computer(PREFIX).compute([ids])[0] for ids in corpus(chunks)}
    return {made.key(PREFIX, ()): made.computer(()).compute([PREFIX])[0], **found}


def expectations(store: KVStore, chunks: int) -> dict[ChunkKey, ChunkKV]:
    """What they have to read as."""
    return read_back(codec_in(store.stats().path), computed(store, chunks))


def read_back(codec: Codec, found: dict[ChunkKey, ChunkKV]) -> dict[ChunkKey, ChunkKV]:
    """Chunks through the codec; the prefix, the first, is stored as it is."""
    (prefix, kv), *chunks = found.items()
    return {prefix: kv, **{key: through(codec, kv) for key, kv in chunks}}


def codec_in(folder: str | Path) -> Codec:
    """Of the store in this folder, which is named by it; uncoded where it has another name. Its tables lie beside it."""
    name = Path(folder).name
    made: type[Codec] = CODECS.load(name if name in CODECS.names else CODECS.default)
    return made.with_tables(
        made.default_level, _tables_file(folder).read_bytes() if made.needs_tables else b""
    )


def lay_tables(folder: Path, store: KVStore) -> None:
    """Fit the tables that the store's codec needs, for every process to find."""
    made: type[Codec] = CODECS.load(folder.name)
    if made.needs_tables:
        computer, ids = blender(store).computer(PREFIX), corpus(40)
        raw = made.fit(zip(ids, computer.compute(ids), strict=True))
        _tables_file(folder).write_bytes(raw)
        store.put_tables(folder.name, "crash-test", raw)


def _tables_file(folder: str | Path) -> Path:
    return Path(folder).with_suffix(".tables")


@dataclass
class Tally:
    """What a reader met."""

    reads: int = 0  # of whole chunks
    corrupt: int = 0  # of those: not what was computed
    damaged: int = 0  # refused by a checksum
    vanished: int = 0  # from a snapshot that had them
    seen: set[ChunkKey] = field(default_factory=set)  # there and right

    def look(self, snapshot: Snapshot, expected: Mapping[ChunkKey, ChunkKV]) -> set[ChunkKey]:
        """Read every chunk that is there -> those that are right."""
        right = {key for key, kv in expected.items() if self._is_right(snapshot, key, kv)}
        self.seen |= right
        return right

    def _is_right(self, snapshot: Snapshot, key: ChunkKey, kv: ChunkKV) -> bool:
        try:
            view = snapshot.get(key)
            if view is None:
                return False
            layers = [view.layer(l) for l in range(view.n_layers)]
        except CorruptRecord:
            self.damaged += 1
            return False
        keys, values = map(torch.stack, zip(*layers, strict=True))
        right = torch.equal(keys, kv.keys) and torch.equal(values, kv.values)
        self.reads += 1
        self.corrupt += not right
        return right


def read(line: Connection, folder: Path, chunks: int) -> None:
    """The reader: fresh snapshots one after another, and an old one from question to question."""
    with LMDBStore(folder, CAP, read_only=True) as store:
        expected = expectations(store, chunks)
        line.send("ready")
        while True:
            tally = Tally()
            with store.reading() as old:
                held = tally.look(old, expected)
                while not line.poll():
                    with store.reading() as snapshot:
                        tally.look(snapshot, expected)
                line.recv()
                tally.vanished += len(held - tally.look(old, expected))
            line.send(tally)


class Said(NamedTuple):
    """A writer's message: opens | begins | stored | done."""

    what: str
    key: ChunkKey
    at: float  # of the clock that all processes share


class Announcing(LMDBStore):
    """Says which chunk it is about to store, and which it has stored."""

    def __init__(self, folder: Path, line: Connection) -> None:
        self._line = line
        self.say("opens")
        super().__init__(folder, CAP, codec=codec_in(folder))

    def put(self, key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        self.say("begins", key)
        stored = super().put(key, kv, pin)
        self.say("stored", key)
        return stored

    def put_uncoded(self, key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        self.say("begins", key)
        stored = super().put_uncoded(key, kv, pin)
        self.say("stored", key)
        return stored

    def say(self, what: str, key: ChunkKey = b"") -> None:
        self._line.send(Said(what, key, time.monotonic()))


def write(line: Connection, folder: Path, chunks: int, is_doomed: bool) -> None:
    """The writer: precompute what is missing; whom a kill is meant for waits for it at the end."""
    store = Announcing(folder, line)
    with store:
        blender(store).precompute(corpus(chunks))
        store.say("done")
        if is_doomed:
            line.recv()


def run_writer(
    folder: Path, chunks: int, what: str = "", nth: int = 0, delay: float = 0.0
) -> tuple[list[Said], int | None]:
    """Start a writer, and kill it `delay` seconds after its n-th message of a kind -> all that it said, exit code."""
    heard: list[Said] = []
    with process(write, folder, chunks, bool(what)) as (running, line):
        with contextlib.suppress(EOFError, OSError):
            while True:  # until it is gone, and the line with it
                heard.append(line.recv())
                if heard[-1].what == what and sum(said.what == what for said in heard) == nth:
                    time.sleep(delay)
                    running.kill()
                elif heard[-1].what == "done" and what:
                    running.kill()
        running.join()
    return heard, running.exitcode


class Trial:
    """A store, the reader on it, and what has to be in it."""

    def __init__(self, folder: Path, seed: int, reader: Connection, chunks: int) -> None:
        self.folder, self.dice, self.reader, self.chunks = folder, random.Random(seed), reader, chunks
        with LMDBStore(folder, CAP) as store:
            codec, found = codec_in(folder), computed(store, chunks)
        self.expected = read_back(codec, found)
        self.sizes = {key: sum(map(len, codec.encode(kv))) for key, kv in found.items()}
        self.sizes[next(iter(found))] = next(iter(found.values())).n_bytes
        self.veterans = set(list(self.expected)[: int(KEPT * chunks) + 1])  # and the prefix
        self.committed: set[ChunkKey] = set()
        self.counts: Counter[str] = Counter()
        self.lasts = dict.fromkeys(AIMS, 0.02)  # seconds from such a message to the next, as met

    def round(self) -> None:
        """Delete, write, kill, look."""
        self._delete_some()
        (what,) = self.dice.choices(list(AIMS), list(AIMS.values()))
        room = min(AT_MOST, len(self.expected) - len(self.committed))
        nth = 1 if what == "opens" else self.dice.randint(1, room)
        delay = self.dice.random() * self.lasts[what]
        heard, code = run_writer(self.folder, self.chunks, what, nth, delay)
        if code == -signal.SIGKILL:
            self.counts[f"kills_{MOMENTS[heard[-1].what]}"] += 1
        self.counts["writers_failed"] += code not in {0, -signal.SIGKILL}
        self.lasts |= {one.what: other.at - one.at for one, other in pairwise(heard)}
        self.judge(heard)

    def finish(self) -> None:
        """Let a writer run to its end: everything is there then."""
        heard, code = run_writer(self.folder, self.chunks)
        self.counts["writers_failed"] += code != 0
        self.judge(heard)
        self.counts["incomplete_at_end"] += len(self.expected) - len(self.committed)

    def _delete_some(self) -> None:
        """Half of what may go. What the reader saw of it so far is asked for and forgotten."""
        deletable = sorted(self.committed - self.veterans)
        gone = self.dice.sample(deletable, len(deletable) // 2)
        with LMDBStore(self.folder, CAP) as store:
            self.counts["deletes"] += sum(store.delete(key) for key in gone)
        self._ask_reader()
        self.committed -= set(gone)

    def judge(self, heard: list[Said]) -> None:
        """Compare what is there with what the writer said and the reader saw."""
        begun, stored = ({s.key for s in heard if s.what == word} for word in ("begins", "stored"))
        self.counts["computed_twice"] += len(begun & self.committed)
        self.counts["commits"] += len(stored)
        self.committed |= stored | self._ask_reader()
        right = self._look()
        self.counts["lost_chunks"] += len(self.committed - right)
        self.counts["commits_not_announced"] += len((begun - stored) & right)
        self.committed = right  # what is lost is counted once

    def _look(self) -> set[ChunkKey]:
        """Open the store as the next process would -> the chunks that are right."""
        tally = Tally()
        with LMDBStore(self.folder, CAP) as store:
            with store.reading() as snapshot:
                right = tally.look(snapshot, self.expected)
            keys, stats, report = list(store.keys()), store.stats(), store.verify()
            codec = codec_in(self.folder)
            n_bytes = sum(self.sizes[key] for key in right)
            left = CAP - n_bytes
            exact = codec.expected_bytes(left) == left  # else what is wanted is an estimate
            room = [store.wants(NOBODY, left + more) if exact else not more for more in (0, 1)]  # to the byte
        self._add(tally)
        self.counts["unclean_verifies"] += bool(report.bad) or report.good != len(right)
        self.counts["stored_twice"] += len(keys) - len(set(keys))
        sums = (stats.chunks, stats.bytes, *room)
        self.counts["wrong_sums"] += sums != (len(right), n_bytes, True, False)
        return right

    def _ask_reader(self) -> set[ChunkKey]:
        """Add up what the reader met since it was last asked -> the chunks that it saw."""
        self.reader.send("what did you see?")
        tally: Tally = self.reader.recv()
        self._add(tally)
        return tally.seen

    def _add(self, tally: Tally) -> None:
        found = {"reads_checked": tally.reads, "corrupt_reads": tally.corrupt}
        self.counts.update({**found, "damaged_reads": tally.damaged, "vanished_chunks": tally.vanished})


def run(rounds: int, chunks: int, seed: int, codec: str = CODECS.default) -> dict[str, Any]:
    """All rounds -> the figures of the JSON line."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, console.progress("Killing writers", "rounds") as update:
        folder = Path(scratch) / codec
        with LMDBStore(folder, CAP) as store:
            lay_tables(folder, store)
        with process(read, folder, chunks) as (_, reader):
            trial = Trial(folder, seed, reader, chunks)
            try:
                reader.recv()
                for done in range(rounds):
                    trial.round()
                    update(done + 1, rounds)
                trial.finish()
            except (EOFError, OSError):  # of the reader's line
                trial.counts["readers_died"] += 1
            except StoreError as error:
                console.say(str(error))
                trial.counts["store_errors"] += 1
        file_bytes = (folder / "data.mdb").stat().st_size
    return figures(trial.counts, rounds, seed) | {
        "payload_bytes": sum(kv.n_bytes for kv in trial.expected.values()),
        "file_bytes": file_bytes,
        "seconds": round(time.perf_counter() - began, 1),
    }


def figures(counts: Mapping[str, int], rounds: int, seed: int) -> dict[str, Any]:
    """Every count by name, and which promises are broken."""
    kills = {f"kills_{moment}": counts.get(f"kills_{moment}", 0) for moment in MOMENTS.values()}
    others = ("reads_checked", "commits", "commits_not_announced", "deletes")
    shown = {name: counts.get(name, 0) for name in (*MUST_BE_0, *others)}
    broken = [name for name in MUST_BE_0 if shown[name]] + ([] if shown["reads_checked"] else ["no reads"])
    return {"rounds": rounds, "seed": seed, **kills, **shown, "broken": broken}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--chunks", type=int, default=CHUNKS, help="of the corpus")
    parser.add_argument("--seed", type=int, default=0)
    here = [name for name in CODECS.names if known_codec(name)]
    parser.add_argument("--codec", choices=here, default=CODECS.default, help="how the store is coded")
    parser.add_argument("--json", action="store_true", help="the JSON line alone, without the table")
    asked = parser.parse_args()
    result = {"codec": asked.codec, **run(asked.rounds, asked.chunks, asked.seed, asked.codec)}
    if not asked.json:
        rows = [(name.replace("_", " "), str(value)) for name, value in result.items()]
        console.table("Precompute killed, with a reader beside it", ("what", "how many"), rows)
    console.print_json(result)
    return 1 if result["broken"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
