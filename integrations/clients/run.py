"""Run unchanged clients of OpenAI's and Anthropic's APIs against a server, each in an environment of its own.

    python integrations/clients/run.py [CLIENT ...] [--json FILE]

A client is a script of this folder. Its first lines name the packages that it needs, as PEP 723 has it; a script of
Node.js names them in `// packages:`. A script prints a line for each feature: `ok NAME` or `failed NAME: REASON`. What
cannot be installed is skipped by name. Environments are in build/clients/.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from blendserve.bench.server_process import ServerProcess, serve_command
from blendserve.models.sources import bundled_folder

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
BUILD = ROOT / "build" / "clients"
MODEL = "smollm2-135m"
INSTALL_S, RUN_S = 900, 600  # limits
CAP = 300  # tokens of an answer: the bundled model rarely ends by itself


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("clients", nargs="*")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    scripts = {path.stem.removeprefix("try_"): path for path in sorted(HERE.glob("try_*.*"))}
    unknown = set(options.clients) - scripts.keys()
    if unknown:
        parser.error(f"no such client: {', '.join(sorted(unknown))}; there are {', '.join(scripts)}")
    results: dict[str, dict[str, str]] = {}
    BUILD.mkdir(parents=True, exist_ok=True)
    with ServerProcess(
        serve_command("--no-index", "--set", f"decode.max_new_tokens={CAP}"), BUILD / "server.log"
    ) as server:
        for name in options.clients or scripts:
            results[name] = run(scripts[name], server.url)
            for feature, outcome in results[name].items():
                print(f"{name:<16} {feature:<32} {outcome}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    failed = sum(outcome.startswith("failed") for found in results.values() for outcome in found.values())
    print(f"{sum(map(len, results.values()))} features of {len(results)} clients, {failed} failed")
    return int(failed > 0)


def run(script: Path, url: str) -> dict[str, str]:
    """The outcome of each feature of a client."""
    try:
        command = installed(script)
    except subprocess.SubprocessError as error:
        return {"installation": f"skipped: {reason(error)}"}
    environment = {
        **os.environ,
        "BASE_URL": url,
        "MODEL": MODEL,
        "TOKENIZER": str(bundled_folder(MODEL)),
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_API_KEY": "none",
    }
    environment |= {"OPENAI_BASE_URL": f"{url}/v1", "PYTHONPATH": str(HERE), "DO_NOT_TRACK": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S)
    except subprocess.TimeoutExpired:
        return {"all": f"failed: no end after {RUN_S} s"}
    found = dict[str, str]()
    for line in done.stdout.splitlines():
        state, _, rest = line.partition(" ")
        if state in ("ok", "failed"):
            feature, _, why = rest.partition(": ")
            found[feature] = f"{state}: {why}" if why else state
    if done.returncode or not found:
        found["all"] = f"failed: {done.stderr.strip().splitlines()[-1:] or done.returncode}"
    return found


def installed(script: Path) -> list[str]:
    """The command that runs a script in its environment. Raises SubprocessError if that cannot be made."""
    text, folder = script.read_text("utf-8"), BUILD / script.stem
    if script.suffix == ".mjs":
        packages = re.search(r"^// packages: (.+)$", text, re.MULTILINE)[1].split()  # type: ignore[index]
        if not (node := shutil.which("node")) or not (npm := shutil.which("npm")):
            raise subprocess.SubprocessError("node and npm are missing")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(script, folder / script.name)
        if not (folder / "node_modules").exists():
            call([npm, "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(folder), *packages])
        return [node, str(folder / script.name)]
    packages = json.loads(re.search(r"^# dependencies = (\[.*\])$", text, re.MULTILINE)[1])  # type: ignore[index]
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        call([sys.executable, "-m", "venv", str(folder)])
        call([str(python), "-m", "pip", "install", "--quiet", "--no-compile", *packages])
        (folder / "installed").touch()
    return [str(python), str(script)]


def call(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)


def reason(error: subprocess.SubprocessError) -> str:
    """Why an installation failed, in a line."""
    lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    return lines[-1][:200] if lines else str(error)


if __name__ == "__main__":
    sys.exit(main())
