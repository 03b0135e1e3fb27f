"""Several machines on this one: a publisher, a server of files, and an engine that never computed the corpus.

    make demo-delivery          # or: python -m scripts.demo_delivery

The demo's index is built if it is missing, published into a folder, and served over HTTP. An engine that knows only the
collection's URL answers a question; so does the publisher, over the KV that it computed. The script prints both answers,
with the origin of their KV. Everything ends with this process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from blendserve import console
from blendserve.bench.server_process import ServerProcess
from blendserve.demo import INDEX, open_demo

QUESTION = "What does the with statement do?"
NAME = "python"
COMMAND = [sys.executable, "-m", "blendserve"]


def main() -> None:
    """Publish, serve, ask; exit code 1 if the engine computed a chunk, or the answers differ."""
    open_demo().close()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = folder / "engine.yaml"
        engine.write_text(
            yaml.safe_dump({"store": {"location": str(folder / "kv"), "remote": {"deadline_s": 30}}})
        )
        subprocess.run([*COMMAND, "kdn", "publish", str(INDEX), f"{folder}/www/{NAME}"], check=True)
        serve = [*COMMAND, "kdn", "serve", f"{folder}/www", "--port", "0"]
        with ServerProcess(serve, folder / "service.log") as service:
            answers = {
                "the publisher": _ask(str(INDEX)),
                "an engine that never computed the corpus": _ask(
                    f"kdn:{service.url}/{NAME}", "-c", str(engine)
                ),
            }
    for title, answer in answers.items():
        console.out.print(f"\n[bold]{title}[/bold]: {answer['text']}", markup=True)
        console.out.print(f"  chunks by the origin of their KV: {answer['report']['tiers']}", style="dim")
    texts, missing = {a["text"] for a in answers.values()}, answer["report"]["chunks_missing"]
    console.out.print(f"\nThe answers are {'equal' if len(texts) == 1 else 'NOT equal'}.")
    raise SystemExit(int(len(texts) > 1 or bool(missing)))


def _ask(index: str, *options: str) -> dict[str, Any]:
    command = [*COMMAND, "ask", QUESTION, "-i", index, *options, "--method", "blend", "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


if __name__ == "__main__":
    main()
