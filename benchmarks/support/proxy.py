"""A network between a client and a server on loopback: of a rate and a round trip, dead, cut, or damaging bytes.

    socket -> read -> TokenBucket (all connections of one direction) -> delay -> written -> socket

It bounds what a network lets through and when. TCP's slow start is left out.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import socket
import ssl
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate

from benchmarks.support.worker import WorkerProcess

GBIT = 1e9 / 8  # bytes a second
BURST_S = 0.005  # of a bucket: makes up for late wake-ups
SLEEP_S = 0.001  # a bucket sleeps no shorter: many sleeps would bound the rate
PIECE, PACKET = 1 << 16, 1 << 12  # most and least bytes forwarded at a time
BUFFER = 1 << 18  # bytes that are read ahead on a connection
PIECE_S = 0.001  # time of a piece: connections share a link by packets, and a new rate holds soon
POLL_S = 0.005  # between looks at a dead link
SPARED = 1 << 10  # replies smaller than this are not damaged: greetings and counters
STEPS = 200  # of a trace that repeats nothing

Trace = tuple[tuple[float, float], ...]
"""(seconds, bytes a second), one after another; the last rate stays. Rate 0: the link is dead"""


@dataclass(slots=True)
class LinkConditions:
    """Changes hold from the next piece on."""

    bytes_per_s: float = 0.0  # each way, of all connections together; 0 = no limit
    delay_s: float = 0.0  # each way: half a round trip
    corrupt: bool = False  # one bit of every large piece that the server sends
    blackhole: bool = False  # nothing passes from the server, and no connection breaks
    close_after: int = 0  # bytes that the server has sent on one connection; 0 = never
    trace: Trace = ()  # in place of the rate, from now on
    began: float = field(default_factory=time.monotonic, compare=False)

    @property
    def rate(self) -> float:
        """Bytes a second at this moment; 0 = no limit, or a dead link of a trace."""
        return rate_at(self.trace, time.monotonic() - self.began) if self.trace else self.bytes_per_s

    @property
    def is_dead(self) -> bool:
        return self.blackhole or (bool(self.trace) and not self.rate)


def network(round_trip_ms: float, rate_gbit: float) -> LinkConditions:
    return LinkConditions(bytes_per_s=rate_gbit * GBIT, delay_s=round_trip_ms / 2e3)


def rate_at(trace: Trace, seconds: float) -> float:
    ends = [*accumulate(step[0] for step in trace)]
    return trace[min(bisect_right(ends, seconds), len(trace) - 1)][1]


def changing(seed: int) -> Mapping[str, Trace]:
    """Links whose rate changes, by name."""
    draw = random.Random(seed)
    teeth = tuple((0.02, (3.0 - 0.29 * (n % 11)) * GBIT) for n in range(STEPS))
    walk, at = list[tuple[float, float]](), 0.3
    for _ in range(STEPS):
        at = min(1.5, max(0.02, at * draw.lognormvariate(0.0, 0.5)))
        walk.append((0.05, at * GBIT))
    return {
        "down": ((0.05, 3 * GBIT), (1.0, 0.1 * GBIT)),
        "up": ((0.1, 0.1 * GBIT), (1.0, 3 * GBIT)),
        "sawtooth": teeth,
        "mobile": tuple(walk),
        "dead": ((0.02, 1 * GBIT), (1.0, 0.0)),
    }


class TokenBucket:
    """The rate that all connections of one direction share."""

    def __init__(self) -> None:
        self.n_bytes = 0  # that have passed
        self._free_at = 0.0

    async def take(self, n_bytes: int, bytes_per_s: float) -> None:
        """Wait until `n_bytes` have passed."""
        self.n_bytes += n_bytes
        if bytes_per_s:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - BURST_S) + n_bytes / bytes_per_s
            if self._free_at - now > SLEEP_S:
                await asyncio.sleep(self._free_at - now)


class Proxy:
    """Forwards connections to a port of this machine from one of its own, in a thread. A context manager."""

    def __init__(self, to_port: int, seed: int = 0, tls: ssl.SSLContext | None = None) -> None:
        """tls: of the clients' connections; None = the server's own protocol."""
        self.conditions = LinkConditions()
        self.up, self.down = TokenBucket(), TokenBucket()  # to the server, and from it
        self._to, self._random = to_port, random.Random(seed)
        self._open: set[asyncio.StreamWriter] = set()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())  # epoll sleeps whole milliseconds
        start = asyncio.start_server(self._connect, sock=listener, ssl=tls, limit=BUFFER)
        self._server = self._loop.run_until_complete(start)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def reset(self) -> None:
        """Perfect conditions for new connections; open ones end."""
        self.conditions = LinkConditions()
        asyncio.run_coroutine_threadsafe(self._abort(), self._loop).result()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._abort(ends=True), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _abort(self, ends: bool = False) -> None:
        """End the open connections. ends: accept no more."""
        for writer in self._open:
            writer.transport.abort()
        if ends:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to, limit=BUFFER)
        except OSError:
            writer.close()
            return
        ends = {writer, far_writer}
        self._open |= ends
        both = self._forward(reader, far_writer, self.up), self._forward(far_reader, writer, self.down)
        with suppress(asyncio.CancelledError):  # by `_abort`; asyncio would print the cancellation
            for direction in asyncio.as_completed(both):
                await direction
                for end in ends:
                    end.close()
        self._open -= ends

    async def _forward(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, bucket: TokenBucket
    ) -> None:
        """Until one end closes, or the conditions close it."""
        sent, due, is_down, closes = 0, 0.0, bucket is self.down, False
        with suppress(OSError):
            while not closes and (piece := await source.read(self._piece_bytes())):
                while is_down and self.conditions.is_dead:
                    await asyncio.sleep(POLL_S)
                now = self.conditions
                if closes := bool(is_down and now.close_after and sent + len(piece) > now.close_after):
                    piece = piece[: now.close_after - sent]
                elif is_down and now.corrupt and len(piece) >= SPARED:
                    at, bit = self._random.randrange(len(piece)), 1 << self._random.randrange(8)
                    piece = piece[:at] + bytes([piece[at] ^ bit]) + piece[at + 1 :]
                sent += len(piece)
                await bucket.take(len(piece), now.rate)
                due = max(due + 1e-9, self._loop.time() + now.delay_s)  # pieces stay in order
                if due > self._loop.time():
                    self._loop.call_at(due, target.write, piece)
                else:
                    target.write(piece)
                await target.drain()
        await asyncio.sleep(max(0.0, due - self._loop.time()))

    def _piece_bytes(self) -> int:
        rate = self.conditions.rate
        return min(PIECE, max(PACKET, int(rate * PIECE_S))) if rate else PIECE


class ProxyProcess(WorkerProcess):
    """A proxy in its own process: it shares no interpreter with the measured code, as a network does not."""

    def __init__(self, to_port: int, seed: int = 0) -> None:
        super().__init__(_start, (to_port, seed))
        self.port: int = self.about

    @property
    def n_bytes(self) -> int:
        """Bytes that have come from the server."""
        return int(self.call(None))

    def set(self, conditions: LinkConditions) -> None:
        """From the next piece on."""
        self.call(conditions)

    @contextmanager
    def replayed(self, trace: Trace, round_trip_s: float) -> Iterator[None]:
        """The link follows the trace from now on; afterwards it is perfect."""
        self.set(LinkConditions(delay_s=round_trip_s / 2, trace=trace))
        try:
            yield
        finally:
            self.set(LinkConditions())


def _start(task: tuple[int, int]) -> tuple[int, Callable[[LinkConditions | None], int]]:
    proxy = Proxy(*task)

    def answer(conditions: LinkConditions | None) -> int:
        proxy.conditions = conditions or proxy.conditions
        return proxy.down.n_bytes

    return proxy.port, answer
