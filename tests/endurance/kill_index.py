"""Kill processes that change an index, at random moments: builds, additions, deletions, and servers that take uploads.

    python -m tests.endurance.kill_index --kills 200 --seed 0

A process says what it begins and what has ended. After SIGKILL or SIGTERM, in turns, at a seeded moment, mostly inside a
transaction, the next one opens the index without a repair: what was reported stays (lost, returned), what was under way
is there as a whole or not at all (torn), every passage is found by its vectors (unfound), and a job counts no document
that is not there.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from blendserve.core import Document, Passage
from blendserve.errors import IndexMissing, VectorIndexError
from blendserve.retrieve import TokenCounter, VectorIndex, split
from blendserve.retrieve.database import Database
from blendserve.retrieve.tables import document_ids, read_jobs
from tests.endurance.driver import Promises, Workload, main, none
from tests.retrieve.conftest import toy_embedder, words
from tests.support.forked import process
from tests.support.http import ToyServer

KINDS = "build,add,delete,upload"
COUNTER, TOKENS = TokenCounter("tiny", "abcdefghij", words), 20
LIVES = 60  # documents that a process begins with
UPLOAD = 12  # documents of a request
HOW = (signal.SIGKILL, signal.SIGTERM)

Texts = dict[str, str]  # by id of the document
Change = dict[str, "str | None"]  # None: deleted


def open_index(folder: Path) -> VectorIndex:
    """The index, made if there is none."""
    try:
        return VectorIndex.open(folder, toy_embedder(), COUNTER)
    except IndexMissing:
        return VectorIndex.create(folder, toy_embedder(), COUNTER, chunk_tokens=TOKENS)


def documents(texts: Change) -> list[Document]:
    return [Document(text, id=name) for name, text in texts.items() if text is not None]


def passages(texts: Texts) -> set[Passage]:
    return {p for document in documents({**texts}) for p in split(document, TOKENS, words)}


def some_text(dice: random.Random) -> str:
    """A text of some passages."""
    return " ".join(f"w{dice.randrange(10**6)}" for _ in range(dice.randint(3, 90)))


def change(line: Connection, folder: Path, kind: str, seed: int) -> None:
    """Change the index again and again; say what begins and what has ended."""
    dice, index = random.Random(seed), open_index(folder)
    known = sorted({p.doc_id for p in index.passages})
    dice.shuffle(known)
    for n in count():
        made: Change = {f"d{seed}-{n}-{i}": some_text(dice) for i in range(dice.randint(1, 8))}
        if kind == "delete":
            gone, known = known[:3], known[3:]
            made = dict.fromkeys(gone, None)
        elif kind == "add" and known:  # one is replaced
            made[known[n % len(known)]] = some_text(dice)
        line.send(("begins", made))
        if kind == "build":
            VectorIndex.build(folder, toy_embedder(), COUNTER, documents(made), chunk_tokens=TOKENS)
        elif kind == "delete":
            index.delete(*made)
        else:
            index.add(documents(made))
        line.send(("ended", made))
        if not made:
            break


def send(how: signal.Signals, pid: int | None) -> None:
    """End a process that was started."""
    assert pid, "0 would be all of this one's group"
    os.kill(pid, how)


class Kills:
    """Changes of one index, and uploads to another one, that are killed."""

    def __init__(self, kills: int, seed: int, kinds: str = KINDS) -> None:
        """kinds: of changes, in turns."""
        self.kills, self.seed, self.kinds, self.dice = kills, seed, kinds.split(","), random.Random(seed)
        self.held: Texts = {}
        self.counts: Counter[str] = Counter()
        self.lasts_s = dict.fromkeys(self.kinds, 0.02)  # of a change of this kind, as seen

    def run(self) -> Workload:
        """Each part is a kill."""
        with tempfile.TemporaryDirectory() as folder:
            self.folder, self.served = Path(folder, "index"), Path(folder)
            for n in range(self.kills):
                if (yield n, self.kills):
                    break
                turn, of_kind = divmod(n, len(self.kinds))
                kind, how = self.kinds[of_kind], HOW[turn % 2]
                if kind == "upload":
                    self.kill_server(n, how)
                else:
                    self.kill_change(kind, self.seed * 10**6 + n, how)
                self.counts[f"by_{how.name}"] += 1
            return {**dict.fromkeys(MUST_BE_0, 0), **self.counts}

    def kill_change(self, kind: str, seed: int, how: signal.Signals) -> None:
        """Run changes of one kind, kill them in the middle of one, and look."""
        with closing(open_index(self.folder)) as index:
            texts = {f"f{seed}-{n}": some_text(self.dice) for n in range(max(0, LIVES - len(self.held)))}
            index.add(documents({**texts}))
            self.held |= texts
        nth, under_way, began = self.dice.randint(1, 6), Change(), 0.0
        with process(change, self.folder, kind, seed) as (running, line):
            with suppress(EOFError, OSError):
                for n in count(1):
                    under_way, began = line.recv()[1], time.monotonic()
                    if n == nth:
                        delay_s = 1.3 * self.dice.random() * self.lasts_s[kind]
                        time.sleep(delay_s)  # allow: the moment of a real kill
                        send(how, running.pid)
                    self.apply(kind, line.recv()[1])
                    under_way = {}
                    self.lasts_s[kind] = time.monotonic() - began
            running.join()
        if running.exitcode != -how:
            self.counts["processes_failed"] += 1
        self.counts[f"kills_of_{kind}"] += 1
        self.counts["kills_inside"] += bool(under_way)
        self.judge(kind, under_way)

    def apply(self, kind: str, made: Change) -> None:
        """Note what was reported as done."""
        after = made if kind == "build" else {**self.held, **made}
        self.held = {name: text for name, text in after.items() if text is not None}

    def judge(self, kind: str, under_way: Change) -> None:
        """Compare the index with what was reported, or with that and the change under way."""
        try:
            with closing(open_index(self.folder)) as index:
                found = index.passages
                best = {p.id for p in index.search("w1", len(found))} if found else set()
        except VectorIndexError:
            self.counts["unopened"] += 1
            return
        reported = self.held
        if under_way:
            self.apply(kind, under_way)
            if set(found) != passages(self.held):
                self.held = reported
        wanted = passages(self.held)
        self.counts["unfound"] += len({p.id for p in found} - best)
        self.counts["lost"] += len(wanted - set(found))
        self.counts["torn_or_returned"] += len(set(found) - wanted) + len(found) - len(set(found))

    def kill_server(self, n: int, how: signal.Signals) -> None:
        """Upload documents, kill the server after a random time, and look for what its jobs reported."""
        names = [f"u{n}-{i}" for i in range(UPLOAD)]
        body = [{"id": name, "text": some_text(self.dice)} for name in names]
        with ToyServer(self.served) as server, httpx.Client(base_url=server.url, timeout=60) as http:
            listed = http.get("/v1/jobs").json()["data"]
            self.counts["jobs_left_running"] += sum(job["state"] == "running" for job in listed)
            job = http.post("/v1/documents", json={"collection": "a", "documents": body}).json()
            reported, stop = 0, time.monotonic() + 1.3 * self.dice.random() * self.lasts_s["upload"]
            began = time.monotonic()
            while time.monotonic() < stop:
                job = http.get(f"/v1/jobs/{job['id']}").json()
                reported = job["documents"]
                if job["state"] == "done":
                    self.lasts_s["upload"] = time.monotonic() - began
                    break
            else:
                self.lasts_s["upload"] *= 1.2  # until it is long enough for all documents
            send(how, server.pid)
            server.wait()
        database = Database(self.served / "a")
        with closing(database), database.read() as rows:
            there, jobs = document_ids(rows), read_jobs(rows)
        saved = next((row["documents"] for row in jobs if row["id"] == job["id"]), 0)
        self.counts["lost"] += len(set(names[: max(reported, saved)]) - there)
        self.counts["uncounted"] += len(there & set(names[saved:]))
        self.counts["kills_of_upload"] += 1
        self.counts["kills_inside"] += 0 < len(there & set(names)) < UPLOAD


MUST_BE_0 = (
    "lost",
    "torn_or_returned",
    "unfound",
    "uncounted",
    "unopened",
    "jobs_left_running",
    "processes_failed",
)
PROMISES: Promises = {
    **none(*MUST_BE_0),
    "some kills hit a change": lambda found: found["kills_inside"],
}


if __name__ == "__main__":
    sys.exit(main(lambda **o: Kills(**o).run(), PROMISES, kills=200, seed=0, kinds=KINDS))
