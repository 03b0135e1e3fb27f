"""A network between a client and a server on loopback: of a rate and a round trip, dead, cut, or damaging bytes.

    socket -> read -> TokenBucket (all connections of one direction) -> DelayQueue -> written -> socket

It bounds what a network lets through and when. That TCP takes some round trips to reach a rate is left out.
"""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.support.worker import WorkerProcess, serve

GBIT = 1e9 / 8  # bytes a second
BURST_S = 0.005  # that a bucket makes up for: sleeping is no more precise
QUEUED = 1 << 10  # pieces under way; the sender keeps more
PIECE, PACKET = 1 << 16, 1 << 12  # most and least bytes forwarded at a time
PIECE_S = 0.001  # that a piece may take: connections share a link by packets, and a new rate holds soon
POLL_S = 0.005  # between looks whether a dead link is alive again
SPARED = 1 << 10  # replies smaller than this are not damaged: greetings and counters
STEPS = 200  # of a trace that repeats nothing


@dataclass(slots=True)
class LinkConditions:
    """What happens on the way; changes hold from the next piece on."""

    bytes_per_s: float = 0.0  # each way, of all connections together; 0 = no limit
    delay_s: float = 0.0  # each way: half a round trip
    corrupt: bool = False  # one bit of every large piece that the server sends
    blackhole: bool = False  # nothing passes from the server, and no connection breaks
    close_after: int = 0  # bytes that the server has sent on one connection; 0 = never

    @property
    def piece(self) -> int:
        """Bytes to forward at a time."""
        return min(PIECE, max(PACKET, int(self.bytes_per_s * PIECE_S))) if self.bytes_per_s else PIECE


def network(round_trip_ms: float, rate_gbit: float) -> LinkConditions:
    return LinkConditions(bytes_per_s=rate_gbit * GBIT, delay_s=round_trip_ms / 2e3)


class TokenBucket:
    """The rate that all connections of one direction share. Safe to share between threads."""

    def __init__(self) -> None:
        self.n_bytes = 0  # that have passed
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, n_bytes: int, bytes_per_s: float) -> None:
        """Wait until `n_bytes` have passed."""
        with self._lock:
            self.n_bytes += n_bytes
            if not bytes_per_s:
                return
            now = time.monotonic()
            self._free_at = max(self._free_at, now - BURST_S) + n_bytes / bytes_per_s
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)


class DelayQueue:
    """Pieces on their way to a socket, written in order, each when it is due; a delay holds nothing else up."""

    def __init__(self, to: socket.socket) -> None:
        self._to = to
        self._pieces: queue.Queue[tuple[float, bytes]] = queue.Queue(QUEUED)
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def put(self, piece: bytes, delay_s: float) -> None:
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
        _shut(self._to)  # the other end has gone: its reader is to end, too
        while self._pieces.get()[1]:
            pass


class Proxy:
    """Forwards connections to a port of this machine from one of its own. A context manager."""

    def __init__(self, to_port: int, seed: int = 0, tls: ssl.SSLContext | None = None) -> None:
        """tls: what clients have to speak; None = the server's own protocol."""
        self.conditions = LinkConditions()
        self.up, self.down = TokenBucket(), TokenBucket()  # to the server, and from it
        self._to, self._random, self._tls = to_port, random.Random(seed), tls
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

    def reset(self) -> None:
        """Perfect conditions for new connections; open ones end."""
        self.conditions = LinkConditions()
        with self._lock:
            for connection in self._open:
                _shut(connection)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        _shut(
            self._listener
        )  # wakes the accepting thread: closing alone leaves the port open until a connection comes
        self._listener.close()
        self.reset()

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
                for source, target, bucket in ((client, server, self.up), (server, client, self.down)):
                    threading.Thread(target=self._forward, args=(source, target, bucket), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, bucket: TokenBucket) -> None:
        sent, delayed, from_server = 0, DelayQueue(target), bucket is self.down
        with contextlib.suppress(OSError):
            while piece := source.recv(self.conditions.piece):
                while from_server and self.conditions.blackhole:
                    time.sleep(POLL_S)
                now = self.conditions
                closes = from_server and now.close_after and sent + len(piece) > now.close_after
                if closes:
                    piece = piece[: now.close_after - sent]
                elif from_server and now.corrupt:
                    piece = self._corrupted(piece)
                if piece:
                    bucket.take(len(piece), now.bytes_per_s)
                    delayed.put(piece, now.delay_s)
                sent += len(piece)
                if closes:
                    break
        delayed.end()
        for end in (source, target):
            _shut(end)
            with self._lock:
                self._open.discard(end)
            end.close()

    def _corrupted(self, piece: bytes) -> bytes:
        if len(piece) < SPARED:
            return piece
        damaged = bytearray(piece)
        damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
        return bytes(damaged)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class ProxyProcess(WorkerProcess):
    """A proxy that does not share an interpreter with what is measured, as no network does."""

    def __init__(self, to_port: int, log: Path, seed: int = 0) -> None:
        super().__init__(__name__, {"to_port": to_port, "seed": seed}, log)
        self.port = int(self.about)

    @property
    def n_bytes(self) -> int:
        """Bytes that have come from the server."""
        return int(self.call(None))

    def set(self, conditions: LinkConditions) -> None:
        """From the next piece on."""
        self.call(asdict(conditions))


