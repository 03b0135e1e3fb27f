"""The soak against a toy server that is killed and started again; and what it is to notice, it notices."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from blendserve.engine.engine import Engine
from blendserve.serve.config import ServeConfig
from blendserve.store import LMDBStore, VerifyReport
from tests.endurance import soak_serving
from tests.engine.helpers import CONFIG, PASSAGES, reader
from tests.serve.helpers import Server
from tests.serve.toy_server import ToyServer


class Toy:
    """A toy server's folder with the KV of all passages, and the right answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asks = soak_serving.make_asks(PASSAGES, 6, 0)
        with Engine(CONFIG, reader(), LMDBStore(folder / "kv", 2**27)) as engine:
            engine.precompute(PASSAGES)
            self.expected = soak_serving.answers(engine, self.asks)

    def start(self) -> Any:
        return ToyServer(self.folder)

    def verify(self) -> VerifyReport:
        with LMDBStore(self.folder / "kv", 2**27, read_only=True) as store:
            return store.verify()

    def run(self, requests: int, clients: int) -> dict[str, Any]:
        soak = soak_serving.Soak(self.asks, self.expected, requests, clients, seed=1)
        verdict: dict[str, Any] = soak_serving.run(soak, self.start, self.verify)
        return verdict


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


def test_many_clients_and_a_kill_leave_nothing_wrong(toy: Toy) -> None:
    verdict = toy.run(requests=80, clients=8)
    assert {k: v for k, v in verdict.items() if k in ("wrong", "leaked", "exit_code")} == {
        "wrong": 0,
        "leaked": 0,
        "exit_code": 0,
    }, verdict
    assert sum(verdict["requests"].values()) == 80
    assert verdict["requests"].keys() == soak_serving.KINDS.keys()
    assert verdict["cut_off_and_asked_again"] > 0
    assert verdict["documents_written"] > 1
    assert verdict["store_verify"]["good"] > len(PASSAGES)
    assert verdict["store_verify"]["bad"] == 0


def test_a_wrong_answer_and_a_lost_document_are_noticed(tmp_path: Path) -> None:
    asks = soak_serving.make_asks(PASSAGES, 2, 0)
    soak = soak_serving.Soak(asks, ["something else"] * 2, 6, 2, seed=1)
    soak.documents["never-there"] = 2
    server: Any = Server(tmp_path, ServeConfig())
    server.memory_mb = 0.0
    try:
        asyncio.run(soak.run(server, 6))
        asyncio.run(soak.find_documents(server))
    finally:
        server.close()
    assert any("something else" in problem for problem in soak.wrong)
    assert any("never-there" in problem for problem in soak.wrong)
