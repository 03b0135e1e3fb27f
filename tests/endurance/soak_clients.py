"""Clients of a long run: one that behaves well, and many that leave, retry, read slowly or send garbage."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from tests.support.http import Client, bearer, events

PAUSE_S = 0.25  # mean time between two actions of a client
GOOD_PAUSE_S = 0.5
IDLE_S = 5.0  # that an idle socket is kept open
SLOW_S = 0.2  # between two small reads of a slow reader
PATIENT_S = 120.0
BUSY = (429, 503)  # the server may refuse; a client sends the request again
QUERY = "/v1/rag/query"
RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: close with RST


class Ask(NamedTuple):
    """A request of a tenant, and what full prefill answers."""

    body: dict[str, Any]
    expected: str


@dataclass
class Tally:
    """What all clients saw. Thread-safe: lists are only appended to."""

    actions: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    latencies: list[tuple[float, float]] = field(default_factory=list)  # of the good client: (time, seconds)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, which: Counter[str], name: object) -> None:
        with self.lock:
            which[str(name)] += 1

    def compare(self, ask: Ask, text: str) -> None:
        if text != ask.expected:
            self.wrong.append(f"{ask.body['question']!r}: {text!r}, not {ask.expected!r}"[:300])


class SoakClient(threading.Thread):
    """One client of one tenant. Its actions are drawn from a seed; it ends when `ended` is set."""

    def __init__(
        self, url: str, key: str, asks: list[Ask], tally: Tally, ended: threading.Event, seed: int
    ) -> None:
        super().__init__(name=f"client-{seed}")
        # A connection is kept for less time than the server keeps it, or the server closes some that are used again.
        self.http = httpx.Client(
            base_url=url, timeout=PATIENT_S, limits=httpx.Limits(max_connections=4, keepalive_expiry=1)
        )
        self.client = Client(url, self.http, key)
        self.asks, self.tally, self.ended, self.dice = asks, tally, ended, random.Random(seed)
        self.actions: dict[Callable[[], None], int] = {
            self.whole: 20,
            self.stream: 15,
            self.leave: 25,
            self.leave_stream: 12,
            self.read_slowly: 5,
            self.retry: 6,
            self.converse: 8,
            self.send_garbage: 10,
            self.idle: 3,
        }

    def run(self) -> None:
        with self.http:
            while not self.ended.wait(self.dice.expovariate(1 / PAUSE_S)):
                (action,) = self.dice.choices([*self.actions], [*self.actions.values()])
                self.tally.count(self.tally.actions, action.__name__)
                try:
                    action()
                except Exception as error:
                    if not self.ended.is_set():
                        self.tally.failed.append(f"{action.__name__}: {error!r}"[:300])

    # Clients that behave

    def whole(self) -> None:
        ask = self.dice.choice(self.asks)
        self._take(ask, self.client.post(QUERY, ask.body))

    def stream(self) -> None:
        ask = self.dice.choice(self.asks)
        body = {**ask.body, "stream": True}
        with self.http.stream("POST", QUERY, json=body, headers=bearer(self.client.key)) as response:
            self.tally.count(self.tally.statuses, response.status_code)
            if response.status_code == 200:
                found = events([*response.iter_lines()])
                self.tally.compare(ask, "".join(e["text"] for e in found if e.get("event") == "text"))

    def retry(self) -> None:
        """Give up after a moment, and ask the same again, until it is answered."""
        ask = self.dice.choice(self.asks)
        for timeout in (0.02, 0.1, PATIENT_S):
            with suppress(httpx.TimeoutException):
                headers = bearer(self.client.key)
                self._take(ask, self.http.post(QUERY, json=ask.body, headers=headers, timeout=timeout))
                return

    def converse(self) -> None:
        """Two turns of a plain chat, whose KV is kept in between."""
        text = " ".join(p["text"] for p in self.dice.choice(self.asks).body.get("passages") or [])
        messages = [{"role": "user", "content": f"{text} What is this about?"}]
        model = self.client.get("/v1/models").json()["data"][0]["id"].partition(":")[0]
        salt = f"user-{self.dice.randrange(200)}"
        for _ in range(2):
            body = {"model": f"{model}:chat", "messages": messages, "max_tokens": 8, "cache_salt": salt}
            response = self.client.post("/v1/chat/completions", body)
            self._expect(response.status_code, 200, *BUSY)
            if response.status_code != 200:
                return
            said = response.json()["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]

    # Clients that do not

    def leave(self) -> None:
        """Close the connection at any moment, often while the request is prepared."""
        ask = self.dice.choice(self.asks)
        body = json.dumps({**ask.body, "max_tokens": 64, "stream": self.dice.random() < 0.5}).encode()
        with self.client.sent(QUERY, f"Content-Length: {len(body)}", body=body) as connection:
            self.ended.wait(self.dice.choice((0.0, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.3)))
            if self.dice.random() < 0.3:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    def leave_stream(self) -> None:
        body = {**self.dice.choice(self.asks).body, "max_tokens": 64, "stream": True}
        with self.http.stream("POST", QUERY, json=body, headers=bearer(self.client.key)) as response:
            for n, _ in enumerate(response.iter_lines()):
                if n >= self.dice.randrange(6):
                    return

    def read_slowly(self) -> None:
        ask = self.dice.choice(self.asks)
        body = json.dumps({**ask.body, "stream": True}).encode()
        headers = (f"Content-Length: {len(body)}", "Connection: close")
        with self.client.sent(QUERY, *headers, body=body) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            for _ in range(25):
                if not connection.recv(64) or self.ended.wait(SLOW_S):
                    return

    def send_garbage(self) -> None:
        """Half a header, broken JSON, wrong types, a body that is too large."""
        ask, kind = self.dice.choice(self.asks).body, self.dice.randrange(6)
        if kind == 0:
            with self.client.sent(QUERY) as connection:
                connection.sendall(b"POST /v1/rag/query HT")
        elif kind == 1:  # a body that never comes
            with self.client.sent(QUERY, "Content-Length: 500", body=b'{"question": "'):
                self.ended.wait(self.dice.random())
        elif kind == 2:
            with self.client.sent(QUERY, "Content-Length: 99999999999") as connection:
                self._expect(int(connection.recv(4096).split()[1]), 413)
        else:
            wrong = (b"{", b'"\xff', json.dumps({**ask, "max_tokens": [1]}).encode())[kind - 3]
            headers = {**bearer(self.client.key), "Content-Type": "application/json"}
            status = self.http.post(QUERY, content=wrong, headers=headers).status_code
            self._expect(status, 400, *BUSY)

    def idle(self) -> None:
        """A connection on which nothing is said."""
        host, port = self.client.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENT_S) as connection:
            if self.dice.random() < 0.5:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost:")
            self.ended.wait(IDLE_S * self.dice.random())

    def _take(self, ask: Ask, response: httpx.Response) -> None:
        self._expect(response.status_code, 200, *BUSY)
        if response.status_code == 200:
            self.tally.compare(ask, response.json()["text"])

    def _expect(self, status: int, *expected: int) -> None:
        self.tally.count(self.tally.statuses, status)
        assert status in expected, f"{status}, not {expected}"


class GoodClient(SoakClient):
    """Asks whole requests, one after the other; how long each takes is recorded."""

    def run(self) -> None:
        with self.http:
            while not self.ended.wait(GOOD_PAUSE_S):
                began = time.monotonic()
                try:
                    self.whole()
                except Exception as error:
                    if not self.ended.is_set():
                        self.tally.failed.append(f"good: {error!r}"[:300])
                else:
                    self.tally.latencies.append((began, time.monotonic() - began))
