"""Requests of every kind at once, and a kill in the middle: no wrong answer, no leaked slot, flat memory, right errors.

    python -m tests.endurance.soak_serving --out runs/soak            # 1,000 requests of 32 clients

Starts the server itself, in fp32, over an index that it builds of Python's language reference, cut into passages of at
most 48 tokens: prompts have one to three of them, answers 8 to 12 tokens, so that it keeps one core busy for about a
quarter of an hour. First the engine says alone, in this process, what each request must be answered with. Then come the
requests: 10% are cancelled midway, 5% malformed, 2% too large; the others are asked whole, as a stream of /v1/rag/query
or as a streamed chat, and compared with the engine. Meanwhile documents are added, looked up and deleted, so that store
and index are written all the time.

After 30% of the requests, the server is killed (SIGKILL) while all clients wait. Then `store verify` reads the whole
store, every document whose job had ended must still be there, and a new server takes the requests that the kill cut off
and the rest. At the end it is told to stop, and must exit with 0.

Progress goes to stderr, a JSON line at a time; the verdict is the last line of stdout and OUT/soak.json. Exit code 1 if
anything is wrong. Index and expected answers are kept in OUT and found again by the next run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from blendserve.config import Config as EngineConfig
from blendserve.core import Passage
from blendserve.engine.engine import Engine
from blendserve.serve.child import Child, serve_command
from blendserve.serve.config import load_settings
from blendserve.store import LMDBStore, VerifyReport

QUESTIONS = ("What is it about?", "Which statement is meant?", "When does that happen?", "Who may do this?")
KINDS = {"good": 83, "cancelled": 10, "malformed": 5, "oversize": 2}
ERROR = {"message", "type", "param", "code"}
MEMORY_GROWTH = 1.05  # of the last third of the requests
KILL_AT = 0.3  # of the requests
SETTINGS = """\
reader: {dtype: float32}
retrieve: {chunk_tokens: 48}
store: {cap_gb: 2}
blend: {method: blend}
serve: {slots: 8, slot_tokens: 1024, log_text: false}
"""
KEPT_S = 1  # connections: less than the server keeps them, or it closes some while a request is on its way
GONE = (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)

Start = Callable[[], Child]
Verify = Callable[[], VerifyReport]


class Soak:
    """The requests, and what came of them. `expected[i]` is what `asks[i]` must be answered with."""

    def __init__(
        self, asks: Sequence[dict[str, Any]], expected: Sequence[str], requests: int, clients: int, seed: int
    ) -> None:
        self.asks, self.expected, self.clients = asks, expected, clients
        rng = random.Random(seed)
        kinds = rng.choices(list(KINDS), list(KINDS.values()), k=requests)
        self.todo = deque((kind, rng.randrange(len(asks)), rng.random()) for kind in kinds)
        self.requests, self.kill_at = requests, round(KILL_AT * requests)
        self.done: Counter[str] = Counter()
        self.cut_off = 0
        self.wrong: list[str] = []
        self.memory: list[float] = []
        self.documents: dict[str, int] = {}  # whose job has ended, and their chunks
        self.written, self._name = 0, f"soak-{time.time_ns():x}"
        self.model, self.collection = "", ""

    async def run(self, server: Child, stop_at: int) -> None:
        """All clients at once, until so many requests have been answered; with `stop_at`, the server is killed then."""
        limits = httpx.Limits(max_connections=None, keepalive_expiry=KEPT_S)
        async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as http:
            self.http = http
            await self._introduce()
            killed = asyncio.Event()
            tasks = [asyncio.create_task(self._client(killed)) for _ in range(self.clients)]
            writer = asyncio.create_task(self._write(killed))
            watch = asyncio.create_task(self._watch(server))
            if stop_at < self.requests:
                while self._answered < stop_at:
                    await asyncio.sleep(0.01)
                killed.set()
                server.kill()
            await asyncio.gather(*tasks)
            killed.set()
            await writer
            watch.cancel()

    async def _introduce(self) -> None:
        model = (await self.http.get("/v1/models")).json()["data"][0]
        self.model, self.collection = model["id"], model["x_blendserve"]["collections"][0]

    @property
    def _answered(self) -> int:
        return sum(self.done.values())

    async def _client(self, killed: asyncio.Event) -> None:
        while self.todo and not killed.is_set():
            kind, which, chance = job = self.todo.popleft()
            try:
                await getattr(self, f"_{kind}")(which, chance)
            except GONE as error:
                if killed.is_set():
                    self.cut_off += 1
                    self.todo.append(job)
                    return
                self._problem(kind, error)
            except (httpx.HTTPError, KeyError, ValueError, AssertionError) as error:
                self._problem(kind, error)
            self.done[kind] += 1

    def _problem(self, kind: str, error: Exception) -> None:
        self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
        _tell({"wrong": self.wrong[-1][:300]})

    async def _watch(self, server: Child) -> None:
        """A line of progress and the server's memory, now and then."""
        start, told = time.perf_counter(), -1
        while True:
            await asyncio.sleep(0.2)
            if self._answered // 25 > told:
                told = self._answered // 25
                self.memory.append(server.memory_mb)
                seconds = round(time.perf_counter() - start)
                _tell(
                    {
                        "seconds": seconds,
                        "done": dict(self.done),
                        "memory_mb": self.memory[-1],
                        "wrong": len(self.wrong),
                    }
                )

    async def _write(self, killed: asyncio.Event) -> None:
        """Documents come and go; what a job has ended for is there."""
        try:
            while not killed.is_set():
                self.written += 1
                await self._write_one(f"{self._name}-{self.written}")
        except (*GONE, KeyError, AssertionError) as error:
            if not (killed.is_set() and isinstance(error, GONE)):
                self._problem("document", error)

    async def _write_one(self, name: str) -> None:
        text = " ".join(f"Document {name} says {i}." for i in range(8))
        body = {"collection": self.collection, "documents": [{"id": name, "text": text}]}
        job = (await self.http.post("/v1/documents", json=body)).json()
        while job["state"] == "running":
            await asyncio.sleep(0.3)
            job = (await self.http.get(f"/v1/jobs/{job['id']}")).json()
        _require(job["state"] == "done", f"the job of {name} {job['state']}: {job['error']}")
        self.documents[name] = job["chunks"]
        if len(self.documents) > 5:
            oldest = next(iter(self.documents))
            del self.documents[oldest]
            gone = await self.http.delete(f"/v1/documents/{oldest}", params={"collection": self.collection})
            _require(gone.status_code == 200, f"{oldest} could not be deleted: {gone.text[:200]}")

    async def find_documents(self, server: Child) -> None:
        """After a kill: what was there is there."""
        async with httpx.AsyncClient(base_url=server.url, timeout=None) as http:
            for name, chunks in self.documents.items():
                which = {"collection": self.collection, "documents": [name]}
                found = (await http.post("/v1/cache/lookup", json=which)).json()
                if found != {"chunks": chunks, "found": chunks, "there": [True] * chunks}:
                    self.wrong.append(f"document {name} of {chunks} chunks after the kill: {found}")

    async def _good(self, which: int, chance: float) -> None:
        way = (self._whole, self._query, self._chat)[int(3 * chance)]
        text = await way(which)
        _require(text == self.expected[which], f"{way.__name__}: {text!r}, not {self.expected[which]!r}")

    async def _whole(self, which: int) -> str:
        answer = await self.http.post("/v1/rag/query", json=self.asks[which])
        _require(answer.status_code == 200, f"status {answer.status_code}: {answer.text[:200]}")
        return str(answer.json()["text"])

    async def _query(self, which: int) -> str:
        events = [event async for event in self._events("/v1/rag/query", self.asks[which])]
        _require(events[0]["event"] == "passages", f"{events[0]['event']} comes first")
        text = "".join(e["text"] for e in events if e["event"] == "text")
        _require(events[-1]["text"] == text, "pieces do not join to the text")
        return text

    async def _chat(self, which: int) -> str:
        ask = dict(self.asks[which])
        question, new = ask.pop("question"), ask.pop("max_tokens")
        messages = [{"role": "user", "content": question}]
        body = {"model": self.model, "messages": messages, "max_tokens": new, "x_blendserve": ask}
        events = [event async for event in self._events("/v1/chat/completions", body)]
        return "".join(e["choices"][0]["delta"].get("content") or "" for e in events)

    async def _cancelled(self, which: int, chance: float) -> None:
        """Leave after the passages or after some text."""
        leave = 1 + int(4 * chance)
        async for _ in self._events("/v1/rag/query", self.asks[which]):
            leave -= 1
            if not leave:
                return

    async def _malformed(self, which: int, chance: float) -> None:
        ask = self.asks[which]
        bodies = (
            json.dumps({**ask, "ratio": 7}),
            json.dumps({**ask, "question": None}),
            json.dumps({**ask, "passages": "none"}),
            json.dumps(ask)[:-5],
            '"\\ud800"',
        )
        headers = {"Content-Type": "application/json"}
        body = bodies[int(len(bodies) * chance)]
        _refused(await self.http.post("/v1/rag/query", content=body, headers=headers), 400)

    async def _oversize(self, which: int, chance: float) -> None:
        """An answer that no slot can hold, or a body beyond the limit."""
        long = [{"text": "far too long " * 2**18}]
        more, status = ({"max_tokens": 10**6}, 400) if chance < 0.5 else ({"passages": long}, 413)
        _refused(await self.http.post("/v1/rag/query", json={**self.asks[which], **more}), status)

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            _require(answer.status_code == 200, f"status {answer.status_code}")
            async for line in answer.aiter_lines():
                if line.startswith(
                    "data: {"
                ):  # neither the end nor a comment that keeps the connection alive
                    yield json.loads(line.removeprefix("data: "))


