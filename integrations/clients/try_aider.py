# /// script
# dependencies = ["aider-chat"]
# ///
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, OPENAI, check

folder = Path(tempfile.mkdtemp())
(folder / "hello.py").write_text('print("hello")\n', encoding="utf-8")
OPTIONS = ["--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--no-show-model-warnings"]
OPTIONS += [
    "--no-show-release-notes",
    "--no-pretty",
    "--no-gitignore",
    "--map-tokens",
    "0",
    "--edit-format",
    "whole",
]


def aider(*options):
    """What the command prints. It names a token limit where an answer was cut."""
    command = [sys.executable, "-m", "aider", "--model", f"openai/{MODEL}", *OPTIONS, *options]
    environment = {**os.environ, "OPENAI_API_BASE": OPENAI, "HOME": str(folder)}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-300:]
    assert "token limit" not in done.stdout, done.stdout[-300:]
    assert "litellm." not in done.stdout, done.stdout[-300:]
    return "Tokens:" in done.stdout


check("ask, streamed", lambda: aider("--chat-mode", "ask", "--message", "Say hello."))
check("ask, whole", lambda: aider("--no-stream", "--chat-mode", "ask", "--message", "Say hello."))
check("code", lambda: aider("hello.py", "--message", "Print good morning in place of hello."))
