"""Requests of every kind at once, against a running server: no wrong answer, no leaked slot, flat memory, right errors.

    blendserve serve --index indexes/demo --no-log-text &
    python scripts/soak_serving.py http://127.0.0.1:8000 --index indexes/demo

Of the requests, 10% are cancelled midway, 5% malformed and 2% too large. The others are greedy, and each is compared with
what the server says to the same request alone, before the load; with `--engine`, also with what the engine
says in this process (both then need the reader in fp32 to agree to the token: reader.dtype).

Slots and queue are read from /metrics at the end, and memory of the process `--pid` before, after a warm-up third, and at
the end. Exit code 1 if anything is wrong; the last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

QUESTIONS = ("What is it about?", "Which statement is meant?", "When does that happen?", "Who may do this?")
ERROR = {"message", "type", "param", "code"}
MEMORY_GROWTH = 1.05  # of the second two thirds


class Soak:
    """The plan, and what came of it."""

    def __init__(self, args: argparse.Namespace, http: httpx.AsyncClient) -> None:
        self.args, self.http = args, http
        lines = [json.loads(line) for line in (args.index / "passages.jsonl").open()]
        pool = [{"text": p["text"], "title": p["title"]} for p in lines]
        rng = random.Random(args.seed)
        self.asks = [self._ask(rng, pool) for _ in range(args.distinct)]
        self.expected: list[str] = []
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []

    def _ask(self, rng: random.Random, pool: Sequence[dict[str, str]]) -> dict[str, Any]:
        return {
            "question": rng.choice(QUESTIONS),
            "passages": rng.sample(pool, min(len(pool), rng.randint(1, 4))),
            "method": rng.choice(("blend", "blend", "prefix", "full")),
            "max_tokens": rng.randint(4, 16),
        }

    async def prepare(self) -> None:
        """Every chunk's KV in the store, then what each request says alone."""
        for ask in self.asks:
            done = (await self.http.post("/v1/cache/warm", json={"passages": ask["passages"]})).json()
            while (await self.http.get(f"/v1/jobs/{done['id']}")).json()["state"] == "running":
                await asyncio.sleep(0.05)
        for ask in self.asks:
            self.expected.append((await self.http.post("/v1/rag/query", json=ask)).json()["text"])

    async def client(self, number: int, n: int) -> None:
        rng = random.Random(f"{self.args.seed} {number}")
        for _ in range(n):
            which = rng.randrange(len(self.asks))
            kind = rng.choices(("good", "cancelled", "malformed", "oversize"), (83, 10, 5, 2))[0]
            try:
                await getattr(self, f"_{kind}")(rng, which)
                self.seen[kind] += 1
            except (httpx.HTTPError, KeyError, ValueError, AssertionError) as error:
                self.wrong.append(f"{kind}: {type(error).__name__}: {error}")

    async def _good(self, rng: random.Random, which: int) -> None:
        if rng.random() < 0.5:
            answer = await self.http.post("/v1/rag/query", json=self.asks[which])
            _require(answer.status_code == 200, f"status {answer.status_code}: {answer.text[:200]}")
            text = answer.json()["text"]
        else:
            events = [event async for event in self._stream(which)]
            text = "".join(e["text"] for e in events if e["event"] == "text")
            _require(events[-1]["text"] == text, "pieces do not join to the text")
        _require(text == self.expected[which], f"{text!r} instead of {self.expected[which]!r}")

    async def _cancelled(self, rng: random.Random, which: int) -> None:
        leave = rng.randint(1, 4)
        async for _ in self._stream(which):
            leave -= 1
            if not leave:
                return

    async def _malformed(self, rng: random.Random, which: int) -> None:
        ask = self.asks[which]
        body = rng.choice(
            [
                json.dumps({**ask, "ratio": 7}),
                json.dumps({**ask, "question": None}),
                json.dumps({**ask, "passagse": []}),
                json.dumps(ask)[:-5],
                '"\\ud800"',
            ]
        )
        headers = {"Content-Type": "application/json"}
        _refused(await self.http.post("/v1/rag/query", content=body, headers=headers), 400)

    async def _oversize(self, rng: random.Random, which: int) -> None:
        if rng.random() < 0.5:
            _refused(
                await self.http.post("/v1/rag/query", json={**self.asks[which], "max_tokens": 10**6}), 400
            )
        else:
            long = [{"text": "far too long " * 2**18}]
            _refused(await self.http.post("/v1/rag/query", json={**self.asks[which], "passages": long}), 413)

    async def _stream(self, which: int) -> Any:
        async with self.http.stream(
            "POST", "/v1/rag/query", json={**self.asks[which], "stream": True}
        ) as answer:
            _require(answer.status_code == 200, f"status {answer.status_code}")
            async for line in answer.aiter_lines():
                if line:
                    yield json.loads(line.removeprefix("data: "))


