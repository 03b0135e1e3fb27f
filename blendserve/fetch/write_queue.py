"""Chunks written in another thread.

WriteQueue   writes that no request waits for: in order, bounded in bytes, finished at the end
write_behind one after another, while the next chunks are computed:

    this thread      compute 0, 1 | compute 2, 3                       | compute 4, 5 ...
    writing thread                | encode, put 0 | encode, put 1      | encode, put 2 ...

Each put is the store's own transaction. A kill loses what was not written yet, and nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from blendserve.errors import StoreError, StoreUnavailable
from blendserve.fetch.copy_stream import CopyStream, HostCopy
from blendserve.forks import REMEDY, Home
from blendserve.kv import ChunkKV
from blendserve.machine import fit
from blendserve.store import ChunkKey, ChunkRecord, KVStore
from blendserve.store.codecs.base import Codec

log = logging.getLogger(__name__)

WAITING_BYTES = 1 << 30  # of chunks that wait to be written; less on a small machine


class WriteQueue:
    """Tasks about chunks, run in order by one thread; the interpreter ends only after all of them. Thread-safe."""

    def __init__(self, cap_bytes: int | None = None) -> None:
        """cap_bytes: that waiting tasks hold, by default WAITING_BYTES; a task alone may hold more."""
        self.cap_bytes = fit(WAITING_BYTES) if cap_bytes is None else cap_bytes
        self._tasks: dict[Future[object], tuple[ChunkKey, int]] = {}  # with the bytes that each holds
        self._changed = threading.Condition()
        self._is_closed = False
        self._home = Home()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="blendserve-queue")

    @property
    def bytes(self) -> int:
        """Bytes that tasks hold."""
        with self._changed:
            return sum(n_bytes for _, n_bytes in self._tasks.values())

    def add(self, key: ChunkKey, n_bytes: int, run: Callable[[], object], wait: bool = False) -> bool:
        """Run a task after all others -> False if there is no room, and it is dropped.

        wait: for room. A task handles its own errors. Raises StoreUnavailable in a forked child, which lacks the thread.
        """
        if not self._home.is_here:
            raise StoreUnavailable(
                f"the KV store's writes are of the process that this one was forked from: {REMEDY}"
            )
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._is_closed or self._has_room(n_bytes))
            if self._is_closed or not self._has_room(n_bytes):
                return False
            future = self._pool.submit(run)
            self._tasks[future] = key, n_bytes
            future.add_done_callback(self._end)
            return True

    def has(self, key: ChunkKey) -> bool:
        """Whether a task about this chunk waits or runs."""
        with self._changed:
            return any(other == key for other, _ in self._tasks.values())

    def forget(self, key: ChunkKey) -> None:
        """Drop the waiting tasks about a chunk; one that runs ends first."""
        with self._changed:
            for future in [future for future, (other, _) in self._tasks.items() if other == key]:
                future.cancel()
            self._changed.wait_for(lambda: not self.has(key))

    def flush(self) -> None:
        """Wait until all tasks are done; in a forked child they are the parent's."""
        if not self._home.is_here:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._tasks)

    def close(self) -> None:
        """Finish all tasks and end the thread; idempotent."""
        if not self._home.is_here:
            return
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._pool.shutdown(wait=True)

    def _has_room(self, n_bytes: int) -> bool:
        return not self.bytes or self.bytes + n_bytes <= self.cap_bytes

    def _end(self, future: Future[object]) -> None:
        if not future.cancelled() and (error := future.exception()):  # a bug; the other tasks go on
            log.error("a write in the background failed", exc_info=error)
        with self._changed:
            del self._tasks[future]
            self._changed.notify_all()


def write_behind(
    store: KVStore,
    codec: Codec,
    chunks: Iterable[tuple[ChunkKey, ChunkKV]],
    most_tokens: int,
    stream: CopyStream | None = None,
) -> Generator[int, None, None]:
    """Encode and put the chunks, pinned and in order -> the bytes of each, as soon as it is stored.

    Of what was computed, at most `most_tokens`, or one chunk, waits to be written. What waits when the caller or `chunks`
    stops early is still written: close the iterator then. stream: of copies to the host, by default the device's own.
    Raises StoreError; what was stored stays.
    """
    puts: deque[tuple[int, int, Future[bool]]] = deque()  # tokens and bytes of each that waits or runs

    def put(key: ChunkKey, copy: HostCopy) -> bool:
        return store.put(key, ChunkRecord.encode(key, copy.arrived(), codec), pin=True)

    def stored() -> int:
        """Wait for the first one -> its bytes."""
        _, n_bytes, done = puts.popleft()
        done.result()
        return n_bytes

    with ThreadPoolExecutor(1, thread_name_prefix="blendserve-write") as pool:
        try:
            for key, kv in chunks:
                puts.append((kv.n_tokens, kv.n_bytes, pool.submit(put, key, HostCopy(kv, stream))))
                while puts and (
                    puts[0][2].done() or (len(puts) > 1 and sum(n for n, *_ in puts) > most_tokens)
                ):
                    yield stored()
            while puts:
                yield stored()
        except StoreError:
            pool.shutdown(cancel_futures=True)  # the next ones would fail alike
            raise
