"""Writes that nobody waits for: done in turn by one thread, bounded in bytes, finished at the end."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from blendserve.store.key import ChunkKey

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Task:
    key: ChunkKey
    n_bytes: int
    run: Callable[[], object]


class Backlog:
    """Tasks about chunks. Safe to share between threads."""

    def __init__(self, cap_bytes: int) -> None:
        """cap_bytes: that tasks hold on to while they wait; a task alone may hold more."""
        self.cap_bytes = cap_bytes
        self.bytes = self.dropped = 0
        self._tasks: deque[_Task] = deque()  # the first is being done
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, key: ChunkKey, n_bytes: int, run: Callable[[], object], wait: bool = False) -> bool:
        """Have a task done behind those that are there -> False when there is no room, and it is dropped.

        wait: for room. A task answers for its own errors.
        """
        with self._changed:
            while wait and not self._closed and not self._has_room(n_bytes):
                self._changed.wait()
            if self._closed or not self._has_room(n_bytes):
                self.dropped += 1
                return False
            self._tasks.append(_Task(key, n_bytes, run))
            self.bytes += n_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="blendserve-backlog", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def has(self, key: ChunkKey) -> bool:
        """Whether anything of this chunk is to be done."""
        with self._changed:
            return any(task.key == key for task in self._tasks)

    def forget(self, key: ChunkKey) -> None:
        """Do nothing more about a chunk; what is being done ends first."""
        with self._changed:
            for task in [task for task in list(self._tasks)[1:] if task.key == key]:
                self._tasks.remove(task)
                self.bytes -= task.n_bytes
            self._changed.notify_all()
            while self._tasks and self._tasks[0].key == key:
                self._changed.wait()

    def flush(self) -> None:
        """Wait until everything is done."""
        with self._changed:
            while self._tasks:
                self._changed.wait()

    def close(self) -> None:
        """Finish what is there and end the thread; idempotent."""
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
            except Exception:  # a bug in one must not keep the others from being done
                log.exception("a write in the background failed")
            with self._changed:
                self._tasks.popleft()
                self.bytes -= task.n_bytes
                self._changed.notify_all()
