"""The hostile client: a process that sends what costs a server most, as fast as answers come, over several connections.

A process of its own, and the least nice of all: who is hostile computes elsewhere, so what its own side takes of this
machine is to be only what the server and the other clients leave.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from typing import Any

import httpx

from blendserve.errors import ConfigError

WORDS = 50_000  # of a long question
MANY = 1000  # messages or passages: as many as a request may have
STOPS, DEPTH = 15_000, 100_000
CHAT, QUERY, DOCUMENTS = "/v1/chat/completions", "/v1/rag/query", "/v1/documents"
NO_ANSWER, GIVEN_UP = "no answer", "given up"
PATIENCE = (
    1.0  # seconds; whoever waits longer, behind their own documents for one, is not at their most hostile
)
LAST = 19  # of niceness


def _text(size: int) -> str:
    """So many characters, of words."""
    return ("more and more words " * (1 + size // 20))[:size]


def _filled(body: dict[str, Any], name: str, size: int) -> bytes:
    """JSON of exactly `size` bytes, of which one text takes what is left."""
    bare = len(json.dumps({**body, name: ""}))
    return json.dumps({**body, name: _text(size - bare)}).encode()


def _chat(model: str, *said: str) -> bytes:
    return json.dumps(
        {"model": model, "messages": [{"role": "user", "content": text} for text in said]}
    ).encode()


def _document(size: int) -> bytes:
    start, end = b'{"documents": [', b"]}"
    return start + _filled({"title": "Long"}, "text", size - len(start) - len(end)) + end


Asked = dict[str, tuple[str, bytes]]  # kind -> path and body
Make = Callable[[str, int], tuple[str, bytes]]  # the model's name, the largest body's bytes -> path and body
KINDS: dict[str, Make] = {
    "question": lambda model, _: (CHAT, _chat(model, "why " * WORDS)),
    "largest": lambda _, most: (QUERY, _filled({}, "question", most)),
    "larger": lambda _, most: (QUERY, _filled({}, "question", most + 1)),
    "messages": lambda model, _: (CHAT, _chat(model, *("And then, what was it that they did?",) * MANY)),
    "passages": lambda _, most: (QUERY, _passages(most)),
    "document": lambda _, most: (DOCUMENTS, _document(most)),
    "stops": lambda _, most: (
        QUERY,
        json.dumps({"question": "Why?", "stop": [f"stop {n}" for n in range(STOPS)]}).encode(),
    ),
    "deep": lambda _, most: (QUERY, b'{"question": ' + b"[" * DEPTH + b"]" * DEPTH + b"}"),
}


def _passages(most: int) -> bytes:
    """As many as may be, of nearly the largest body together."""
    texts = [{"text": f"{n} {_text(most // MANY - 40)}"} for n in range(MANY)]
    return json.dumps({"question": "Why?", "passages": texts}).encode()


def chosen(words: Sequence[str]) -> tuple[str, ...]:
    """Kinds of requests, all if none is given. Raises ConfigError."""
    if unknown := [word for word in words if word not in KINDS]:
        raise ConfigError(
            f"there is no kind of hostile request {unknown[0]!r}: give some of {', '.join(KINDS)}"
        )
    return tuple(dict.fromkeys(words)) or tuple(KINDS)


@dataclass(slots=True)
class Got:
    """What requests of one kind came to."""

    statuses: dict[str, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def add(self, status: str, seconds: float) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self.seconds.append(seconds)


async def _connection(
    http: httpx.AsyncClient, turns: Iterator[str], asked: Asked, got: dict[str, Got], ended: asyncio.Event
) -> None:
    """Requests in turns, until it is cancelled; one that is on its way then is not counted.

    ended: set by then, as before Python 3.12 `wait_for` may lose a cancellation.
    """
    for kind in turns:
        if ended.is_set():
            return
        path, body = asked[kind]
        start = time.perf_counter()
        try:
            response = await asyncio.wait_for(http.post(path, content=body), PATIENCE)
            status = str(response.status_code)
        except asyncio.TimeoutError:
            status = GIVEN_UP
        except httpx.HTTPError:
            status = NO_ANSWER
        got[kind].add(status, time.perf_counter() - start)


async def attack(task: dict[str, Any], asked: Asked, until: Awaitable[Any]) -> dict[str, Got]:
    """Send without a pause until then -> what each kind came to. The connections share one list of turns."""
    got = {kind: Got() for kind in asked}
    headers = {"Authorization": f"Bearer {task['key']}", "Content-Type": "application/json"}
    turns, ended = cycle(asked), asyncio.Event()
    async with httpx.AsyncClient(base_url=task["url"], timeout=None, headers=headers) as http:
        sending = [
            asyncio.create_task(_connection(http, turns, asked, got, ended))
            for _ in range(task["connections"])
        ]
        await until
        ended.set()
        for connection in sending:
            connection.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
    return got


async def _run(task: dict[str, Any], asked: Asked) -> dict[str, Any]:
    got = await attack(task, asked, asyncio.to_thread(sys.stdin.readline))
    return {kind: asdict(found) for kind, found in got.items()}


def main() -> None:
    """A task on stdin, and that it begins on stdout; a line on stdin ends it, and what came of it is on stdout."""
    task = json.loads(sys.stdin.readline())
    os.nice(LAST)
    asked = {kind: KINDS[kind](task["model"], task["most"]) for kind in task["kinds"]}
    print(json.dumps({"begun": True}), flush=True)
    print(json.dumps(asyncio.run(_run(task, asked))), flush=True)


if __name__ == "__main__":
    main()
