"""A server as its operator sees it: a process that is started, told to stop, and killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from blendserve.cli import main
from blendserve.errors import ConfigError
from blendserve.serve.config import Config, effective, load_settings
from blendserve.store import LMDBStore
from tests.engine.helpers import PASSAGES, QUESTIONS
from tests.serve.toy_server import ToyServer

OWN = [{"text": p.text, "title": p.title} for p in PASSAGES]
ASK: dict[str, Any] = {"question": QUESTIONS[0], "passages": OWN}


def test_sigterm_finishes_what_runs_and_kill_9_harms_no_store(tmp_path: Path) -> None:
    with ToyServer(tmp_path) as server, httpx.Client(base_url=server.url, timeout=300) as http:
        with http.stream("POST", "/v1/rag/query", json={**ASK, "max_tokens": 300, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.terminate()
            events = [json.loads(line[6:]) for line in lines if line]
        assert events[-1]["event"] == "done"
        assert "".join(e["text"] for e in events[:-1]) == events[-1]["text"]
        assert server.wait() == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
    with ToyServer(tmp_path) as server:
        kept = httpx.post(f"{server.url}/v1/rag/query", json={**ASK, "max_tokens": 4}, timeout=300).json()
        assert kept["report"]["chunks_hit"] == len(OWN)  # what the first process stored
        more = [{"text": f"{p['text']} {i}"} for i in range(20) for p in OWN]
        with httpx.stream(
            "POST", f"{server.url}/v1/rag/query", json={**ASK, "passages": more[:30], "stream": True}
        ) as stream:
            next(stream.iter_lines())
            server.kill()
    with LMDBStore(tmp_path / "kv", 2**27, read_only=True) as store:
        assert store.verify().bad == ()
        assert store.stats().chunks >= len(OWN) + 1


def test_settings_by_file_and_the_effective_ones(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("blend: {ratio: 0.05}\nserve: {slots: 3}\n")
    settings = load_settings(file)
    assert (settings.serve.slots, settings.blend.ratio) == (3, 0.05)
    shown = yaml.safe_load(effective(settings, ["indexes/demo"]))
    assert shown.pop("indexes") == ["indexes/demo"]
    assert Config(**shown) == settings
    file.write_text("serve: {slot: 3}\n")
    with pytest.raises(ConfigError, match=r"'serve.slot': did you mean 'slots'"):
        load_settings(file)
    file.write_text("srve: {slots: 3}\n")
    with pytest.raises(ConfigError, match="unknown setting 'srve': did you mean 'serve'"):
        load_settings(file)


def test_keys_and_a_refusal_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "keys.json")

    def run(*command: str) -> tuple[int, str, str]:
        return main(command), *capsys.readouterr()

    code, key, _ = run("keys", "create", "ann", "--collection", "demo", "--file", file)
    assert code == 0
    assert key.startswith("bsk-")
    assert "demo" in run("keys", "list", "--file", file)[1]
    assert run("keys", "create", "ann", "--file", file)[0] == 2
    assert run("keys", "revoke", "ann", "--file", file)[0] == 0
    assert run("keys", "revoke", "ann", "--file", file)[0] == 2
    code, _, err = run("serve", "--host", "0.0.0.0", "--index", str(tmp_path))
    assert code == 2
    assert "no API keys are set" in err
    code, _, err = run("serve", "--index", str(tmp_path / "nothing"))
    assert code == 2
    assert "Traceback" not in err
