"""Requests of every kind at once, and a kill in the middle: no wrong answer, no leaked slot, flat memory, right errors.

    python -m tests.endurance.kill_serving --out runs/kill            # 1,000 requests of 32 clients

First the engine answers each request alone, in this process, over Python's language reference. Then a server gets them:
10% are cancelled midway, 7% are malformed or too large; the others are asked whole or as a stream, and compared with the
engine. Meanwhile documents are added and deleted, so that store and index are written all the time.

After 30% of the requests the server is killed (SIGKILL). The whole store is verified, every document whose job had ended
must still be there, and a new server gets what the kill cut off and the rest. Told to stop, it must exit with 0.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from blendserve.bench.server_process import ServerProcess, serve_command
from blendserve.config import Config
from blendserve.core import Passage
from blendserve.engine.engine import Engine
from blendserve.retrieve import language_reference
from blendserve.store import LMDBStore
from tests.endurance.driver import Promises, Workload, main, none
from tests.support.http import events
from tests.support.waiting import eventually

KINDS = {"whole": 55, "stream": 28, "cancelled": 10, "refused": 7}  # shares
ERROR = {"message", "type", "param", "code"}
MEMORY_GROWTH = 1.05  # of the last half of the requests
KILL_AT = 0.3  # of the requests
CAP = 2 * 10**9
SETTINGS = """\
model: {dtype: float32}
retrieve: {chunk_tokens: 48}
store: {cap_gb: 2}
blend: {method: blend}
serve: {slots: 8, slot_tokens: 1024, log_text: false}
"""
GONE = (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
WRONG = (httpx.HTTPError, KeyError, ValueError, AssertionError)

Start = Callable[[], Any]
Asks = Sequence[tuple[dict[str, Any], str]]
"""requests, and what each must be answered with"""


class Serving:
    """Requests of every kind to servers over one store."""

    def __init__(self, start: Start, store: Path, asks: Asks, requests: int, clients: int, seed: int) -> None:
        """start: a server, as a context manager. store: its folder."""
        self.start, self.store, self.asks = start, store, asks
        self.requests, self.clients, dice = requests, clients, random.Random(seed)
        kinds = dice.choices(list(KINDS), list(KINDS.values()), k=requests)
        self.todo = deque((kind, dice.randrange(len(asks)), dice.random()) for kind in kinds)
        self.done, self.wrong, self.memory = Counter[str](), list[str](), list[float]()
        self.documents = dict[str, int]()  # whose job has ended, and their chunks
        self.cut_off, self.written, self._is_killed = 0, 0, False
        self._ended, self._name = threading.Event(), f"kill-{time.time_ns():x}"

    def run(self) -> Workload:
        """Two parts: requests up to a kill, and the rest."""
        yield 0, self.requests
        with self.start() as server:
            self.ask(server, round(KILL_AT * self.requests))
        with LMDBStore(self.store, CAP, read_only=True) as store:
            verified = store.verify()
        self.memory.clear()
        yield self.done.total(), self.requests
        with self.start() as server:
            self.find_documents(server)
            self.ask(server, self.requests)
            eventually(lambda: is_idle(server.url))
            exit_code = server.stop()
        return {
            **{"requests": dict(self.done), "wrong": self.wrong, "exit_code": exit_code},
            **{"cut_off_and_asked_again": self.cut_off, "documents_written": self.written},
            **{"memory_mb": self.memory[len(self.memory) // 2 :]},
            **{"good": verified.good, "bad": len(verified.bad)},
        }

    def ask(self, server: Any, stop_at: int) -> None:
        """All clients at once, until `stop_at` requests are answered; the server is killed then, unless all are."""
        # A connection is kept for less time than the server keeps it, or the server closes some that a request uses.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=1)
        self._ended.clear()
        with (
            httpx.Client(base_url=server.url, timeout=None, limits=limits) as self.http,
            ThreadPoolExecutor(self.clients + 1) as pool,
        ):
            writer = pool.submit(self._write)
            jobs = [pool.submit(self._client) for _ in range(self.clients)]
            while (done := self.done.total()) < stop_at and not all(job.done() for job in jobs):
                if done // 25 >= len(self.memory):
                    self.memory.append(server.memory_mb)
                self._ended.wait(0.01)
            if stop_at < self.requests:
                self._is_killed = True
                server.kill()
                self._ended.set()
            for job in jobs:
                job.result()
            self._ended.set()
            writer.result()
        self._is_killed = False

    def _client(self) -> None:
        with suppress(IndexError):  # nothing is left to do
            while not self._ended.is_set():
                kind, which, chance = job = self.todo.popleft()
                try:
                    self.ask_one(kind, which, chance)
                except WRONG as error:
                    if self._is_killed and isinstance(error, GONE):
                        self.cut_off += 1
                        self.todo.append(job)
                        return
                    self.wrong.append(f"{kind}: {error!r}"[:300])
                self.done[kind] += 1

    def _write(self) -> None:
        """Documents come and go."""
        try:
            model = self.http.get("/v1/models").json()["data"][0]
            self.collection = model["x_blendserve"]["collections"][0]
            while not self._ended.is_set():
                self.written += 1
                self._write_one(f"{self._name}-{self.written}")
        except WRONG as error:
            if not (self._is_killed and isinstance(error, GONE)):
                self.wrong.append(f"document: {error!r}"[:300])

    def _write_one(self, name: str) -> None:
        text = " ".join(f"Document {name} says {i}." for i in range(8))
        body = {"collection": self.collection, "documents": [{"id": name, "text": text}]}
        job = self.http.post("/v1/documents", json=body).json()
        while job["state"] == "running":
            self._ended.wait(0.1)
            job = self.http.get(f"/v1/jobs/{job['id']}").json()
        assert job["state"] == "done", f"the job of {name} {job['state']}: {job['error']}"
        self.documents[name] = job["chunks"]
        if len(self.documents) > 5:
            del self.documents[oldest := next(iter(self.documents))]
            gone = self.http.delete(f"/v1/documents/{oldest}", params={"collection": self.collection})
            assert gone.status_code == 200, f"{oldest} could not be deleted: {gone.text[:200]}"

    def find_documents(self, server: Any) -> None:
        """After a kill, every document whose job had ended is there."""
        for name, chunks in self.documents.items():
            which = {"collection": self.collection, "documents": [name]}
            found = httpx.post(f"{server.url}/v1/cache/lookup", json=which, timeout=None).json()
            if found["cached"] != [True] * chunks:
                self.wrong.append(f"document {name} of {chunks} chunks after the kill: {found}")

    def ask_one(self, kind: str, which: int, chance: float) -> None:
        """chance: of 0 to 1, chooses when a request is cancelled, and what is wrong with one that is refused."""
        ask, expected = self.asks[which]
        if kind == "refused":
            self.ask_wrong(ask, chance)
        elif kind == "cancelled":  # after the passages or after some text
            next(islice(self.events(ask), int(4 * chance), None), None)
        elif kind == "stream":
            text = "".join(event["text"] for event in self.events(ask) if event["event"] == "text")
            assert text == expected, f"{text!r}, not {expected!r}"
        else:
            answer = self.http.post("/v1/rag/query", json=ask)
            assert (answer.status_code, answer.json()["text"]) == (200, expected), answer.text[:200]

    def ask_wrong(self, ask: dict[str, Any], chance: float) -> None:
        """No JSON, a wrong value, a prompt that no slot can hold, a body beyond the limit."""
        changes = ("ratio", 7), ("question", "long " * 10**5), ("passages", ["too long" * 2**19])
        bodies = ["{", *(json.dumps({**ask, name: value}) for name, value in changes)]
        n, headers = int(len(bodies) * chance), {"Content-Type": "application/json"}
        answer = self.http.post("/v1/rag/query", content=bodies[n], headers=headers)
        assert answer.status_code == (413 if n == 3 else 400), answer.text[:200]
        assert set(answer.json()["error"]) == ERROR, answer.text[:200]

    def events(self, ask: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self.http.stream("POST", "/v1/rag/query", json={**ask, "stream": True}) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                yield from events([line])


def is_idle(url: str) -> bool:
    """No slot is used and no request waits."""
    text = httpx.get(f"{url}/metrics", timeout=None).text
    return all(f"\nblendserve_{name} 0.0\n" in text for name in ("slots_in_use", "queue_length"))


def make_asks(engine: Engine, passages: Sequence[Passage], n: int, seed: int) -> Asks:
    """Different good requests, and what the engine says to each alone; `auto` would depend on the clock."""
    dice, made = random.Random(seed), []
    engine.precompute(passages)
    for line in range(n):
        question, given = f"What is said in line {line}?", dice.sample(passages, dice.randint(1, 3))
        method, tokens = dice.choice(("blend", "blend", "blend", "prefix", "full")), dice.randint(8, 12)
        sent = [{"text": p.text, "title": p.title} for p in given]
        ask = {"question": question, "passages": sent, "method": method, "max_tokens": tokens}
        said = engine.answer(question, given, method=method, max_new_tokens=tokens)
        made.append((ask, said.text))
    return made


PROMISES: Promises = {
    **none("wrong", "bad", "exit_code"),
    "memory is flat": lambda found: found["memory_mb"][-1] <= MEMORY_GROWTH * found["memory_mb"][0],
}


def make(out: Path, requests: int, clients: int, seed: int) -> Workload:
    """With an index in `out`, built unless an earlier run left it."""
    out.mkdir(parents=True, exist_ok=True)
    index, settings = out / "index", out / "kill.yaml"
    settings.write_text(SETTINGS)
    config = Config.load(settings)
    if not index.exists():
        Engine.build(index, language_reference()[:3], config).close()
    with Engine.open(index, config) as engine:
        assert engine.index is not None
        passages = random.Random(seed).sample(engine.index.passages, 24)
        asks = make_asks(engine, passages, 24, seed)
    command = serve_command("--index", str(index), "--config", str(settings))
    start = lambda: ServerProcess(command, out / "server.log")  # noqa: E731
    return Serving(start, index / "kv", asks, requests, clients, seed).run()


if __name__ == "__main__":
    sys.exit(main(make, PROMISES, out=Path("runs/kill"), requests=1000, clients=32, seed=0))
