"""Calls to a server that end in time; what has just failed is not tried again at once.

    run   in the caller's thread: connect if need be, ask, answer     -> breaker closed | open
    ask   run on a worker; the caller waits at most the deadline      -> result | StoreUnavailable

Timeouts of sockets are for a single read, and name resolution has none. So a caller that gives up cuts the client's
connections, which frees the worker. The number of workers limits the calls in progress.

    closed --failure--> open, for a pause --pause over--> half open: one call is let through
       ^                  ^                                  |
       +---- success -----|---------------- success ---------+
                          +--- failure: twice the pause -----+

A server that is too slow for chunks may still answer short questions quickly. So a breaker that a read has opened is
closed by a read alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, TimeoutError
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from blendserve.errors import StoreCircuitOpen, StoreError, StoreUnavailable, unraised
from blendserve.store.clock import TimeSource

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
WORKERS = 4

HINT = "next to its URL in the settings"

T = TypeVar("T")
Client: TypeAlias = Any  # what the peer's library makes: shared by all workers

log = logging.getLogger(__name__)


class PeerUnusable(Exception):
    """A server cannot be used with these settings, or refuses; the text follows its name in messages."""


def read_file(path: Path, setting: str) -> str:
    """A file that a setting of a server names. Raises PeerUnusable."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise PeerUnusable(
            f"cannot be asked, as the file {path} cannot be read ({why}): correct {setting} {HINT}"
        ) from None


class Breaker:
    """The circuit breaker of one server. Each `enter` that returns is followed by `success`, `failure` or `abandon`.

    reading: the call reads chunks.
    """

    def __init__(
        self,
        server: str,
        first_pause_s: float = FIRST_PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
        now: Callable[[], float] = time.monotonic,
        effect: str = "its chunks count as missing until it answers",
    ) -> None:
        """server: its name in messages. effect: of an open breaker, for the log."""
        self._server = server
        self._now = now
        self._effect = effect
        self._first_s = first_pause_s
        self._longest_s = longest_pause_s
        self._pause_s = self._until = 0.0  # a pause of 0: closed
        self._is_trying = self._by_reading = False
        self._why = ""
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether a call would be refused now."""
        with self._lock:
            return bool(self._pause_s) and (self._is_trying or self._now() < self._until)

    def refuse_open(self) -> None:
        """Raise StoreCircuitOpen where a call would be refused now."""
        if self.is_open:
            raise self._error()

    def enter(self) -> None:
        """Ask before a call. Raises StoreCircuitOpen while it is open."""
        with self._lock:
            if self._pause_s:
                if self._is_trying or self._now() < self._until:
                    raise self._error()
                self._is_trying = True

    def success(self, reading: bool = False) -> None:
        """The server answered, whatever it said."""
        with self._lock:
            self._is_trying = False
            if self._pause_s and (reading or not self._by_reading):
                log.warning("%s responds again", self._server)
                self._pause_s = self._until = 0.0
                self._by_reading = False

    def failure(self, why: str, reading: bool = False) -> StoreCircuitOpen:
        """The server did not answer, or answered that it cannot -> the error to raise."""
        with self._lock:
            if not self._pause_s:
                log.warning("%s %s; %s", self._server, why, self._effect)
            if self._is_trying or self._now() >= self._until:  # else the call had begun before it opened
                self._pause_s = min(2 * self._pause_s or self._first_s, self._longest_s)
                self._until = self._now() + self._pause_s
            self._why = why
            self._is_trying = False
            self._by_reading |= reading
            return self._error()

    def abandon(self) -> None:
        """The call was not made after all."""
        with self._lock:
            self._is_trying = False

    @contextmanager
    def call(self, reading: bool = False) -> Iterator[None]:
        """One call, inside: StoreUnavailable opens the breaker. Raises StoreCircuitOpen while it is open."""
        self.enter()
        try:
            yield
        except StoreUnavailable as error:
            self.failure(f"failed ({error})", reading)
            raise
        except BaseException:
            self.success(reading)
            raise
        self.success(reading)

    def _error(self) -> StoreCircuitOpen:
        wait_s = max(0.0, self._until - self._now())
        return StoreCircuitOpen(f"{self._server} {self._why}; it is asked again in {wait_s:.1f} s")


class Peer(Protocol):
    """A server, and the protocol that it speaks."""

    where: str  # its address
    server: str  # its name in messages
    deadline_s: float

    def connect(self) -> Client:
        """Raises what its library does: see `explain`."""

    def disconnect(self, client: Client) -> None:
        """Cut every connection, also those in use: a thread that waits for one gets an error."""

    def explain(self, error: Exception) -> StoreError | str:
        """Our error for one of its library's; a text that follows its name if the error opens the breaker."""

    def timeout_reason(self) -> str:
        """Why an answer that did not come opens the breaker; the text follows its name."""

    def is_stale(self, error: Exception) -> bool:
        """Whether a new connection may succeed: the server was restarted, or another one has its address now."""


