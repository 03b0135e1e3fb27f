"""Serve two tenants for long, while clients leave, retry, read slowly and send garbage, and Valkey dies and returns.

    python -m tests.endurance.soak_serving --minutes 45 --clients 16
    python -m tests.endurance.soak_serving --minutes 45 --model smollm2-135m     # default: a small random Llama

`blendserve serve` runs in a process of its own, over a local store that holds half of the chunks and a real Valkey. That
one is killed for some seconds, or stops answering, in turn. Each tenant has a key, a namespace and an index. One more
client behaves well; its latency is reported by third of the run. Answers are those of method blend at ratio 1 and
temperature 0; full prefill's are computed beforehand, in this process, and compared.

At the end nothing may be held: no slot, no chunk, no socket. `samples.jsonl` has memory, descriptors, threads and the
server's gauges at intervals. All requests are on loopback, at a few a second for each client.
"""

from __future__ import annotations

import json
import random
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from statistics import linear_regression, quantiles
from typing import Any

import httpx
import yaml

from benchmarks.support.valkey import Server as Valkey
from blendserve import console
from blendserve.bench.server_process import ServerProcess, serve_command
from blendserve.config import Config
from blendserve.core import Passage
from blendserve.engine.engine import Engine
from blendserve.retrieve import language_reference
from blendserve.serve.keys import KeyFile, Tenant
from tests.endurance.driver import Figures, Promises, Workload, main, none
from tests.endurance.soak_clients import Ask, GoodClient, SoakClient, Tally
from tests.support.http import bearer
from tests.support.toy import toy_model
from tests.support.waiting import eventually

TENANTS = ("ann", "bob")
CONVERSATIONS_MB = 16.0  # full before the memory is watched
ASKS, PASSAGES, CHUNK_TOKENS = 16, 24, 48  # of each tenant
VALKEY_UP_S, VALKEY_DOWN_S = 20.0, 5.0
WARM_UP = 0.2  # of the run
GAUGES = {
    "slots": "blendserve_slots_in_use",
    "queue": "blendserve_queue_length",
    "held_chunks": "blendserve_held_chunks",
    "store_bytes": "blendserve_store_bytes",
    "remote_waiting_bytes": "blendserve_store_remote_waiting_bytes",
    "remote_hits": "blendserve_store_remote_hits_total",
    "remote_failures": "blendserve_store_remote_failures_total",
}
Sample = dict[str, float]


def save_toy(folder: Path) -> str:
    """The small random Llama as a model folder."""
    if not (folder / "config.json").exists():
        model: Any = toy_model(1024)
        model.decoder.reference.save_pretrained(folder)
        model.tokenizer.save_pretrained(folder)
    return str(folder)


def make_asks(engine: Engine, dice: random.Random) -> list[Ask]:
    """Requests over the engine's index, some with passages of their own, and what full prefill answers."""
    assert engine.index is not None
    passages = dice.sample(engine.index.passages, min(PASSAGES, len(engine.index.passages)))
    made = list[Ask]()
    for n in range(ASKS):
        question, max_tokens = f"What is said in line {n}?", dice.randint(8, 16)
        own: list[Passage] | None = dice.sample(passages, dice.randint(2, 4)) if n % 2 else None
        expected = engine.answer(question, own, top_k=4, method="full", max_new_tokens=max_tokens)
        ask = {"question": question, "top_k": 4, "method": "blend", "ratio": 1.0, "temperature": 0}
        ask |= {"max_tokens": max_tokens}
        if own:
            ask |= {"passages": [{"text": p.text, "title": p.title} for p in own]}
        made.append(Ask(ask, expected.text))
    return made


