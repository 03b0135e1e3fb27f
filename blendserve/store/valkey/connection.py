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
from typing import Any, Generic, TypeVar

from blendserve.config import ValkeyConfig
from blendserve.errors import StoreUnavailable
from blendserve.store.valkey.breaker import Breaker
from blendserve.store.valkey.client import Client, connect, disconnect, explained, late, library

WORKERS = 4

T = TypeVar("T")

log = logging.getLogger(__name__)


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

    def __init__(self, config: ValkeyConfig) -> None:
        """Connects at the first call. Raises StoreUnavailable where the client's package is missing."""
        library()
        self.config = config
        self._breaker = Breaker(config.server)
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="blendserve-valkey")
        self._client: Client | None = None
        self._connecting = threading.Lock()

    def ask(self, job: Callable[[Client], T], seconds: float | None = None) -> T:
        """What the job returns, within so many seconds, by default the deadline. Raises StoreUnavailable, StoreFull."""
        return self.wait(self.begin(job), self.config.deadline_s if seconds is None else seconds)

    def begin(self, job: Callable[[Client], T], reading: bool = False) -> Call[T]:
        """Start a call. reading: of chunks, for a request. Raises StoreUnavailable while the server is left alone."""
        self._breaker.enter()
        call = Call(job, reading)
        try:
            call.future = self._pool.submit(self._run, call)
        except RuntimeError:
            self._breaker.abandon()
            raise StoreUnavailable(
                f"the connection to {self.config.where} is closed: open the store again"
            ) from None
        return call

    def wait(self, call: Call[T], seconds: float) -> T:
        """The result of a call, within so many seconds; later it is given up. Raises StoreUnavailable, StoreFull."""
        try:
            return call.future.result(max(0.0, seconds))
        except TimeoutError:
            if not call.settle():
                return call.future.result()  # it ended this very moment
        except CancelledError:
            raise StoreUnavailable(f"the connection to {self.config.where} is closed") from None
        call.future.cancel()  # where all workers are held up, it has not begun
        self._drop_client()
        raise self._breaker.failure(late(self.config), call.reading)

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
        except Exception as error:
            raise self._reported(call, error) from error
        if call.settle():
            self._breaker.success(call.reading)
        return result

    def _tried(self, job: Callable[[Client], T]) -> T:
        """A connection that was kept may have ended with a server that was started again since: tried twice then."""
        lib, started, kept = library(), time.monotonic(), self._client
        try:
            return job(self._connected())
        except (lib.TimeoutError, lib.AuthenticationError):
            raise
        except lib.ConnectionError:
            if kept is None or time.monotonic() - started > self.config.deadline_s / 2:
                raise
        self._drop_client()
        return job(self._connected())

    def _reported(self, call: Call[Any], error: Exception) -> Exception:
        """Our error for what went wrong, known to the breaker."""
        ours = explained(error, self.config)
        if isinstance(ours, str):
            self._drop_client()
            return self._breaker.failure(ours, call.reading) if call.settle() else StoreUnavailable(ours)
        if call.settle():
            self._breaker.success(call.reading)
        return ours

    def _connected(self) -> Client:
        with self._connecting:
            if self._client is None:
                self._client = connect(self.config)
            return self._client

    def _drop_client(self) -> None:
        """The next call makes a new one. Not under the lock: that one may be held by who cannot connect."""
        client, self._client = self._client, None
        if client is not None:
            try:
                disconnect(client)
            except Exception as error:
                log.debug("a connection did not end cleanly: %s", error)
