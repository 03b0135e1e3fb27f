"""The hostile client: a process that sends what costs a server most, as fast as answers come, on several connections.

The process has the lowest priority: a real hostile client computes on another machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import cycle
from typing import Any

import httpx

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


def _filled(size: int, before: str, after: str) -> bytes:
    """JSON of exactly `size` bytes: words between these two parts."""
    return f"{before}{_text(size - len(before) - len(after))}{after}".encode()


def _chat(model: str, *texts: str) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"model": model, "messages": messages}).encode()


def _query(**body: Any) -> bytes:
    return json.dumps({"question": "Why?", **body}).encode()


def _passages(size: int) -> bytes:
    """As many as a request may have, of nearly `size` bytes together."""
    return _query(passages=[{"text": f"{n} {_text(size // MANY - 40)}"} for n in range(MANY)])


DOCUMENT = '{"documents": [{"title": "Long", "text": "', '"}]}'
# kind -> (the model's name, the largest body's bytes) -> path and body
KINDS: Mapping[str, Callable[[str, int], tuple[str, bytes]]] = {
    "question": lambda model, _: (CHAT, _chat(model, "why " * WORDS)),
    "largest": lambda _, most: (QUERY, _filled(most, '{"question": "', '"}')),
    "larger": lambda _, most: (QUERY, _filled(most + 1, '{"question": "', '"}')),
    "messages": lambda model, _: (CHAT, _chat(model, *("And then, what was it that they did?",) * MANY)),
    "passages": lambda _, most: (QUERY, _passages(most)),
    "document": lambda _, most: (DOCUMENTS, _filled(most, *DOCUMENT)),
    "stops": lambda _, __: (QUERY, _query(stop=[f"stop {n}" for n in range(STOPS)])),
    "deep": lambda _, __: (QUERY, b'{"question": ' + b"[" * DEPTH + b"]" * DEPTH + b"}"),
}
Statuses = dict[str, dict[str, int]]  # kind -> status -> count


def attacking(task: dict[str, Any]) -> tuple[None, Callable[[str], Statuses]]:
    """ "begin" begins; "end" ends, and gets the statuses."""
    os.nice(NICENESS)
    bodies = {kind: make(task["model"], task["max_body"]) for kind, make in KINDS.items()}
    turns, counts = cycle(bodies), {kind: Counter[str]() for kind in KINDS}
    over = threading.Event()
    headers = {"Authorization": f"Bearer {task['key']}", "Content-Type": "application/json"}

    async def connection(http: httpx.AsyncClient) -> None:
        while not over.is_set():
            kind = next(turns)
            path, body = bodies[kind]
            try:
                status = str((await asyncio.wait_for(http.post(path, content=body), PATIENCE_S)).status_code)
            except asyncio.TimeoutError:
                status = GAVE_UP
            except httpx.HTTPError:
                status = NO_ANSWER
            counts[kind][status] += 1

    async def attack() -> None:
        async with httpx.AsyncClient(base_url=task["url"], timeout=None, headers=headers) as http:
            await asyncio.gather(*(connection(http) for _ in range(task["connections"])))

    attacking = threading.Thread(target=lambda: asyncio.run(attack()))

    def answer(order: str) -> Statuses:
        if order == "begin":
            attacking.start()
            return {}
        over.set()
        attacking.join()
        return {kind: dict(statuses) for kind, statuses in counts.items()}

    return None, answer