def _require(good: bool, problem: str) -> None:
    if not good:
        raise AssertionError(problem)


def _refused(answer: httpx.Response, status: int) -> None:
    _require(answer.status_code == status, f"status {answer.status_code}, not {status}: {answer.text[:200]}")
    _require(set(answer.json()["error"]) == ERROR, f"an error of another shape: {answer.text[:200]}")


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=args.clients)
    async with httpx.AsyncClient(base_url=args.url, timeout=300, limits=limits) as http:
        soak = Soak(args, http)
        await soak.prepare()
        memory = [_memory(args.pid)]
        for part in range(3):
            share = args.requests // 3 // args.clients + 1
            await asyncio.gather(*(soak.client(part * args.clients + i, share) for i in range(args.clients)))
            memory.append(_memory(args.pid))
        if args.engine:
            soak.wrong += _compare(args, soak)
        leaked = await _in_use(http)
    flat = not args.pid or memory[3] <= MEMORY_GROWTH * memory[1]
    passed = not soak.wrong and not leaked and flat
    return {
        "requests": dict(soak.seen),
        "wrong": len(soak.wrong),
        "first_wrong": soak.wrong[:3],
        "leaked": leaked,
        "memory_mb": memory,
        "passed": passed,
    }


async def _in_use(http: httpx.AsyncClient) -> float:
    """Slots in use and requests waiting when nobody asks any more."""
    for _ in range(100):
        text = (await http.get("/metrics")).text
        names = ("slots_in_use", "queue_length")
        found = [re.search(rf"^blendserve_{name} (\S+)$", text, re.MULTILINE) for name in names]
        in_use = sum(float(match.group(1)) for match in found if match)
        if not in_use:
            break
        await asyncio.sleep(0.1)
    return in_use


def _memory(pid: int | None) -> float:
    """Resident megabytes."""
    if pid is None:
        return 0.0
    status = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"VmRSS:\s+(\d+) kB", status)
    return round(int(match.group(1)) / 1024, 1) if match else 0.0


def _compare(args: argparse.Namespace, soak: Soak) -> list[str]:
    """The engine's own answers, by the settings that the server was started with."""
    from blendserve.config import Config
    from blendserve.core import Passage
    from blendserve.engine import Engine

    config = Config.load(args.engine)
    wrong = []
    with Engine.open(args.index, config) as engine:
        for ask, expected in zip(soak.asks, soak.expected, strict=True):
            passages = [Passage(p["text"], p["title"]) for p in ask["passages"]]
            said = engine.answer(
                ask["question"], passages, method=ask["method"], max_new_tokens=ask["max_tokens"]
            ).text
            if said != expected:
                wrong.append(f"engine: {said!r}, server: {expected!r}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="of the server")
    parser.add_argument("--index", type=Path, required=True, help="folder whose passages are asked about")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--distinct", type=int, default=24, help="different good requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pid", type=int, help="of the server, to watch its memory")
    parser.add_argument("--engine", type=Path, help="settings file: compare with the engine in this process")
    result = asyncio.run(_run(parser.parse_args()))
    print(json.dumps(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