def _start(task: dict[str, int]) -> tuple[int, Any]:
    proxy = Proxy(task["to_port"], task["seed"])

    def answer(request: dict[str, Any] | None) -> int:
        if request is not None:
            proxy.conditions = LinkConditions(**request)
        return proxy.down.n_bytes

    return proxy.port, answer


@dataclass(frozen=True, slots=True)
class Trace:
    """Rates of a link in bytes a second, each for so long; the last one stays. Rate 0: the link is dead."""

    name: str
    steps: tuple[tuple[float, float], ...]  # (seconds, bytes a second)

    @property
    def start(self) -> Trace:
        """Its first rate for ever."""
        return Trace(self.name, self.steps[:1])

    def rate(self, seconds: float) -> float:
        """At this time."""
        for end, (_, rate) in zip(accumulate(s for s, _ in self.steps), self.steps, strict=True):
            if seconds < end:
                return rate
        return self.steps[-1][1]


def constant(gbit: float) -> Trace:
    return Trace(f"{gbit:g} Gbit/s", ((1.0, gbit * GBIT),))


def changing(seed: int) -> Mapping[str, Trace]:
    """Links whose rate changes, by name."""
    draw = random.Random(seed)
    teeth = [(0.02, (3.0 - 0.29 * (n % 11)) * GBIT) for n in range(STEPS)]
    walk, at = [], 0.3
    for _ in range(STEPS):
        at = min(1.5, max(0.02, at * draw.lognormvariate(0.0, 0.5)))
        walk.append((0.05, at * GBIT))
    traces = {
        "down": ((0.05, 3 * GBIT), (1.0, 0.1 * GBIT)),
        "up": ((0.1, 0.1 * GBIT), (1.0, 3 * GBIT)),
        "sawtooth": tuple(teeth),
        "mobile": tuple(walk),
        "dead": ((0.02, 1 * GBIT), (1.0, 0.0)),
    }
    return {name: Trace(name, steps) for name, steps in traces.items()}


@contextmanager
def replayed(trace: Trace, proxy: ProxyProcess, round_trip_s: float) -> Iterator[None]:
    """The link follows the trace from now on; afterwards it is perfect."""
    over = threading.Event()

    def set_rate(rate: float) -> None:
        proxy.set(LinkConditions(bytes_per_s=rate, delay_s=round_trip_s / 2, blackhole=rate == 0))

    def replay() -> None:
        start = time.monotonic()
        for end, (_, rate) in zip(accumulate(s for s, _ in trace.steps), trace.steps, strict=True):
            set_rate(rate)
            if over.wait(max(0.0, start + end - time.monotonic())):
                return

    set_rate(trace.steps[0][1])
    player = threading.Thread(target=replay, daemon=True)
    player.start()
    try:
        yield
    finally:
        over.set()
        player.join()
        proxy.set(LinkConditions())


if __name__ == "__main__":
    serve(_start)
