"""The load bench against a toy server: cells are measured once, added up rightly, and failures are not answers."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from blendserve.bench import serving_load as bench
from blendserve.cli import main
from blendserve.serve.config import ServeConfig
from tests.engine.helpers import PASSAGES
from tests.serve.helpers import Server

POOL = [{"text": p.text, "title": p.title} for p in PASSAGES]
SHARES = (0.5, 1.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("bench"), ServeConfig())
    yield made
    made.close()


def measure(server: Server, file: Path, until: float, new_tokens: int = 3) -> Any:
    async def run() -> Any:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as http:
            load = bench.Load(http, bench.bodies_of_passages(POOL, 3), clients=2, new_tokens=new_tokens)
            cells = bench.Cells(file, until)
            await bench.warm(http, load, {"passages": POOL})
            await bench.measure(load, cells, 0.2, SHARES)
            return cells

    return asyncio.run(run())


def test_cells_are_measured_once_and_summed_up(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "cells.jsonl"
    assert bench.summary(measure(server, file, 0.0), SHARES)["missing"] == list(bench.METHODS)  # no time left
    cells = measure(server, file, math.inf)
    lines = file.read_text()
    assert {(m, s) for m in bench.METHODS for s in (None, 1.0)} <= cells.all.keys()
    assert all(c.failed == 0 and c.answered > 0 for c in cells.all.values())
    assert all(c.requests >= bench.LEAST for c in cells.all.values() if c.share)
    again = measure(server, file, math.inf)
    assert (again.all, file.read_text()) == (cells.all, lines)
    found = bench.summary(again, SHARES)
    assert found["missing"] == []
    most = found["saturation_rps"]
    assert found["throughput_ratio"] == most["blend"] / most["full"]
    ttft = found["p95_ttft_at_full_saturation"]
    assert found["p95_ttft_ratio"] == ttft["full"] / ttft["blend"]
    assert not found["passed"]  # a toy gains nothing


def test_the_command_keeps_its_results_and_says_what_is_missing(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "passages.jsonl").write_text("".join(json.dumps(passage) + "\n" for passage in POOL))
    monkeypatch.setattr(sys, "argv", ["blendserve"])

    def run(minutes: float) -> tuple[int, dict[str, Any]]:
        options = {"--out": tmp_path / "out", "--url": server.url, "--index": tmp_path, "--minutes": minutes}
        more = ("--passages", "2", "--new-tokens", "2", "--clients", "2", "--seconds", "0.2", "--shares", "1")
        with pytest.raises(SystemExit) as end:
            main(["bench", "serving", *(str(word) for pair in options.items() for word in pair), *more])
        found: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
        return int(end.value.code or 0), found

    code, found = run(1e-9)
    assert (code, found["missing"]) == (3, list(bench.METHODS))
    code, found = run(5)
    assert (code, found["missing"]) == (1, [])  # a toy gains nothing
    kept = json.loads((tmp_path / "out" / "serving.json").read_text())
    assert {name: kept[name] for name in found} == found
    assert found["machine"]["threads"] >= 1
    assert (tmp_path / "out" / "serving.png").stat().st_size > 1000


def test_what_is_refused_is_no_answer(server: Server, tmp_path: Path) -> None:
    cells = measure(server, tmp_path / "cells.jsonl", math.inf, new_tokens=10**5)
    assert len(cells.all) == len(bench.METHODS)  # there is no saturation to take shares of
    assert all(c.failed == c.requests > 0 and c.answered == 0 for c in cells.all.values())
    assert bench.summary(cells, SHARES)["throughput_ratio"] is None
