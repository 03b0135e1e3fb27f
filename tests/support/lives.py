"""Requests to the whole server, without sockets: every client may leave, fail, stall or be cancelled at any moment.

The application runs on an event loop that the test pumps, the scheduler by steps that the test makes. Requests are held
up while they are prepared, as by a long prompt, where the gate is shut. Chunks come from another machine's store.
"""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from functools import cache
from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule

from blendserve.config import ServeConfig
from blendserve.engine.documents import Collections
from blendserve.engine.engine import Engine
from blendserve.errors import InputError
from blendserve.fetch import KVFetcher
from blendserve.fetch.tiered import TieredStore
from blendserve.models.loader import LoadedModel
from blendserve.serve.app import create_engine_app
from blendserve.serve.engine_client import LocalEngineClient
from blendserve.store import MemoryStore
from tests.support.engines import CONFIG, CONTEXT, QUESTIONS, toy_engine
from tests.support.engines import PASSAGES as TEXTS
from tests.support.http import MODEL, OWN, PATIENT_S
from tests.support.scheduler_requests import FaultyModel
from tests.support.toy import toy_llama, toy_model
from tests.support.waiting import eventually

SLOTS, MOST = 2, 4
REFUSED = (429, 503)
LEFT_S = 30.0  # in which all that ended requests occupy must be free
DEFAULT = {"question": QUESTIONS[0], "passages": OWN[:3]}
ASKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/rag/query", DEFAULT),
    ("/v1/rag/query", {**DEFAULT, "passages": OWN[2:], "refine": 1.0, "ratio": 0.3, "stream": True}),
    ("/v1/rag/query", {**DEFAULT, "check": True, "max_tokens": 3, "explain": True, "stream": True}),
    ("/v1/rag/query", {**DEFAULT, "check": True, "max_tokens": 3}),
    ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": QUESTIONS[1]}]}),
    ("/v1/messages", {"model": MODEL, "messages": [{"role": "user", "content": "Hm?"}], "stream": True}),
    ("/v1/cache/lookup", {"passages": OWN}),
)


@cache
def faulty_model() -> LoadedModel:
    """The toy model, whose next forward raises `decoder.fault`."""
    steady = toy_model(CONTEXT)
    return replace(steady, decoder=FaultyModel.of(toy_llama(len(steady.tokenizer), CONTEXT)))


@cache
def far_store() -> MemoryStore:
    """Another machine's, with the KV of all texts."""
    made = MemoryStore(2**26)
    toy_engine(made).precompute(TEXTS)
    return made


