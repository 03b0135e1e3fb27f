"""Calls to the server that end in time: a caller waits no longer than they want to, whatever server and network do.

    this thread   begin ...... wait (at most the deadline) -> result | StoreUnavailable
    worker        connect if need be, ask, answer          -> breaker closed | open

Timeouts of sockets are for a single read, and there are none for names that do not resolve: so a call runs on a worker,
and the caller who gives it up cuts the client's connections, which frees the worker. Workers bound the calls under way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, TimeoutError
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from blendserve.errors import StoreError, StoreUnavailable, unraised
from blendserve.store.clock import Clock
from blendserve.store.network.breaker import Breaker

WORKERS = 4

T = TypeVar("T")
Client: TypeAlias = Any  # what the peer's library makes: shared by all workers

log = logging.getLogger(__name__)


class Peer(Protocol):
    """A server, and how it is spoken to."""

    where: str  # its address
    server: str  # how messages call it
    deadline_s: float

    def connect(self) -> Client:
        """Raises what its library does: see `explained`."""
        ...

    def disconnect(self, client: Client) -> None:
        """Cut every connection, those in use too: who waits for one gets an error."""
        ...

    def explained(self, error: Exception) -> StoreError | str:
        """Our error for one of its library's; where it is to be left alone for it, words that follow its name."""
        ...

    def late(self) -> str:
        """What is said when its answer did not come; the words follow its name."""
        ...

    def stale(self, error: Exception) -> bool:
        """Whether a connection that was kept may just have ended with a server that was started again since."""
        ...


class Call(Generic[T]):
    """One call under way."""

    def __init__(self, job: Callable[[Client], T], reading: bool) -> None:
        self.job, self.reading = job, reading
        self.future: Future[T]
        self._settled = False
        self._lock = threading.Lock()

    def settle(self) -> bool:
        """Whether what became of the call is the caller's to tell the breaker: true once."""
        with self._lock:
            settled, self._settled = self._settled, True
            return not settled


class Connection:
    """To one server or cluster. Safe to share between threads."""

    def __init__(self, peer: Peer, workers: int = WORKERS, clock: Clock = time) -> None:
        """Connects at the first call. workers: calls under way at a time. clock: of the breaker's pauses."""
        self.peer, self.workers = peer, workers
        self._breaker = Breaker(peer.server, now=clock.monotonic)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="blendserve-network")
        self._client: Client | None = None
        self._connecting = threading.Lock()

    def ask(self, job: Callable[[Client], T], seconds: float | None = None) -> T:
        """What the job returns, within so many seconds, by default the deadline. Raises StoreUnavailable, StoreFull."""
        return self.wait(self.begin(job), self.peer.deadline_s if seconds is None else seconds)

    def begin(self, job: Callable[[Client], T], reading: bool = False) -> Call[T]:
        """Start a call. reading: of chunks, for a request. Raises StoreUnavailable while the server is left alone."""
        self._breaker.enter()
        call = Call(job, reading)
        try:
            call.future = self._pool.submit(self._run, call)
        except RuntimeError:
            self._breaker.abandon()
            raise StoreUnavailable(
                f"the connection to {self.peer.where} is closed: open the store again"
            ) from None
        return call

    def wait(self, call: Call[T], seconds: float) -> T:
        """The result of a call, within so many seconds; later it is given up. Raises StoreUnavailable, StoreFull."""
        try:
            return _result(call.future, max(0.0, seconds))
        except TimeoutError:
            if not call.settle():
                return _result(call.future)  # it ended this very moment
        except CancelledError:
            raise StoreUnavailable(f"the connection to {self.peer.where} is closed") from None
        call.future.cancel()  # where all workers are held up, it has not begun
        self._drop_client()
        raise self._breaker.failure(self.peer.late(), call.reading)

    def withdraw(self, call: Call[Any]) -> bool:
        """Nobody wants the result any more: whether the call had not begun, and will not."""
        if not call.future.cancel():
            return False
        if call.settle():
            self._breaker.abandon()
        return True

    def give_up(self, call: Call[Any]) -> None:
        """Nobody wants the result any more."""
        if call.settle():
            self._breaker.abandon()
            if not call.future.cancel():
                self._drop_client()

    def close(self) -> None:
        """Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._drop_client()

    def _run(self, call: Call[T]) -> T:
        try:
            result = self._tried(call.job)
            if call.settle():
                self._breaker.success(call.reading)
            return result
        except Exception as error:
            raise self._reported(call, error) from error
        finally:
            del call  # whose future keeps what is raised, and that keeps this frame

    def _tried(self, job: Callable[[Client], T]) -> T:
        """A connection that was kept may have ended with a server that was started again since: tried twice then."""
        started, kept = time.monotonic(), self._client
        try:
            return job(self._connected())
        except Exception as error:
            hasty = time.monotonic() - started <= self.peer.deadline_s / 2
            if kept is None or not hasty or not self.peer.stale(error):
                raise
        self._drop_client()
        return job(self._connected())

    def _reported(self, call: Call[Any], error: Exception) -> Exception:
        """Our error for what went wrong, known to the breaker."""
        ours = self.peer.explained(error)
        if isinstance(ours, str):
            self._drop_client()
            return self._breaker.failure(ours, call.reading) if call.settle() else StoreUnavailable(ours)
        if call.settle():
            self._breaker.success(call.reading)
        return ours

    def _connected(self) -> Client:
        with self._connecting:
            if self._client is None:
                self._client = self.peer.connect()
            return self._client

    def _drop_client(self) -> None:
        """The next call makes a new one. Not under the lock: that one may be held by who cannot connect."""
        client, self._client = self._client, None
        if client is not None:
            try:
                self.peer.disconnect(client)
            except Exception as error:
                log.debug("a connection did not end cleanly: %s", error)


def _result(future: Future[T], seconds: float | None = None) -> T:
    """As future.result, which would raise the very error that the future keeps."""
    error = future.exception(seconds)
    if error is not None:
        raise unraised(error) if isinstance(error, StoreError) else error
    return future.result()
