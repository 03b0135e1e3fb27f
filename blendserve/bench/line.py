"""One direction of a network: so many bytes a second for all connections together, each piece later by a delay.

    socket -> read -> pass the bottleneck -> under way (any number of pieces) -> due -> written -> socket

A delay holds nothing up: what follows is under way meanwhile.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

BURST_S = 0.005  # that a line makes up for: sleeping is no more precise than that
UNDER_WAY = 1 << 10  # pieces; more are left with who sends


class Line:
    """A token bucket that all connections of one direction share. Safe to share between threads."""

    def __init__(self) -> None:
        self.n_bytes = 0  # that have passed
        self._free_at = 0.0
        self._lock = threading.Lock()

    def passing(self, n_bytes: int, bytes_per_s: float) -> None:
        """Wait until so many bytes have passed; 0 bytes a second = as fast as it goes."""
        with self._lock:
            self.n_bytes += n_bytes
            if not bytes_per_s:
                return
            now = time.monotonic()
            self._free_at = max(self._free_at, now - BURST_S) + n_bytes / bytes_per_s
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)


class Delayed:
    """Pieces on their way to a socket, written in order, each when it is due."""

    def __init__(self, to: socket.socket) -> None:
        self._to = to
        self._pieces: queue.Queue[tuple[float, bytes]] = queue.Queue(UNDER_WAY)
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def send(self, piece: bytes, delay_s: float) -> None:
        """Have it written after the delay; waits only where very much is under way."""
        self._pieces.put((time.monotonic() + delay_s, piece))

    def end(self) -> None:
        """Wait until all is written, or cannot be."""
        self._pieces.put((0.0, b""))
        self._writer.join()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (due_piece := self._pieces.get())[1]:
                due, piece = due_piece
                if (wait := due - time.monotonic()) > 0:
                    time.sleep(wait)
                self._to.sendall(piece)
            return
        with contextlib.suppress(OSError):
            self._to.shutdown(socket.SHUT_RDWR)  # nobody listens: who reads for it is to end, too
        while self._pieces.get()[1]:
            pass
