"""The soak script against a toy server: everything at once, and nothing wrong."""

from __future__ import annotations

import asyncio
import importlib.util
from argparse import Namespace
from pathlib import Path
from typing import Any

from blendserve.serve.settings import ServeConfig
from tests.serve.helpers import Server

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_many_clients_at_once_get_right_answers_and_leave_nothing(tmp_path: Path) -> None:
    server = Server(tmp_path, ServeConfig(slots=4))
    args = Namespace(
        url=server.url,
        index=tmp_path / "a",
        requests=48,
        clients=8,
        distinct=6,
        seed=1,
        pid=None,
        engine=None,
    )
    try:
        result = asyncio.run(script("soak_serving")._run(args))
    finally:
        server.close()
    assert result["passed"], result
    assert (result["wrong"], result["leaked"]) == (0, 0)
    assert result["requests"].keys() >= {"good", "cancelled", "malformed"}
    assert server.service.slots.free == 4


def test_a_wrong_answer_is_noticed(tmp_path: Path) -> None:
    server = Server(tmp_path, ServeConfig())
    soak_serving = script("soak_serving")

    async def run() -> list[str]:
        async with soak_serving.httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            soak = soak_serving.Soak(Namespace(index=tmp_path / "a", seed=0, distinct=1), http)
            await soak.prepare()
            soak.expected = ["something else"]
            await soak.client(0, 4)
            wrong: list[str] = soak.wrong
            return wrong

    try:
        assert any("something else" in problem for problem in asyncio.run(run()))
    finally:
        server.close()