def _require(good: bool, problem: str) -> None:
    if not good:
        raise AssertionError(problem)


def _refused(answer: httpx.Response, status: int) -> None:
    _require(answer.status_code == status, f"status {answer.status_code}, not {status}: {answer.text[:200]}")
    _require(set(answer.json()["error"]) == ERROR, f"an error of another shape: {answer.text[:200]}")


def _tell(line: dict[str, Any]) -> None:
    print(json.dumps(line), file=sys.stderr, flush=True)


def run(soak: Soak, start: Start, verify: Verify) -> dict[str, Any]:
    """Two servers, a kill between them -> the verdict."""
    with start() as server:
        asyncio.run(soak.run(server, soak.kill_at))
    _tell({"killed_after": soak._answered, "cut_off": soak.cut_off})
    verified = verify()
    _tell({"verify": verified.to_dict()})
    soak.memory.clear()
    with start() as server:
        asyncio.run(soak.find_documents(server))
        asyncio.run(soak.run(server, soak.requests))
        leaked = asyncio.run(_in_use(server.url))
        exit_code = server.stop()
    after_warm_up = soak.memory[len(soak.memory) // 2 :] or [0.0]
    flat = after_warm_up[-1] <= MEMORY_GROWTH * after_warm_up[0]
    return {
        "requests": dict(soak.done),
        "clients": soak.clients,
        "cut_off_and_asked_again": soak.cut_off,
        "documents_written": soak.written,
        "wrong": len(soak.wrong),
        "first_wrong": soak.wrong[:3],
        "store_verify": {"good": verified.good, "bad": len(verified.bad)},
        "leaked": leaked,
        "memory_mb": soak.memory,
        "memory_flat": flat,
        "exit_code": exit_code,
        "passed": not (soak.wrong or leaked or verified.bad or exit_code) and flat,
    }


async def _in_use(url: str) -> float:
    """Slots in use and requests waiting when nobody asks any more."""
    names = ("slots_in_use", "queue_length")
    async with httpx.AsyncClient(base_url=url, timeout=None) as http:
        for _ in range(100):
            text = (await http.get("/metrics")).text
            found = [re.search(rf"^blendserve_{name} (\S+)$", text, re.MULTILINE) for name in names]
            in_use = sum(float(match[1]) if match else 1.0 for match in found)
            if not in_use:
                break
            await asyncio.sleep(0.1)
        return in_use


def make_asks(passages: Sequence[Passage], n: int, seed: int) -> list[dict[str, Any]]:
    """Different good requests, by every method but `auto`, whose choice depends on the clock."""
    rng = random.Random(seed)
    return [
        {
            "question": rng.choice(QUESTIONS),
            "passages": [{"text": p.text, "title": p.title} for p in rng.sample(passages, rng.randint(1, 3))],
            "method": rng.choice(("blend", "blend", "blend", "prefix", "full")),
            "max_tokens": rng.randint(8, 12),
        }
        for _ in range(n)
    ]


def answers(engine: Engine, asks: Sequence[dict[str, Any]]) -> list[str]:
    """What the engine says to each request alone."""
    said = []
    for ask in asks:
        passages = [Passage(p["text"], p["title"]) for p in ask["passages"]]
        options = {"method": ask["method"], "max_new_tokens": ask["max_tokens"]}
        said.append(engine.answer(ask["question"], passages, **options).text)
        _tell({"engine": len(said), "of": len(asks), "said": said[-1]})
    return said


def _prepare(out: Path, distinct: int, seed: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Index, KV and expected answers, unless an earlier run left them."""
    from blendserve.retrieve import language_reference

    kept, settings = out / "expected.json", out / "soak.yaml"
    out.mkdir(parents=True, exist_ok=True)
    settings.write_text(SETTINGS)
    if kept.exists() and len(found := json.loads(kept.read_text())) == distinct:
        return [ask for ask, _ in found], [said for _, said in found]
    _tell({"building": str(out / "index")})
    config = EngineConfig(**load_settings(settings).model_dump(exclude={"serve"}))
    with Engine.build(out / "index", language_reference()[:3], config) as engine:
        assert engine.index is not None
        passages = random.Random(seed).sample(engine.index.passages, 24)
        asks = make_asks(passages, distinct, seed)
        engine.precompute(passages)
        said = answers(engine, asks)
    kept.write_text(json.dumps(list(zip(asks, said, strict=True)), indent=1))
    return asks, said


def _verify(store: Path) -> VerifyReport:
    with LMDBStore(store, 2 * 10**9, read_only=True) as opened:
        return opened.verify()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/soak"), help="folder of index and verdict")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--distinct", type=int, default=24, help="different good requests")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    asks, expected = _prepare(args.out, args.distinct, args.seed)
    soak = Soak(asks, expected, args.requests, args.clients, args.seed)
    command = serve_command("--index", str(args.out / "index"), "--config", str(args.out / "soak.yaml"))
    verdict = run(
        soak, lambda: Child(command, args.out / "server.log"), lambda: _verify(args.out / "index" / "kv")
    )
    (args.out / "soak.json").write_text(json.dumps(verdict, indent=1))
    print(json.dumps(verdict))
    return 0 if verdict["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