def prepare(
    out: Path, model: str, valkey: str, seed: int
) -> tuple[list[str], dict[str, str], list[list[Ask]]]:
    """Indexes, keys and settings in `out` -> the server's command, keys by name, and each tenant's requests."""
    settings: dict[str, Any] = {
        "model": {"name": save_toy(out / "model") if model == "tiny" else model, "dtype": "float32"},
        "retrieve": {"chunk_tokens": CHUNK_TOKENS},
        "prompt": {"system": "Be brief."},
    }
    config = Config.model_validate(settings)
    asks, n_bytes, topics = list[list[Ask]](), 0, language_reference()
    for n, name in enumerate(TENANTS):
        if not (out / name).exists():
            Engine.build(out / name, topics[n : 2 * len(TENANTS) : len(TENANTS)], config).close()
        with Engine.open(out / name, config.replace("store.location", "memory")) as engine:
            asks.append(make_asks(engine, random.Random(seed + n)))
            n_bytes += PASSAGES * CHUNK_TOKENS * engine.model.decoder.kv_bytes_per_token
    keys, file = dict[str, str](), out / "keys.json"
    file.unlink(missing_ok=True)
    for name in TENANTS:
        keys[name] = KeyFile(file).create(Tenant(name, name, (name,)))
    keys["good"] = KeyFile(file).create(Tenant("good", TENANTS[0], (TENANTS[0],)))
    keys["operator"] = KeyFile(file).create(Tenant("operator", "operator", admin=True))
    settings["store"] = {"location": str(out / "kv"), "cap_gb": n_bytes / 2e9, "remote": {"location": valkey}}
    settings["serve"] = {"slots": 4, "slot_tokens": 1024, "log_text": False, "keys": str(file)}
    settings["serve"]["conversations_mb"] = CONVERSATIONS_MB
    (out / "soak.yaml").write_text(yaml.safe_dump(settings))
    indexes = [word for name in TENANTS for word in ("--index", str(out / name))]
    return serve_command(*indexes, "--config", str(out / "soak.yaml")), keys, asks


class Watch:
    """Samples of a server process, in a file."""

    def __init__(self, server: ServerProcess, key: str, file: Path) -> None:
        self._server, self._key, self._file, self._began = server, key, file, time.monotonic()
        self.samples = list[Sample]()
        file.write_text("")

    def read(self) -> Sample:
        """What the server holds now."""
        text = httpx.get(f"{self._server.url}/metrics", headers=bearer(self._key), timeout=60).text
        found = dict(re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE))
        process = Path(f"/proc/{self._server.pid}")
        return {
            "seconds": round(time.monotonic() - self._began, 1),
            "rss_mb": self._server.memory_mb,
            "descriptors": len([*(process / "fd").iterdir()]),
            "threads": len([*(process / "task").iterdir()]),
            **{name: float(found.get(gauge, 0.0)) for name, gauge in GAUGES.items()},
        }

    def sample(self) -> None:
        self.samples.append(self.read())
        with self._file.open("a") as lines:
            lines.write(json.dumps(self.samples[-1]) + "\n")

    def is_idle(self) -> bool:
        return not any(self.read()[name] for name in ("slots", "queue", "held_chunks"))

    def growth(self, name: str) -> tuple[float, float]:
        """Of the fitted line after the warm-up: its value at the beginning, and by how much it grows until the end."""
        last = self.samples[-1]["seconds"]
        after = [s for s in self.samples if s["seconds"] >= WARM_UP * last]
        if len(after) < 3:
            return self.samples[-1][name], 0.0
        line = linear_regression([s["seconds"] for s in after], [s[name] for s in after])
        begin, end = after[0]["seconds"], after[-1]["seconds"]
        return line.intercept + line.slope * begin, line.slope * (end - begin)


@contextmanager
def unsteady(valkey: Valkey) -> Iterator[None]:
    """The server is killed and restarted, or hangs for a while, in turn, until the block ends."""
    ended = threading.Event()

    def disturb() -> None:
        for down, up in cycle(((valkey.kill, valkey.start), (valkey.hang, valkey.resume))):
            if ended.wait(VALKEY_UP_S):
                return
            down()
            ended.wait(VALKEY_DOWN_S)
            up()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def running(clients: Sequence[SoakClient], ended: threading.Event) -> Iterator[None]:
    """All clients, until the block ends."""
    for client in clients:
        client.start()
    try:
        yield
    finally:
        ended.set()
        for client in clients:
            client.join()


