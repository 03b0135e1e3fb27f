"""`blendserve bench sharing`: a cache for each user against one for all, with the same memory in total.

Users ask about passages of one pool: some passages are asked for by everybody (a Zipf law over the pool), others by one
user above all (the same law over an order of their own). They are answered by several engine processes (sharing_node.py),
each one question at a time; what was missing is computed and stored after the answer, as a server does it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from blendserve.bench.config import SharingConfig
from blendserve.bench.crowded import Subject, subject_of
from blendserve.bench.figures import Figures, Update
from blendserve.bench.harness import scratch
from blendserve.bench.servers import Server
from blendserve.bench.tables import Table
from blendserve.registry import SHARED_STORE

Say = Callable[[str], None]
PER_USER, SHARED = "a cache per user", "one cache for all"


def measure(
    config: SharingConfig, say: Say = lambda text: None, update: Update = lambda done, total: None
) -> Figures:
    """Everything that the bench prints. Raises ConfigError, InputError."""
    found: dict[str, Figures] = {}
    with scratch(config.folder) as folder, ExitStack() as stack:
        url = stack.enter_context(Server()).url if config.store == SHARED_STORE else ""
        say(f"Starting {config.engines} engine processes")
        nodes = [stack.enter_context(_node(config, folder, url, n)) for n in range(config.engines)]
        for done, arrangement in enumerate((PER_USER, SHARED), start=1):
            say(f"{config.users * config.questions} questions, {arrangement}")
            with ThreadPoolExecutor(len(nodes)) as pool:
                parts = list(pool.map(lambda node: node.take(arrangement), nodes))  # noqa: B023
            found[arrangement] = summary(parts)
            update(done, 2)
        about = {part: nodes[0].about[part] for part in ("versions", "machine", "reader")}
    mean = {name: figures["ttft_mean"] for name, figures in found.items()}
    return {
        "bench": "sharing",
        **about,
        "settings": config.model_dump(mode="json"),
        "arrangements": found,
        "ttft_of_per_user": mean[SHARED] / mean[PER_USER],
    }


def trace(config: SharingConfig) -> list[list[tuple[int, ...]]]:
    """The passages of each question of each user, by their numbers in the pool."""
    law = [1 / rank**config.zipf for rank in range(1, config.pool + 1)]
    asked = []
    for user in range(config.users):
        draw = random.Random(f"{config.seed} {user}")
        own = draw.sample(range(config.pool), config.pool)
        orders = [range(config.pool), own]
        asked.append([_question(config, draw, law, orders) for _ in range(config.questions)])
    return asked


def _question(
    config: SharingConfig, draw: random.Random, law: list[float], orders: list[Any]
) -> tuple[int, ...]:
    """Different passages, each of the pool's favourites or of the user's own."""
    chosen: dict[int, None] = {}
    while len(chosen) < min(config.passages, config.pool):
        order = orders[0 if draw.random() < config.overlap else 1]
        chosen[draw.choices(order, law)[0]] = None
    return tuple(chosen)


def summary(parts: list[Figures]) -> Figures:
    """What the nodes tell of one arrangement, together."""
    requests = [request for part in parts for request in part["requests"]]
    ttft = sorted(request["ttft"] for request in requests)
    computed = Counter(chunk for part in parts for chunk in part["computed"])
    stored: dict[str, int] = {}
    for part in parts:  # of one cache for all, every node tells
        stored |= {name: max(size, stored.get(name, 0)) for name, size in part["bytes"].items()}
    return {
        "requests": len(requests),
        "hit_rate": sum(r["hit"] for r in requests) / sum(r["asked"] for r in requests),
        "ttft_mean": sum(ttft) / len(ttft),
        "ttft_p95": ttft[min(len(ttft) - 1, int(0.95 * len(ttft)))],
        "bytes": sum(stored.values()),
        "computed": computed.total(),
        "computed_again": computed.total() - len(computed),
        "ttft": ttft,
    }


def _node(config: SharingConfig, folder: Path, url: str, number: int) -> AbstractContextManager[Subject]:
    task = {"config": config.model_dump(mode="json"), "folder": str(folder), "url": url, "node": number}
    return subject_of("blendserve.bench.sharing_node", task, folder / f"node{number}.log", {})


def tables(figures: Figures) -> list[Table]:
    settings, reader = figures["settings"], figures["reader"]
    title = (
        f"{settings['users']} users, {settings['questions']} questions each of {settings['passages']} x "
        f"{settings['chunk_tokens']} tokens, {settings['engines']} engines, {reader['model']} {reader['dtype']}"
    )
    columns = ("", "hit rate", "TTFT mean ms", "p95 ms", "stored MB", "chunks computed", "of those again")
    rows = [
        (
            name,
            f"{found['hit_rate']:.2f}",
            f"{found['ttft_mean'] * 1e3:,.0f}",
            f"{found['ttft_p95'] * 1e3:,.0f}",
            f"{found['bytes'] / 1e6:,.1f}",
            f"{found['computed']}",
            f"{found['computed_again']}",
        )
        for name, found in figures["arrangements"].items()
    ]
    return [
        (f"{title}; mean TTFT {figures['ttft_of_per_user']:.2f}x that of a cache per user", columns, rows)
    ]
