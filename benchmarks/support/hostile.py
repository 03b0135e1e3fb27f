"""The hostile client: a process that sends what costs a server most, as fast as answers come, on several connections.

A process with the lowest priority: a hostile client computes elsewhere, so its own work may take of this machine only
what the server and the other clients leave.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from typing import Any

import httpx

from benchmarks.support.worker import serve

WORDS = 50_000  # of a long question
MANY = 1000  # messages or passages: as many as a request may have
STOPS, DEPTH = 15_000, 100_000
CHAT, QUERY, DOCUMENTS = "/v1/chat/completions", "/v1/rag/query", "/v1/documents"
NO_ANSWER, GAVE_UP = "no answer", "gave up"
PATIENCE_S = 1.0  # a client that waits longer is not at its most hostile
NICENESS = 19


def _text(size: int) -> str:
    """Words of `size` characters."""
    return ("more and more words " * (1 + size // 20))[:size]


def _filled(body: dict[str, Any], name: str, size: int) -> bytes:
    """JSON of exactly `size` bytes, whose text `name` takes what is left."""
    bare = len(json.dumps({**body, name: ""}))
    return json.dumps({**body, name: _text(size - bare)}).encode()


def _chat(model: str, *texts: str) -> bytes:
    return json.dumps(
        {"model": model, "messages": [{"role": "user", "content": text} for text in texts]}
    ).encode()


def _document(size: int) -> bytes:
    start, end = b'{"documents": [', b"]}"
    return start + _filled({"title": "Long"}, "text", size - len(start) - len(end)) + end


def _passages(size: int) -> bytes:
    """As many as a request may have, of nearly `size` bytes together."""
    texts = [{"text": f"{n} {_text(size // MANY - 40)}"} for n in range(MANY)]
    return json.dumps({"question": "Why?", "passages": texts}).encode()


def _stops() -> bytes:
    return json.dumps({"question": "Why?", "stop": [f"stop {n}" for n in range(STOPS)]}).encode()


# kind -> (the model's name, the largest body's bytes) -> path and body
KINDS: Mapping[str, Callable[[str, int], tuple[str, bytes]]] = {
    "question": lambda model, _: (CHAT, _chat(model, "why " * WORDS)),
    "largest": lambda _, most: (QUERY, _filled({}, "question", most)),
    "larger": lambda _, most: (QUERY, _filled({}, "question", most + 1)),
    "messages": lambda model, _: (CHAT, _chat(model, *("And then, what was it that they did?",) * MANY)),
    "passages": lambda _, most: (QUERY, _passages(most)),
    "document": lambda _, most: (DOCUMENTS, _document(most)),
    "stops": lambda _, __: (QUERY, _stops()),
    "deep": lambda _, __: (QUERY, b'{"question": ' + b"[" * DEPTH + b"]" * DEPTH + b"}"),
}
Statuses = dict[str, dict[str, int]]  # kind -> status -> count


async def _connection(
    http: httpx.AsyncClient, turns: Iterator[str], requests: Mapping[str, tuple[str, bytes]], got: Statuses,
    over: threading.Event,
) -> None:  # fmt: skip
    """Requests in turns until it is cancelled; `over`: before Python 3.12 `wait_for` may lose a cancellation."""
    for kind in turns:
        if over.is_set():
            return
        path, body = requests[kind]
        try:
            response = await asyncio.wait_for(http.post(path, content=body), PATIENCE_S)
            status = str(response.status_code)
        except asyncio.TimeoutError:
            status = GAVE_UP
        except httpx.HTTPError:
            status = NO_ANSWER
        got[kind][status] = got[kind].get(status, 0) + 1


async def _attack(task: Mapping[str, Any], got: Statuses, over: threading.Event) -> None:
    """Send without a pause until `over`. The connections share one list of turns."""
    requests = {kind: KINDS[kind](task["model"], task["max_body"]) for kind in KINDS}
    headers = {"Authorization": f"Bearer {task['key']}", "Content-Type": "application/json"}
    turns = cycle(requests)
    async with httpx.AsyncClient(base_url=task["url"], timeout=None, headers=headers) as http:
        connections = [
            asyncio.create_task(_connection(http, turns, requests, got, over))
            for _ in range(task["connections"])
        ]
        while not over.is_set():
            await asyncio.sleep(0.05)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


def _start(task: dict[str, Any]) -> tuple[float, Callable[[Any], Statuses]]:
    """Begins at once; the next request ends it, and is told the statuses."""
    os.nice(NICENESS)
    got: Statuses = {kind: {} for kind in KINDS}
    over = threading.Event()
    attacking = threading.Thread(target=lambda: asyncio.run(_attack(task, got, over)))
    attacking.start()

    def end(_: Any) -> Statuses:
        over.set()
        attacking.join()
        return got

    return time.time(), end


if __name__ == "__main__":
    serve(_start)
