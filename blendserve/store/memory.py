"""Chunk KV in this process's memory: the store of txn_store.py over a sorted dictionary."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sortedcontainers import SortedDict

from blendserve import machine
from blendserve.config import StoreBackendConfig
from blendserve.errors import StoreUnavailable
from blendserve.forks import REMEDY, Home
from blendserve.registry import ADMISSIONS
from blendserve.store.clock import TimeSource
from blendserve.store.codecs.base import Buffer
from blendserve.store.policies import Admission
from blendserve.store.txn_store import TxnStore

SHARE = 4  # of the available memory, for a store without store.cap_gb
PAST_NAMES = b"\xff" * 64  # sorts behind every name with the same prefix


class MemoryStore(TxnStore):
    """A KVStore of at most `cap_bytes` that ends with the process."""

    kind = "memory"
    persistent = needs_folder = False
    trusted = True
    location = ""
    read_only = False

    def __init__(
        self,
        cap_bytes: int,
        admission: Admission | None = None,
        clock: TimeSource = time,
    ) -> None:
        super().__init__(cap_bytes, admission, clock)
        self._data: SortedDict[bytes, bytes] = SortedDict()
        self._readers = 0  # transactions that read `_data` now
        self._lock = threading.RLock()
        self._home = Home()

    @classmethod
    def from_config(cls, config: StoreBackendConfig, path: Path | None, read_only: bool) -> MemoryStore:
        cap_bytes = machine.available_memory() // SHARE
        if config.cap_gb is not None:
            cap_bytes = machine.checked_cap(config.cap_bytes, "store.cap_gb")
        return cls(cap_bytes, ADMISSIONS.load(config.admission)())

    def close(self) -> None:
        if self._home.is_here:
            self.delete(list(self.keys()))

    @contextmanager
    def _begin_read(self) -> Iterator[_DictTxn]:
        self._refuse_forked()
        with self._lock:
            data = self._data
            self._readers += 1
        try:
            yield _DictTxn(data)
        finally:
            with self._lock:
                self._readers -= data is self._data

    @contextmanager
    def _begin_write(self, wait_s: float | None) -> Iterator[_DictTxn]:
        self._refuse_forked()
        with self._lock:
            if self._readers:  # they keep reading the old dictionary
                self._data = self._data.copy()
                self._readers = 0
            txn = _DictTxn(self._data)
            try:
                yield txn
            except BaseException:
                txn.undo()
                raise

    def _refuse_forked(self) -> None:
        if not self._home.is_here:
            raise StoreUnavailable(
                f"the KV store in memory is of the process that this one was forked from: {REMEDY}"
            )


class _DictTxn:
    """A transaction over a dictionary."""

    def __init__(self, data: SortedDict[bytes, bytes]) -> None:
        self._data = data
        self._before: list[tuple[bytes, bytes | None]] = []  # of each write: the name, and its value before
        self.get = data.get

    def put(self, name: bytes, value: Buffer) -> None:
        self._before.append((name, self._data.get(name)))
        self._data[name] = bytes(value)

    def delete(self, name: bytes) -> bool:
        self._before.append((name, self._data.pop(name, None)))
        return self._before[-1][1] is not None

    def scan(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        names = self._data.irange(max(prefix, start), prefix + PAST_NAMES)
        return ((name, self._data[name]) for name in names)

    def undo(self) -> None:
        """Undo all writes."""
        for name, value in reversed(self._before):
            self._data.pop(name, None)
            if value is not None:
                self._data[name] = value
