"""Vectors of a long run of embedding, kept in a file as they come: a run that was killed goes on where it stopped.

One record a vector: digest of what it is of [16 bytes], digest of the vector [8 bytes], the vector. Records are only ever
appended, one write a batch; what a kill cut off does not match its digest and is not read. Whoever saves the finished
vectors deletes the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from filelock import FileLock, Timeout

LEAST = 2000  # vectors: what takes less than about half a minute is done again


class KeptVectors:
    """Which of these vectors are still missing, and a place for those to come. A context manager."""

    def __init__(self, file: Path | None, encoder: str, vectors: np.ndarray, texts: Sequence[str]) -> None:
        """vectors [n, dimension] float32, of these texts by this encoder: filled here as far as the file has them.

        Without a file, or for few texts, nothing is kept.
        """
        self.missing: Sequence[int] = range(len(texts))
        self._file = file if len(texts) >= LEAST else None
        self._vectors, self._stack, self._open = vectors, ExitStack(), False
        if self._file:
            self._keys = [xxhash.xxh3_128_digest(f"{encoder}\n{text}".encode()) for text in texts]

    def append(self, rows: Sequence[int]) -> None:
        """Keep these; a full disk keeps no more, and costs nothing but that."""
        if not self._open:
            return
        record = np.zeros(len(rows), self._record)
        record["key"] = [np.frombuffer(self._keys[n], np.uint8) for n in rows]
        record["vector"] = self._vectors[rows]
        record["check"] = [xxhash.xxh3_64_intdigest(vector.tobytes()) for vector in record["vector"]]
        try:
            self._out.write(record.tobytes())
            self._out.flush()
        except OSError:
            self._open = False

    def __enter__(self) -> KeptVectors:
        """Another process that embeds into the same file, or a folder that cannot be written, leaves this one without."""
        if self._file:
            with suppress(OSError, Timeout):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._stack.enter_context(FileLock(_lock_of(self._file), timeout=0))
                self._out: Any = self._stack.enter_context(self._file.open("ab"))
                self._open = True
                self._recall(self._file)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._open = False

    def _recall(self, file: Path) -> None:
        """Fill in what is there; cut off what is not whole."""
        size = file.stat().st_size // self._record.itemsize
        self._out.truncate(size * self._record.itemsize)
        if not size:
            return
        records = np.memmap(file, self._record, "r", shape=(size,))
        at = {record["key"].tobytes(): n for n, record in enumerate(records)}
        missing = []
        for n, key in enumerate(self._keys):
            found = records[at[key]] if key in at else None
            if found is not None and xxhash.xxh3_64_intdigest(found["vector"].tobytes()) == found["check"]:
                self._vectors[n] = found["vector"]
            else:
                missing.append(n)
        self.missing = missing

    @property
    def _record(self) -> np.dtype[Any]:
        size = self._vectors.shape[1]
        return np.dtype([("key", np.uint8, 16), ("check", np.uint64), ("vector", np.float32, size)])


def forget(file: Path) -> None:
    """Delete what was kept; a process that is just writing there goes on without."""
    for path in (file, _lock_of(file)):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _lock_of(file: Path) -> Path:
    return file.with_name(f".{file.name}.lock")
