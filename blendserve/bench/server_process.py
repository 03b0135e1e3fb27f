"""A server in a process of its own, for benches and soak tests: started, measured, stopped and killed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from blendserve.errors import ServeError

LISTENING = re.compile(rb"^Listening on (\S+)$", re.MULTILINE)
POLL_S = 0.05
# what is measured does not depend on evidence, and no check runs beside it
FIXED = (
    "--set",
    "blend.ratio=0.05",
)


def serve_command(*options: str) -> list[str]:
    """`blendserve serve` in this interpreter, on a free port."""
    return [sys.executable, "-m", "blendserve", "serve", "--port", "0", *options]


class ServerProcess:
    """`with ServerProcess(command, log) as server:` it listens at `server.url` and writes its output to `log`.

    It stays in the process group of its parent, so that a signal to the group also ends the server.
    Raises ServeError when the process ends before it listens.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        with log.open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        self.pid = self._process.pid
        has_ended = False
        match = None
        while not (match or has_ended):
            has_ended = self._process.poll() is not None  # before the log is read
            match = LISTENING.search(output := log.read_bytes())
            time.sleep(0 if match else POLL_S)
        if not match:
            last_line = output.decode(errors="replace").strip().rpartition("\n")[2] or "no output"
            code = self._process.returncode
            raise ServeError(
                f"the server exited with {code} before it listened: {last_line} (log: {log})", path=log
            )
        self.url = match[1].decode()

    @property
    def memory_mb(self) -> float:
        """Anonymous resident memory. Pages of files, such as the store's map, do not count."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        match = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
        return round(int(match[1]) / 1024, 1) if match else 0.0

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """Send SIGTERM and wait -> exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
