"""A server as its operator sees it: a process that is started, stopped and killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from blendserve.store import LMDBStore
from tests.support.commands import cli
from tests.support.engines import QUESTIONS
from tests.support.http import OWN, ToyServer, events

ASK: dict[str, Any] = {"question": QUESTIONS[0], "passages": OWN}


@pytest.mark.timeout(180)  # two processes that import the engine
def test_sigterm_finishes_what_runs_and_sigkill_harms_no_store(tmp_path: Path) -> None:
    with ToyServer(tmp_path) as server, httpx.Client(base_url=server.url, timeout=300) as http:
        with http.stream("POST", "/v1/rag/query", json={**ASK, "max_tokens": 150, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.terminate()
            told = events([*lines])
        assert told[-1]["event"] == "done"
        assert "".join(e["text"] for e in told[:-1]) == told[-1]["text"]
        assert server.wait() == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
    with ToyServer(tmp_path) as server, httpx.Client(base_url=server.url, timeout=300) as http:
        kept = http.post("/v1/rag/query", json={**ASK, "max_tokens": 4}).json()
        assert kept["report"]["chunks_hit"] == len(OWN)  # what the first process stored
        more = [{"text": f"{p['text']} {i}"} for i in range(5) for p in OWN]
        with http.stream("POST", "/v1/rag/query", json={**ASK, "passages": more, "stream": True}) as stream:
            next(stream.iter_lines())
            server.kill()
    with LMDBStore(tmp_path / "kv", 2**27, read_only=True) as store:
        assert store.verify().bad == ()
        assert store.stats().chunks >= len(OWN)


def test_keys_by_commands(tmp_path: Path) -> None:
    file = ("--file", tmp_path / "keys.json")
    created, listed = cli("keys", "create", "ann", "--collection", "demo", *file), cli("keys", "list", *file)
    assert ["bsk-" in created.out, "demo" in listed.out, "bsk-" in listed.out] == [True, True, False]
    assert [cli("keys", "revoke", "ann", *file).code for _ in range(2)] == [0, 2]


def test_serve_reads_the_key_of_the_environment_and_prints_none(tmp_path: Path) -> None:
    serve = ("serve", "--host", "0.0.0.0", "--index", tmp_path / "missing")
    by_option = cli(*serve, "--api-key", "sk-one-key")
    by_environment = cli(*serve, env={"BLENDSERVE_API_KEY": "sk-one-key"})
    for done in (by_option, by_environment):
        assert (done.code, "sk-one-key" in done.out + done.err) == (2, False)
        assert str(tmp_path / "missing") in done.err  # the index is missing, not a key
