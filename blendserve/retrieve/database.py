"""The SQLite file in an index's folder, and its transactions.

A change of documents is one transaction, and is on the disk when it returns: a process that is killed at any moment
leaves all of it or nothing. Many processes read, each the last whole transaction. One process writes at a time, and
others wait for it. SQLite's log (WAL) needs a disk of this machine.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

from blendserve.errors import IndexDamaged, IndexMismatch, IndexMissing, VectorIndexError
from blendserve.retrieve.tables import CONTENTS, FORMAT, REBUILD, SCHEMA, Manifest, Rows, with_counts

FILE = "index.sqlite"
LOG_FILES = (f"{FILE}-wal", f"{FILE}-shm")
OLD_FILE = "manifest.json"  # of formats 1 and 2
PAGE_BYTES = 8192  # vectors of 1.5 kB fill it better than the usual 4096
LOCK_TIMEOUT_S = 30.0  # for another process's transaction, which takes far less
PRAGMAS = (
    "foreign_keys = ON",
    "secure_delete = ON",  # the text of a deleted document does not stay in the file
    "synchronous = FULL",
)


class Database:
    """The file of one index. Thread-safe: each transaction has a connection of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / FILE
        self.is_exclusive = False  # whether no other process may read or write until it is closed
        self._idle: dict[int, list[Rows]] = {}  # by inode: a file that takes this one's place is opened anew

    def make(self) -> None:
        """Make the file unless it exists, and in place of a damaged one. Raises VectorIndexError."""
        try:
            self._make()
        except IndexDamaged:
            for name in (*LOG_FILES, FILE):  # in this order: a log is never applied to another file
                (self.folder / name).unlink(missing_ok=True)
            self._make()

    def read(self) -> AbstractContextManager[Rows]:
        """A transaction that sees one state of the index. Raises VectorIndexError, IndexMissing, IndexDamaged."""
        return self._transaction("BEGIN")

    def write(self) -> AbstractContextManager[Rows]:
        """A transaction that is saved if the block ends without an error. Raises as `read`; nothing changes then."""
        return self._transaction("BEGIN IMMEDIATE")

    def manifest(self, rows: Rows) -> Manifest:
        """The manifest without counts of the contents. Raises IndexMissing, IndexMismatch."""
        has_table = rows.execute("SELECT 1 FROM sqlite_master WHERE name = 'manifest'").fetchone()
        row = rows.execute("SELECT settings FROM manifest").fetchone() if has_table else None
        if row is None:
            raise self._missing()
        values = json.loads(row[0])
        if values["format"] != FORMAT:
            raise IndexMismatch(
                f"index {self.folder} has format {values['format']}, this blendserve reads {FORMAT}: {REBUILD}",
                setting="format",
                path=self.folder,
            )
        return Manifest(**values)

    def copy_into(self, target: Database) -> None:
        """Replace the documents and the manifest of another file by this one's, in one transaction; its jobs stay."""
        target.make()
        with self._connection() as rows:
            rows.execute("ATTACH ? AS target", (str(target.file),))
            try:
                rows.execute("BEGIN IMMEDIATE")
                for table in CONTENTS:
                    rows.execute(f"DELETE FROM target.{table}")
                for table in reversed(CONTENTS):
                    rows.execute(f"INSERT INTO target.{table} SELECT * FROM main.{table}")
                rows.execute("COMMIT")
            finally:
                rows.rollback()
                rows.execute("DETACH target")

    def close(self) -> None:
        """Close the connections that are not in use; later calls open new ones."""
        while self._idle:
            for rows in self._idle.popitem()[1]:
                rows.close()

    def _make(self) -> None:
        with self._explained():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file.touch()
        with self._connection() as rows:
            (problem,) = rows.execute("PRAGMA quick_check(1)").fetchone()
            if problem != "ok":
                raise sqlite3.DatabaseError(problem)
            rows.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            rows.execute("PRAGMA journal_mode = WAL")
        with self.write() as rows:
            for statement in SCHEMA.split(";"):
                rows.execute(statement)

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Rows]:
        with self._connection() as rows:
            rows.execute(begin)
            yield rows
            rows.execute("COMMIT")

    @contextmanager
    def _connection(self) -> Iterator[Rows]:
        """A connection for one thread. Of a transaction that was not committed, nothing stays."""
        with self._explained():
            idle = self._idle.setdefault(self._inode(), [])
            try:
                rows = idle.pop()
            except IndexError:
                rows = self._connect()
            try:
                yield rows
            finally:
                rows.rollback()
                idle.append(rows)

    def _connect(self) -> Rows:
        """A new connection. A file that cannot be written is taken to be unchanged while it is open."""
        options = ""
        if not (os.access(self.folder, os.W_OK) and os.access(self.file, os.W_OK)):
            has_log = (self.folder / LOG_FILES[0]).exists()
            options = "?mode=ro" if has_log else "?mode=ro&immutable=1"
        url = f"{self.file.absolute().as_uri()}{options}"
        rows = sqlite3.connect(
            url, uri=True, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        if self.is_exclusive:
            rows.execute("PRAGMA main.locking_mode = EXCLUSIVE")
        for pragma in PRAGMAS:
            rows.execute(f"PRAGMA {pragma}")
        return rows

    def _inode(self) -> int:
        try:
            return self.file.stat().st_ino
        except (FileNotFoundError, NotADirectoryError):
            raise self._missing() from None

    def _missing(self) -> VectorIndexError:
        if (self.folder / OLD_FILE).exists():
            message = f"index {self.folder} was written by an earlier blendserve: {REBUILD}"
            return IndexMismatch(message, setting="format", path=self.folder)
        message = f"there is no index at {self.folder}: build one with `blendserve index build`"
        return IndexMissing(message, path=self.folder)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of SQLite and of the file system become those of an index."""
        try:
            yield
        except (sqlite3.OperationalError, OSError) as error:
            message = f"index {self.folder} cannot be read or written ({error}): make room, or check its permissions"
            if "locked" in str(error):
                message = f"index {self.folder} is being written by another process: try again later"
            raise VectorIndexError(message, path=self.folder) from None
        except sqlite3.DatabaseError as error:
            message = f"index {self.folder} is damaged ({error}): put {FILE} back, or {REBUILD}"
            raise IndexDamaged(message, path=self.file) from None


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an index, with counts of its contents. Raises IndexMissing, IndexMismatch, VectorIndexError."""
    database = Database(folder)
    with closing(database), database.read() as rows:
        return with_counts(rows, database.manifest(rows))