def latency(tally: Tally) -> list[dict[str, float]]:
    """Of the good client, in ms, by third of the run."""
    n = len(tally.latencies)
    thirds = [tally.latencies[i * n // 3 : (i + 1) * n // 3] for i in range(3)]
    figures = list[dict[str, float]]()
    for third in thirds:
        cuts = quantiles([1e3 * s for _, s in third], n=20) if len(third) > 1 else [0.0] * 19
        figures.append({"n": len(third), "p50_ms": round(cuts[9], 1), "p95_ms": round(cuts[18], 1)})
    return figures


def make(out: Path, minutes: float, clients: int, model: str, seed: int) -> Workload:
    """Parts are the samples: one a minute, and at least ten of a short run."""
    out.mkdir(parents=True, exist_ok=True)
    every_s, tally, ended = min(60.0, 6 * minutes), Tally(), threading.Event()
    n_parts = max(1, round(60 * minutes / every_s))
    with ExitStack() as stack:
        valkey = stack.enter_context(Valkey())
        command, keys, asks = prepare(out, model, valkey.url, seed)
        server = stack.enter_context(ServerProcess(command, out / "server.log"))
        watch = Watch(server, keys["operator"], out / "samples.jsonl")
        before = watch.read()
        made: list[SoakClient] = [GoodClient(server.url, keys["good"], asks[0], tally, ended, seed)]
        for n in range(clients):
            tenant = n % len(TENANTS)
            made.append(
                SoakClient(server.url, keys[TENANTS[tenant]], asks[tenant], tally, ended, seed + n + 1)
            )
        with unsteady(valkey), running(made, ended):
            for part in range(n_parts):
                if (yield part, n_parts):
                    break
                ended.wait(every_s)
                watch.sample()
        eventually(lambda: watch.is_idle() and watch.read()["descriptors"] <= before["descriptors"] + 16)
        after, exit_code = watch.read(), server.stop()
    log = (out / "server.log").read_text()
    figures = {
        **{
            "requests": tally.actions.total(),
            "actions": dict(tally.actions),
            "statuses": dict(tally.statuses),
        },
        **{"wrong": tally.wrong, "failed": tally.failed, "tracebacks": log.count('"trace"')},
        **{"before": before, "after": after, "exit_code": exit_code, "good": latency(tally)},
        **{name: [round(x, 1) for x in watch.growth(name)] for name in ("rss_mb", "descriptors", "threads")},
    }
    summarize(figures)
    return figures


def summarize(found: Figures) -> None:
    """Print what a person wants to know first."""
    for name in ("rss_mb", "descriptors", "threads"):
        first, growth = found[name]
        console.note(f"{name}: {first:g} after the warm-up, {growth:+g} until the end")
    after = found["after"]
    console.note(
        f"At idle: {after['slots']:g} slots, {after['held_chunks']:g} held chunks, {after['queue']:g} queued"
    )
    thirds = ", ".join(f"p50 {part['p50_ms']:g} p95 {part['p95_ms']:g}" for part in found["good"])
    console.note(f"Good client, ms by third: {thirds}")
    console.note(
        f"{found['requests']} requests, {len(found['wrong'])} wrong answers, {len(found['failed'])} failed"
    )


PROMISES: Promises = {
    **none("wrong", "failed", "tracebacks", "exit_code"),
    "memory is flat": lambda found: found["rss_mb"][1] <= 0.05 * found["rss_mb"][0] + 8.0,
    "descriptors are flat": lambda found: found["descriptors"][1] <= 16,
    "threads are flat": lambda found: found["threads"][1] <= 4,
    "nothing is held at the end": lambda found: (
        not any(found["after"][name] for name in ("slots", "queue", "held_chunks"))
    ),
    "the good client is answered": lambda found: all(part["n"] for part in found["good"]),
}


if __name__ == "__main__":
    sys.exit(main(make, PROMISES, out=Path("runs/soak"), minutes=45.0, clients=16, model="tiny", seed=0))
