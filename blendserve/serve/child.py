"""A server as a process of its own: started, watched, stopped and killed by scripts that measure it."""

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


def serve_command(*options: str) -> list[str]:
    """`blendserve serve` in this interpreter, on a free port."""
    return [sys.executable, "-m", "blendserve", "serve", "--port", "0", *options]


class Child:
    """`with Child(command, log) as server:` it listens at `server.url`; what it prints goes to the end of `log`.

    It stays in its starter's process group: what stops or ends that one does the same to the server.
    Raises ServeError when the process ends before it listens.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        printed = log.stat().st_size if log.exists() else 0
        with log.open("ab") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        self.pid = self._process.pid
        self.url = self._wait(printed)

    def _wait(self, printed: int) -> str:
        while True:
            ended = self._process.poll() is not None
            with self._log.open("rb") as out:
                out.seek(printed)
                said = out.read()
            if found := LISTENING.search(said):
                return found[1].decode()
            if ended:
                last = said.decode(errors="replace").strip().rpartition("\n")[2]
                raise ServeError(
                    f"the server ended with {self._process.returncode} at its start: {last or 'it said nothing'} (all it "
                    f"said is in {self._log})",
                    path=self._log,
                )
            time.sleep(0.05)

    @property
    def memory_mb(self) -> float:
        """Resident and its own: pages of files, such as the store's map, are the kernel's to drop."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        match = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
        return round(int(match[1]) / 1024, 1) if match else 0.0

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM, and wait -> exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