class BoundedClient:
    """Calls to one server or cluster. Thread-safe. Connects at the first call. reading: a call reads chunks."""

    def __init__(self, peer: Peer, workers: int = WORKERS, clock: TimeSource = time) -> None:
        """workers: of `ask`. clock: of the breaker's pauses."""
        self.peer = peer
        self.workers = workers
        self._breaker = Breaker(peer.server, now=clock.monotonic)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="blendserve-network")
        self._client: Client | None = None
        self._interrupts = 0  # a call that began before the last one tells the breaker nothing
        self._connecting = threading.Lock()

    def ask(self, job: Callable[[Client], T], seconds: float | None = None, reading: bool = False) -> T:
        """What the job returns, within so much time, by default the deadline. Raises StoreUnavailable, StoreFull."""
        closed = StoreUnavailable(f"the connection to {self.peer.where} is closed: open the store again")
        try:
            future = self._pool.submit(self.run, job, reading)
            error = future.exception(max(0.0, self.peer.deadline_s if seconds is None else seconds))
        except TimeoutError:
            future.cancel()  # if no worker was free, it has not begun
            raise self.interrupt(reading=reading) from None
        except (CancelledError, RuntimeError):
            raise closed from None
        if error is not None:
            raise unraised(error) if isinstance(error, StoreError) else error
        return future.result()

    def run(self, job: Callable[[Client], T], reading: bool = False) -> T:
        """What the job returns, in this thread. Raises StoreUnavailable, StoreFull."""
        self._breaker.enter()
        interrupts = self._interrupts
        try:
            result = self._call(job)
        except Exception as error:
            ours = error if isinstance(error, StoreError) else self.peer.explain(error)
            if self._interrupts != interrupts:
                raise StoreUnavailable(str(ours)) from error
            if isinstance(ours, str) or self.peer.is_stale(error):
                self._drop_client()
            if isinstance(ours, str):
                raise self._breaker.failure(ours, reading) from error
            self._breaker.success(reading)
            raise ours from error
        if self._interrupts == interrupts:
            self._breaker.success(reading)
        return result

    def interrupt(self, late: bool = True, reading: bool = False) -> StoreUnavailable:
        """Make every call fail at once, from any thread -> the error of an answer that did not come.

        late: the answer did not come in time, which opens the breaker; else it is no longer needed.
        """
        self._interrupts += 1
        self._drop_client()
        if late:
            return self._breaker.failure(self.peer.timeout_reason(), reading)
        self._breaker.abandon()
        return StoreUnavailable(f"{self.peer.server} {self.peer.timeout_reason()}")

    def close(self) -> None:
        """Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._interrupts += 1
        self._drop_client()

    def _call(self, job: Callable[[Client], T]) -> T:
        """Twice where a new connection may succeed."""
        started = time.monotonic()
        was_open = self._client is not None
        interrupts = self._interrupts
        try:
            return job(self._connected())
        except Exception as error:
            is_quick = time.monotonic() - started <= self.peer.deadline_s / 2
            is_cut = self._interrupts != interrupts
            if not was_open or not is_quick or is_cut or not self.peer.is_stale(error):
                raise
        self._drop_client()
        return job(self._connected())

    def _connected(self) -> Client:
        with self._connecting:
            if self._client is None:
                self._client = self.peer.connect()
            return self._client

    def _drop_client(self) -> None:
        """The next call makes a new one. Without the lock: a thread that cannot connect may hold it."""
        client, self._client = self._client, None
        if client is not None:
            try:
                self.peer.disconnect(client)
            except Exception as error:
                log.debug("a connection did not end cleanly: %s", error)


class Deadline:
    """A limit of waiting, in seconds; moments in which several threads wait count once. Thread-safe."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._waited = 0.0
        self._now = now
        self._waiting = 0  # threads
        self._since = 0.0  # when the first of them began to wait
        self._lock = threading.Lock()

    @property
    def waited(self) -> float:
        """Seconds in which a thread waited."""
        with self._lock:
            return self._waited + (self._now() - self._since if self._waiting else 0.0)

    @property
    def left(self) -> float:
        """Seconds; 0 when it is over."""
        return max(0.0, self._seconds - self.waited)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """This thread waits, inside."""
        with self._lock:
            self._since = self._since if self._waiting else self._now()
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    self._waited += self._now() - self._since
