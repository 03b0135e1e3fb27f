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
from dataclasses import dataclass

from blendserve.core import ChunkKV
from blendserve.errors import StoreError
from blendserve.fetch.copy_stream import CopyStream, HostCopy
from blendserve.store.base import KVStore
from blendserve.store.codecs.base import Codec
from blendserve.store.key import ChunkKey
from blendserve.store.record import ChunkRecord

log = logging.getLogger(__name__)

WAITING_BYTES = 1 << 30  # of chunks that wait to be written


@dataclass(frozen=True, slots=True)
class _Task:
    key: ChunkKey
    n_bytes: int
    run: Callable[[], object]


class WriteQueue:
    """Tasks about chunks, run by one thread. Thread-safe."""

    def __init__(self, cap_bytes: int = WAITING_BYTES) -> None:
        """cap_bytes: that waiting tasks hold; a task alone may hold more."""
        self.cap_bytes = cap_bytes
        self.bytes = 0
        self._tasks: deque[_Task] = deque()  # the first one runs
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, key: ChunkKey, n_bytes: int, run: Callable[[], object], wait: bool = False) -> bool:
        """Run a task after all others -> False if there is no room, and it is dropped.

        wait: for room. A task handles its own errors.
        """
        with self._changed:
            while wait and not self._closed and not self._has_room(n_bytes):
                self._changed.wait()
            if self._closed or not self._has_room(n_bytes):
                return False
            self._tasks.append(_Task(key, n_bytes, run))
            self.bytes += n_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="blendserve-queue", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def has(self, key: ChunkKey) -> bool:
        """Whether a task about this chunk waits or runs."""
        with self._changed:
            return any(task.key == key for task in self._tasks)

    def forget(self, key: ChunkKey) -> None:
        """Drop the waiting tasks about a chunk; one that runs ends first."""
        with self._changed:
            for task in [task for task in list(self._tasks)[1:] if task.key == key]:
                self._tasks.remove(task)
                self.bytes -= task.n_bytes
            self._changed.notify_all()
            while self._tasks and self._tasks[0].key == key:
                self._changed.wait()

    def flush(self) -> None:
        """Wait until all tasks are done."""
        with self._changed:
            while self._tasks:
                self._changed.wait()

    def close(self) -> None:
        """Finish all tasks and end the thread; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _has_room(self, n_bytes: int) -> bool:
        return not self.bytes or self.bytes + n_bytes <= self.cap_bytes

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._tasks:
                    if self._closed:
                        return
                    self._changed.wait()
                task = self._tasks[0]
            try:
                task.run()
            except Exception:  # a bug in one task must not stop the others
                log.exception("a write in the background failed")
            with self._changed:
                self._tasks.popleft()
                self.bytes -= task.n_bytes
                del task  # and the chunk that it holds
                self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class _Write:
    """A put that waits or runs."""

    tokens: int
    n_bytes: int
    put: Future[bool]


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
    waiting: deque[_Write] = deque()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="blendserve-write") as pool:
        try:
            for key, kv in chunks:
                put = pool.submit(_put, store, codec, key, HostCopy(kv, stream))
                waiting.append(_Write(kv.n_tokens, kv.n_bytes, put))
                while _is_over(waiting, most_tokens):
                    yield _done(waiting.popleft())
            while waiting:
                yield _done(waiting.popleft())
        except StoreError:
            pool.shutdown(cancel_futures=True)  # the next ones would fail alike
            raise


def _put(store: KVStore, codec: Codec, key: ChunkKey, copy: HostCopy) -> bool:
    return store.put(key, ChunkRecord.encode(key, copy.arrived(), codec), pin=True)


def _is_over(waiting: deque[_Write], most_tokens: int) -> bool:
    """Whether the first write is done, or has to be waited for."""
    if not waiting:
        return False
    return waiting[0].put.done() or (len(waiting) > 1 and sum(w.tokens for w in waiting) > most_tokens)


def _done(write: _Write) -> int:
    write.put.result()
    return write.n_bytes
