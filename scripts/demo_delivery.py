"""Several machines on this one: a shared store, a delivery service, and an engine that never computed the corpus.

    make demo-delivery          # or: python -m scripts.demo_delivery

The demo's index is built if it is missing, published into a Valkey server, and delivered over HTTP. An engine that knows
only the service's address answers a question; so does the publisher, over the KV that it computed. The script prints both
answers, with the origin of their KV. Everything ends with this process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.support.valkey import Server
from blendserve import console
from blendserve.bench.server_process import ServerProcess
from blendserve.demo import INDEX, open_demo

QUESTION = "What does the with statement do?"
NAME = "python"
COMMAND = [sys.executable, "-m", "blendserve"]


def main() -> None:
    """Publish, serve, ask; exit code 1 if the engine computed a chunk, or the answers differ."""
    open_demo().close()
    with tempfile.TemporaryDirectory() as name, Server() as server:
        folder = Path(name)
        remote = {"deadline_s": 30}
        shared = _settings(folder / "collection.yaml", {"location": server.url, **remote})
        engine = _settings(folder / "engine.yaml", {"location": str(folder / "kv"), "remote": remote})
        subprocess.run([*COMMAND, "collection", "publish", str(INDEX), NAME, "-c", shared], check=True)
        serve = [*COMMAND, "collection", "serve", "-c", shared, "--port", "0"]
        with ServerProcess(serve, folder / "service.log") as service:
            answers = {
                "the publisher": _ask(str(INDEX), shared),
                "an engine that never computed the corpus": _ask(f"{service.url}/{NAME}", engine),
            }
    for title, answer in answers.items():
        console.out.print(f"\n[bold]{title}[/bold]: {answer['text']}", markup=True)
        console.out.print(f"  chunks by the origin of their KV: {answer['report']['tiers']}", style="dim")
    texts, missing = {a["text"] for a in answers.values()}, answer["report"]["chunks_missing"]
    console.out.print(f"\nThe answers are {'equal' if len(texts) == 1 else 'NOT equal'}.")
    raise SystemExit(int(len(texts) > 1 or bool(missing)))


def _settings(file: Path, store: dict[str, Any]) -> str:
    file.write_text(yaml.safe_dump({"store": store}))
    return str(file)


def _ask(index: str, config: str) -> dict[str, Any]:
    command = [*COMMAND, "ask", QUESTION, "-i", index, "-c", config, "--method", "blend", "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


if __name__ == "__main__":
    main()
