"""`blendserve bench hostile`: what one hostile client does to the others' TTFT.

Ordinary clients ask the server for a fixed share of what it can answer one by one: each waits for its answer, and thinks.
Windows without and with a hostile client (hostile_client.py) take turns. Each has a new server over a new copy of the
index, since documents that the hostile client sent are worked on long after it has gone. Everybody has an API key, the
server's limits are its defaults, and the hostile client has a collection of its own.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from blendserve.bench.config import HostileConfig
from blendserve.bench.crowded import Subject
from blendserve.bench.figures import Figures, Update, ratios
from blendserve.bench.harness import scratch
from blendserve.bench.hostile_client import Got, chosen
from blendserve.bench.load import start
from blendserve.bench.serving_load import ROOM, Body, Load, Sent, longest, percentiles
from blendserve.config import BlendConfig, Config
from blendserve.engine.engine import Engine
from blendserve.errors import InputError, ServeError
from blendserve.provenance import machine, versions
from blendserve.retrieve import language_reference
from blendserve.serve.child import Child, serve_command
from blendserve.serve.config import ServeConfig
from blendserve.serve.keys import KeyFile, Tenant

Say = Callable[[str], None]

TARGET = 1.5  # p95 TTFT with the hostile client / without
METHOD = "blend"
ALONE = 5  # answers one by one, before a window
POOL = 30  # passages whose titles are asked about
INDEX, UPLOADS = "index", "uploads"  # collections: the ordinary clients', the hostile one's
WITHOUT, WITH = "without", "with"


@dataclass(frozen=True, slots=True)
class Window:
    """What ordinary clients saw, and what the hostile one got."""

    sent: list[Sent]
    seconds: float
    service: float  # seconds of an answer alone, before
    think: float  # mean seconds between answer and next question
    hostile: dict[str, Got] | None

    @property
    def ttft(self) -> list[float]:
        return [sent.ttft for sent in self.sent if sent.ttft is not None]


@dataclass(frozen=True, slots=True)
class Keys:
    """API keys of everybody."""

    clients: tuple[str, ...]
    hostile: str


def measure(
    config: HostileConfig, say: Say = lambda text: None, update: Update = lambda done, total: None
) -> Figures:
    """Everything that the bench prints. Raises ConfigError, InputError, ServeError, StoreError."""
    kinds = chosen(config.kinds)
    windows: dict[str, list[Window]] = {WITHOUT: [], WITH: []}
    with scratch(config.folder) as folder:
        prepare(config.index, folder / "made", say)
        keys = make_keys(folder / "keys.json", config.clients)
        think = None
        for done in range(2 * config.rounds):
            with server(folder) as url:
                load = Ordinary(config, url, keys, titles(folder / "made"))
                found = asyncio.run(load.window(think, done // 2, kinds if done % 2 else (), folder))
            windows[WITH if done % 2 else WITHOUT].append(found)
            think = found.think
            update(done + 1, 2 * config.rounds)
    return {
        "bench": "hostile",
        "settings": config.model_dump(mode="json"),
        "versions": versions(),
        "machine": machine(),
        "think_seconds": think,
        **summary(windows),
    }


def thinking(service: float, clients: int, share: float) -> float:
    """Mean seconds between answer and next question, by which so many clients keep a server busy for this share.

    One that is asked again `think` after its answer keeps it busy for service / (service + think).
    """
    return service * (clients / share - 1)


def prepare(index: Path, folder: Path, say: Say) -> None:
    """An index with its KV in `folder`: a copy, or one of bundled text. Raises InputError, StoreError."""
    config = Config(blend=BlendConfig(method=METHOD))
    if (index / "manifest.json").exists():
        shutil.copytree(index, folder)
        engine = Engine.open(folder, config, say)
    else:
        say(f"No index in {index}: building one of bundled text")
        engine = Engine.build(folder, language_reference(), config, say)
    with engine:
        say("Precomputing")
        engine.precompute()


def make_keys(file: Path, clients: int) -> Keys:
    """A key for each; the ordinary ones share the namespace of the KV that was precomputed."""
    keys = KeyFile(file)
    ordinary = (Tenant(f"client {n}", collections=(INDEX,), read_only=True) for n in range(clients))
    return Keys(
        tuple(map(keys.create, ordinary)), keys.create(Tenant("hostile", "hostile", collections=(UPLOADS,)))
    )


def titles(index: Path) -> Body:
    """Ordinary questions about an index."""
    about = sorted({passage["title"] for passage in longest(index, POOL)})
    return lambda rng: {"question": f"What is said about {rng.choice(about)}, and where?"}


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """The URL of a new server over a new copy of the index in folder/made. Raises ServeError."""
    served, log = folder / "served", folder / "server.log"
    shutil.copytree(folder / "made", served / INDEX)
    shutil.copytree(folder / "made", served / UPLOADS, ignore=shutil.ignore_patterns("kv"))
    indexes = ("--index", str(served / INDEX), "--index", str(served / UPLOADS))
    keys = ("--keys", str(folder / "keys.json"))
    try:
        with Child(serve_command(*indexes, *keys, "--method", METHOD, *ROOM), log) as child:
            yield child.url
    except ServeError:
        raise ServeError(f"the server did not start: {log.read_text().strip().splitlines()[-1]}") from None
    finally:
        shutil.rmtree(served, ignore_errors=True)


class Ordinary:
    """The ordinary clients of one server."""

    def __init__(self, config: HostileConfig, url: str, keys: Keys, bodies: Body) -> None:
        self._config, self._url, self._keys, self._bodies = config, url, keys, bodies

    async def window(self, think: float | None, draw: int, kinds: Sequence[str], folder: Path) -> Window:
        """Warm up, then measure; `draw` decides what is asked and when; with `kinds`, beside the hostile client."""
        async with AsyncExitStack() as stack:
            https = [await stack.enter_async_context(self._http(key)) for key in self._keys.clients]
            loads = [self._load(http) for http in https]
            service = await _alone(loads)
            if think is None:
                think = thinking(service, self._config.clients, self._config.share)
            attacked = None
            if kinds:
                attacker = hostile(
                    self._url, self._keys.hostile, await _model(https[0]), kinds, self._config, folder
                )
                attacked = stack.enter_context(attacker)
            begun = time.perf_counter()
            until = begun + self._config.seconds
            clients = (
                _client(load, think, until, random.Random(f"{draw} {n}")) for n, load in enumerate(loads)
            )
            sent = [one for some in await asyncio.gather(*clients) for one in some]
            seconds = time.perf_counter() - begun
            got = {kind: Got(**found) for kind, found in attacked.take("end").items()} if attacked else None
        return Window(sent, seconds, service, think, got)

    def _http(self, key: str) -> httpx.AsyncClient:
        timeout = httpx.Timeout(self._config.timeout, connect=30)
        return httpx.AsyncClient(
            base_url=self._url, timeout=timeout, headers={"Authorization": f"Bearer {key}"}
        )

    def _load(self, http: httpx.AsyncClient) -> Load:
        def bodies(rng: random.Random) -> dict[str, Any]:
            return {**self._bodies(rng), "top_k": self._config.passages}

        return Load(http, bodies, self._config.clients, self._config.new_tokens)


async def _alone(loads: Sequence[Load]) -> float:
    """One by one -> median seconds of an answer, the first left out. Raises InputError when none is answered."""
    rng = random.Random("alone")
    sent = [await loads[n % len(loads)].send(loads[0].body(METHOD, rng)) for n in range(ALONE)]
    answered = [one.ttft + sum(one.gaps) for one in sent[1:] if one.ttft is not None]
    if not answered:
        raise InputError(
            "the server answers no ordinary question, even alone: ask for fewer passages or tokens, or try "
            "`blendserve serve` on this index"
        )
    return statistics.median(answered)


async def _client(load: Load, think: float, until: float, rng: random.Random) -> list[Sent]:
    """Ask, wait for the answer, think; once at least."""
    sent: list[Sent] = []
    await asyncio.sleep(min(rng.uniform(0, think), until - time.perf_counter()))
    while not sent or time.perf_counter() < until:
        sent.append(await load.send(load.body(METHOD, rng)))
        pause = rng.expovariate(1 / think)
        await asyncio.sleep(max(0.0, min(pause, until - time.perf_counter())))
    return sent


async def _model(http: httpx.AsyncClient) -> str:
    return str((await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"])


@contextmanager
def hostile(
    url: str, key: str, model: str, kinds: Sequence[str], config: HostileConfig, folder: Path
) -> Iterator[Subject]:
    """A client that is at it until it is asked what it got."""
    most = ServeConfig().max_body_kb * 1024
    task = {"url": url, "key": key, "model": model, "kinds": kinds, "most": most}
    log = folder / "hostile.log"
    command = ["sh", "-c", 'exec "$@" 2>"$0"', str(log), sys.executable, "-m"]
    process = start([*command, "blendserve.bench.hostile_client"], dict(os.environ))
    try:
        yield Subject(process, {**task, "connections": config.connections}, log)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()


def summary(windows: dict[str, list[Window]]) -> Figures:
    """By kind of window, the ratio round by round, and against the target: no more than it, and nobody failed."""
    pairs = zip(windows[WITHOUT], windows[WITH], strict=True)
    p95 = [tuple(percentiles(w.ttft)["p95"] for w in pair) for pair in pairs if all(w.ttft for w in pair)]
    ratio = ratios([attacked for _, attacked in p95], [calm for calm, _ in p95]) if p95 else None
    found = {name: _of(some) for name, some in windows.items()}
    return {
        "windows": found,
        "p95_ttft_ratio": ratio,
        "target": TARGET,
        "hostile": _got([w.hostile for w in windows[WITH] if w.hostile]),
        "passed": bool(ratio and ratio["median"] <= TARGET and not found[WITH]["failed"]),
    }


def _of(windows: Sequence[Window]) -> Figures:
    ttft = [seconds for window in windows for seconds in window.ttft]
    sent, seconds = sum(len(w.sent) for w in windows), sum(w.seconds for w in windows)
    return {
        "ttft": {**percentiles(ttft), "worst": max(ttft)} if ttft else {},
        "answered": len(ttft),
        "answered_per_second": len(ttft) / seconds,
        "failed": sent - len(ttft),
        "service_seconds": [w.service for w in windows],
        "rounds": [[asdict(one) for one in w.sent] for w in windows],
    }


def _got(windows: Sequence[dict[str, Got]]) -> Figures:
    """Kind -> statuses with their counts, and how long answers took."""
    found: Figures = {}
    for kind in windows[0] if windows else ():
        statuses: dict[str, int] = {}
        seconds = [taken for window in windows for taken in window[kind].seconds]
        for window in windows:
            for status, n in window[kind].statuses.items():
                statuses[status] = statuses.get(status, 0) + n
        middle, most = (statistics.median(seconds), max(seconds)) if seconds else (None, None)
        found[kind] = {"statuses": statuses, "median": middle, "worst": most}
    return found