class Life:
    """One request, as its server sees it: an ASGI connection whose client the test moves."""

    def __init__(self, app: Any, path: str, body: dict[str, Any], address: str) -> None:
        raw = json.dumps(body).encode()
        self.path, self.is_stream, self._body = path, bool(body.get("stream")), [raw]
        self.left, self.reads = asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.status, self.text, self.is_sound, self.is_broken = 0, b"", True, False
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        headers.append((b"content-length", str(len(raw)).encode()))
        scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http"}
        scope["path"] = path
        scope |= {"raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers}
        scope |= {
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "client": (address, 1),
            "server": ("x", 80),
        }
        self.task = asyncio.ensure_future(app(scope, self.receive, self.send))

    async def receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        await self.reads.wait()
        if self.is_broken:
            raise OSError("the connection is broken")
        self.status = message.get("status", self.status)
        self.text += message.get("body", b"")


class ServerMachine(RuleBasedStateMachine):
    """A server whose clients do anything; at the end, nothing may be left of any of them."""

    lives = Bundle("lives")

    @initialize(prefetches=st.booleans(), is_open=st.booleans())
    def open(self, prefetches: bool = True, is_open: bool = True) -> None:
        self.n_threads = threading.active_count()
        self.loop = asyncio.new_event_loop()
        self.decoder = cast("Any", faulty_model().decoder)
        self.decoder.fault = None
        store = TieredStore(MemoryStore(2**20), far_store())
        fetcher = KVFetcher(store, prefetch_bytes=2**26 if prefetches else 0)
        config = CONFIG.replace("store.write_back", "none")
        self.engine = cast("Any", Engine(config, faulty_model(), store, fetcher=fetcher))
        self.gate, self.is_held_up, self.is_refusing = threading.Event(), False, False
        if is_open:
            self.gate.set()
        prepare = self.engine.prepare

        def gated(*args: Any, **options: Any) -> Any:
            made = prepare(*args, **options)
            self.is_held_up = not self.gate.is_set()
            assert self.gate.wait(PATIENT_S)
            self.is_held_up = False
            if self.is_refusing:
                raise InputError("it cannot be prepared")
            return made

        self.engine.prepare = gated
        http = ServeConfig(slots=SLOTS, max_concurrent=MOST)
        self.client = LocalEngineClient(self.engine, Collections({}), http)
        self.app, self.sent = create_engine_app(self.client), list[Life]()

    def pump(self) -> None:
        """Let the event loop do what is due."""
        for _ in range(8):
            self.loop.run_until_complete(asyncio.sleep(0))

    # Clients

    @rule(
        target=lives,
        ask=st.sampled_from(ASKS),
        tenant=st.sampled_from("abc"),
        n_new=st.integers(1, 6),
        how=st.sampled_from(["reads", "leaves", "cancelled"]),
    )
    def ask(
        self,
        ask: tuple[str, dict[str, Any]] = ASKS[0],
        tenant: str = "a",
        n_new: int = 4,
        how: str = "reads",
    ) -> Life:
        """A request. Its client may leave as soon as it is prepared, or is held up there."""
        path, body = ask
        limit = {} if path.endswith("lookup") else {"max_tokens": n_new}

        async def begin() -> Life:
            return Life(self.app, path, {**limit, **body}, f"10.0.0.{ord(tenant)}")

        life = self.loop.run_until_complete(begin())
        life.is_sound = not self.is_refusing and self.decoder.fault is None
        self.sent.append(life)
        eventually(self.is_prepared)
        self.change(life, how)
        return life

    @rule(life=lives, how=st.sampled_from(["leaves", "cancelled", "broken", "stalls", "reads"]))
    def change(self, life: Life, how: str) -> None:
        """Its client leaves, stops reading or goes on, its connection breaks, or the server's task is cancelled."""
        life.is_sound &= how in ("stalls", "reads")
        if how == "leaves":
            life.left.set()
        elif how == "cancelled":
            life.task.cancel()
        elif how == "broken":
            life.is_broken = True
        elif how == "stalls":
            life.reads.clear()
        else:
            life.reads.set()
        self.pump()

    # The server

    @rule(is_open=st.booleans())
    def turn_gate(self, is_open: bool) -> None:
        """Preparing stands still, or goes on; where it goes on, it comes to its end."""
        (self.gate.set if is_open else self.gate.clear)()
        eventually(self.is_prepared)

    def is_prepared(self) -> bool:
        """Whether all requests are prepared, or one is held up, behind which the others wait."""
        self.pump()
        is_held_up = self.is_held_up and not self.gate.is_set()
        return is_held_up or not self.client.in_use["retrieving"]

    @rule(n=st.sampled_from([1, 2, 5, 20]))
    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self.client.scheduler.step()
        self.pump()

    @rule(where=st.sampled_from(["prepare", "forward", "nowhere"]))
    def fail(self, where: str) -> None:
        """The next requests cannot be prepared, or the next forward raises."""
        self.is_refusing = where == "prepare"
        if where == "forward":
            self.decoder.fault = RuntimeError("a device failed")
        for life in self.sent:
            life.is_sound &= where == "nowhere" or life.task.done()

    # The end

    def teardown(self) -> None:
        if not hasattr(self, "client"):
            return
        self.gate.set()
        for life in self.sent:
            life.reads.set()

        def is_over() -> bool:
            self.client.scheduler.step()
            self.pump()
            return all(life.task.done() for life in self.sent)

        eventually(is_over)
        for life in self.sent:
            self.check(life)
        eventually(lambda: self.left_over() == {}, LEFT_S)
        assert not self.client.scheduler.in_flight
        self.client.close()
        self.engine.close()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        eventually(lambda: threading.active_count() <= self.n_threads)

    def check(self, life: Life) -> None:
        """A request whose client stayed, on a server that did not fail, is answered or refused."""
        error = None if life.task.cancelled() else life.task.exception()
        if not life.is_sound:
            return
        assert error is None
        assert life.status == 200 or life.status in REFUSED, (life.status, life.text)
        if life.status == 200 and life.is_stream:
            assert b'"done"' in life.text or b"message_stop" in life.text

    def left_over(self) -> dict[str, int]:
        """What requests that have ended still occupy."""
        self.client.scheduler.step()
        self.pump()
        tasks = {"tasks": len(asyncio.all_tasks(self.loop))}
        return {name: n for name, n in {**self.client.in_use, **tasks}.items() if n}
