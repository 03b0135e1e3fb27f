"""Do what the documentation says, literally: run the bash and python blocks of pages in order, in an empty folder.

    python -m scripts.strangers [TASK ...]

Prints for each task the minutes, the number of commands, and what they printed. It runs this Python's blendserve. What
differs from a person at a shell: `make`, `docker` and `git` are left out, as blendserve is installed; `pip` runs in the
checkout, into an environment of its own; a server runs in the background, and ends where the next one starts; port 8000
is a free one.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
START = "README.md#start-in-five-minutes"
TASKS = {  # name -> pages, or sections of pages, and what must be printed
    "first answer": ((START,), r'"blended": true'),
    "own folder of files": (("docs/tutorial/2-your-documents.md",), r"blended: [1-9]"),
    "LangChain": ((START, "docs/how-to/langchain.md"), r"[1-9]\d* tokens reused"),
    "key and proxy": (
        (START, "docs/how-to/api-keys.md#one-key", "docs/how-to/proxy.md"),
        r'"object": ?"list"',
    ),
    "what was reused": ((START, "docs/how-to/monitor.md"), r"blendserve_prompt_tokens_total"),
}
# The DEBUG trap counts and shows each command of the pages. bash may run it inside functions, too: `inner` tells.
SHELL = r"""
set -eu
make() { :; }
docker() { :; }
git() { :; }
pip() { [ -z "$SITE" ] || (cd "$CHECKOUT" && "$SITE/bin/python" -m pip "$@" --quiet --disable-pip-version-check); }
python() { local inner=1; "$PYTHON" "$@"; }
blendserve() {
    local inner=1
    case "$*" in serve* | "demo --page"*) serve "$@" ;; *) python -m blendserve "$@" ;; esac
}
serve() {
    stop
    "$PYTHON" -m blendserve "$@" > "$LOG" 2>&1 &
    server=$!
    until curl --silent --fail "http://127.0.0.1:$BLENDSERVE__SERVE__PORT/health" > "$LOG.health"; do
        kill -0 $server || { cat "$LOG"; exit 1; }
        sleep 0.2
    done
}
stop() { if [ -n "$server" ]; then kill $server; wait $server || true; fi; server=; }
show() { [ -n "${inner:-}" ] || [ "$1" = inner=1 ] || { n=$((n + 1)); printf '\n$ %s\n' "${1%%$'\n'*}"; }; }
server=
n=0
trap 'inner=1; stop; echo "commands: $n"' EXIT
trap 'show "$BASH_COMMAND"' DEBUG
"""


class Visit(NamedTuple):
    """What came of a task."""

    code: int
    seconds: float
    commands: int
    printed: str


def section(page: str) -> str:
    """The text of a page, or of its section "PAGE#ANCHOR": up to the next heading of the same level or above."""
    name, _, anchor = page.partition("#")
    lines, level, in_code = list[str](), 0, False
    for line in (ROOT / name).read_text("utf-8").splitlines():
        in_code ^= line.startswith("```")
        if (heading := re.match(r"(#+) (.*)", line)) and not in_code:
            found = re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-") == anchor
            if found or (level and len(heading[1]) <= level):
                level = len(heading[1]) if found else 0
        if level or not anchor:
            lines.append(line)
    return "\n".join(lines) + "\n"


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, content) of a text's bash and python blocks."""
    for found in re.finditer(r"^```(bash|python)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield found[1], found[2]


def shell_script(pages: Sequence[str]) -> str:
    """The blocks of pages as one shell script."""
    parts = [SHELL]
    for page in pages:
        for language, content in blocks(section(page)):
            parts.append(
                f"python << 'END_OF_BLOCK'\n{content}END_OF_BLOCK\n" if language == "python" else content
            )
    return "\n".join([*parts, "inner=1"])


def visit(pages: Sequence[str], folder: Path, installs: bool = True, **variables: str) -> Visit:
    """Run the blocks of pages in this folder, which is made; it must not exist. installs: run `pip`, too."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as free:
        made = overlay(Path(scratch) / "venv") if installs else None
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "CHECKOUT": str(ROOT),
            "SITE": str(made or ""),
            "PYTHON": str(made / "bin" / "python" if made else sys.executable),
            "LOG": str(Path(scratch) / "server.log"),
            "BLENDSERVE__SERVE__PORT": port,
            **variables,
        }
        script = shell_script(pages).replace("8000", port)
        start = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    printed, _, commands = done.stdout.rpartition("commands: ")
    return Visit(done.returncode, time.monotonic() - start, int(commands), printed)


def overlay(folder: Path) -> Path:
    """A virtual environment that sees the packages of this one."""
    venv.create(folder, with_pip=True)
    (packages,) = folder.glob("lib/*/site-packages")
    (packages / "parent.pth").write_text("".join(f"{path}\n" for path in site.getsitepackages()))
    return folder


def main(names: Sequence[str]) -> int:
    """0 = every task came to its end and printed what it must."""
    failed, rows = list[str](), list[str]()
    for name in names or TASKS:
        pages, expected = TASKS[name]
        folder = Path(tempfile.mkdtemp()) / "stranger"
        done = visit(pages, folder)
        print(f"==== {name}: {', '.join(pages)}\n{done.printed}", flush=True)
        is_right = done.code == 0 and re.search(expected, done.printed) is not None
        failed += [] if is_right else [name]
        state = "done" if is_right else f"failed, exit code {done.code}"
        rows.append(f"{name:<20} {done.seconds / 60:5.1f} minutes {done.commands:3} commands  {state}")
        shutil.rmtree(folder.parent)
    print("", *rows, sep="\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
