"""A network between a client and a server on loopback, as bad as asked for: slow, far, cut, or turning bits round.

It bounds what a network lets through and when; that TCP takes some round trips to reach a rate is left out.
"""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
import time
from dataclasses import dataclass

from blendserve.bench.line import Delayed, Line

PIECE, PACKET = 1 << 16, 1 << 12  # most and least bytes forwarded at a time
PIECE_S = (
    0.001  # that a piece may take: connections share a link by packets, and a new rate soon holds for all
)
DEAD_S = 0.005  # between looks whether it lives again
SPARED = 1 << 10  # replies smaller than this are not damaged: greetings and counters


@dataclass(slots=True)
class Weather:
    """What happens on the way; changes hold from the next piece on."""

    bytes_per_s: float = 0.0  # each way, of all connections together; 0 = as fast as it goes
    delay_s: float = 0.0  # each way: half a round trip
    flip: bool = False  # a bit of every piece of some size that the server sends
    dead: bool = False  # nothing passes from the server, and nobody is told
    cut_after: int = 0  # bytes of one connection that the server has sent; 0 = never

    @property
    def piece(self) -> int:
        """Bytes to forward at a time."""
        return min(PIECE, max(PACKET, int(self.bytes_per_s * PIECE_S))) if self.bytes_per_s else PIECE


class Link:
    """Forwards connections to a port of this machine from one of its own. A context manager."""

    def __init__(self, to_port: int, seed: int = 0, tls: ssl.SSLContext | None = None) -> None:
        """tls: what clients have to speak; None = nothing but the server's own protocol."""
        self.weather = Weather()
        self.up, self.down = Line(), Line()  # to the server, and from it
        self._to, self._dice, self._tls = to_port, random.Random(seed), tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def heal(self) -> None:
        """Good weather, for connections to come: those that are there end."""
        self.weather = Weather()
        with self._lock:
            for line in self._open:
                _shut(line)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        _shut(self._listener)  # wakes who accepts: closing alone leaves the port open until somebody calls
        self._listener.close()
        self.heal()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # until the listener is closed
            while True:
                client, _ = self._listener.accept()
                try:
                    if self._tls:
                        client = self._tls.wrap_socket(client, server_side=True)
                    server = socket.create_connection(("127.0.0.1", self._to), timeout=5.0)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                for end in (client, server):  # or a piece may wait for the last one's acknowledgement
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._open |= {client, server}
                for job in (self._up, self._down):
                    threading.Thread(target=job, args=(client, server), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        way = Delayed(server)
        with contextlib.suppress(OSError):
            while piece := client.recv(self.weather.piece):
                self._forward(piece, self.up, way)
        way.end()
        self._end(client, server)

    def _down(self, client: socket.socket, server: socket.socket) -> None:
        sent, way = 0, Delayed(client)
        with contextlib.suppress(OSError):
            while piece := server.recv(self.weather.piece):
                while self.weather.dead:
                    time.sleep(DEAD_S)
                weather = self.weather
                if weather.cut_after and sent + len(piece) > weather.cut_after:
                    self._forward(piece[: weather.cut_after - sent], self.down, way)
                    break
                self._forward(self._flipped(piece) if weather.flip else piece, self.down, way)
                sent += len(piece)
        way.end()
        self._end(client, server)

    def _forward(self, piece: bytes, line: Line, way: Delayed) -> None:
        if piece:
            line.passing(len(piece), self.weather.bytes_per_s)
            way.send(piece, self.weather.delay_s)

    def _flipped(self, piece: bytes) -> bytes:
        if len(piece) < SPARED:
            return piece
        damaged = bytearray(piece)
        damaged[self._dice.randrange(len(damaged))] ^= 1 << self._dice.randrange(8)
        return bytes(damaged)

    def _end(self, *lines: socket.socket) -> None:
        for line in lines:
            _shut(line)
            with self._lock:
                self._open.discard(line)
            line.close()


def _shut(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
