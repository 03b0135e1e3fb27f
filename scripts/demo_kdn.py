"""Several machines on this one: a shared store, a delivery service, and an engine that never computed the corpus.

    make demo-kdn          # or: python -m scripts.demo_kdn

The demo's index is built if it is not there, published into a Valkey server, and delivered over HTTP. An engine with
nothing but the address answers a question; so does the publisher, over the KV that it computed. Both answers are
printed, with where the KV came from. Everything ends with this process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.support.valkey import Server, free_port
from blendserve import console
from blendserve.demo import INDEX, open_demo

QUESTION = "What does the with statement do?"
NAME = "python"
COMMAND = [sys.executable, "-m", "blendserve"]
START_S = 120.0


def main() -> None:
    """Publish, serve, ask; exit code 1 if the engine computed what it should have been delivered."""
    open_demo().close()
    with tempfile.TemporaryDirectory() as folder, Server() as server:
        shared, port = Path(folder) / "kdn.yaml", free_port()
        store = {"location": server.url, "deadline_s": 30}
        shared.write_text(yaml.safe_dump({"store": store}))
        engine = Path(folder) / "engine.yaml"
        own = {"location": str(Path(folder) / "kv"), "remote": {"deadline_s": 30}}
        engine.write_text(yaml.safe_dump({"store": own}))
        _run("kdn", "publish", str(INDEX), NAME, "-c", str(shared))
        serve = [*COMMAND, "kdn", "serve", "-c", str(shared), "--port", str(port)]
        log = Path(folder) / "service.log"
        with log.open("wb") as said, subprocess.Popen(serve, stderr=said) as service:
            try:
                _wait_for(f"http://127.0.0.1:{port}/health", service, log)
                here = _ask(str(INDEX), shared)
                there = _ask(f"kdn:http://127.0.0.1:{port}/{NAME}", engine)
            finally:
                service.terminate()
    for who, answer in (("the publisher", here), ("an engine that never computed it", there)):
        report = answer["report"]
        console.out.print(f"\n[bold]{who}[/bold]: {answer['text']}", markup=True)
        console.out.print(f"  chunks by where their KV came from: {report['tiers']}", style="dim")
    same = here["text"] == there["text"]
    console.out.print(f"\nThe answers are {'equal' if same else 'NOT equal'}.")
    if not same or there["report"]["chunks_missing"]:
        raise SystemExit(1)


def _run(*words: str) -> str:
    done = subprocess.run([*COMMAND, *words], check=True, stdout=subprocess.PIPE, text=True, env=os.environ)
    return done.stdout


def _ask(index: str, config: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        _run("ask", QUESTION, "-i", index, "-c", str(config), "--method", "blend", "--json")
    )
    return found


def _wait_for(url: str, service: subprocess.Popen[bytes], log: Path) -> None:
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up and service.poll() is None:
        try:
            if httpx.get(url, timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise SystemExit(f"the delivery service did not start:\n{log.read_text()}")


if __name__ == "__main__":
    main()
