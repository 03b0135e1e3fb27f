"""Where collections are published: a folder, or what fsspec writes to. Files appear whole, under their final names."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cached_property
from typing import Any
from uuid import uuid4

import fsspec
from fsspec.implementations.local import LocalFileSystem

from blendserve.errors import InputError, StoreUnavailable
from blendserve.fetch.kdn.manifest import KINDS, PIECES, valid_name

DAY_S = 86_400
REUSED_S = DAY_S / 2  # what is older may be deleted by `prune` before a new version names it
CACHED_S = 10  # a description may be kept by caches for this time
FOR_EVER = "max-age=31536000, immutable"

# bytes of a file, and seconds since it was written: infinite if the file system does not tell it
StoredFile = tuple[int, float]


class PublishTarget:
    """A place for collections, named by the URL or path of one of them. Thread-safe."""

    def __init__(self, url: str) -> None:
        """Raises InputError."""
        folder, _, name = url.removeprefix("kdn:").rstrip("/").rpartition("/")
        self.name = valid_name(name)
        self.written = 0  # bytes
        try:
            if folder.startswith(("http://", "https://")):
                raise ValueError("a web server is not written to, but the folder or bucket behind it")
            self._files, self._root = fsspec.url_to_fs(folder or ".")
        except (ImportError, ValueError) as error:
            hint = "`pip install '.[cloud]'` in your checkout has S3 and others"
            raise InputError(f"nothing can be published at {url}: {error}; {hint}") from None
        self._is_local = isinstance(self._files, LocalFileSystem)
        self._lock = threading.Lock()

    @cached_property
    def stored(self) -> Mapping[str, StoredFile]:
        """The files that there were at the beginning, by name. Raises StoreUnavailable."""
        found = dict[str, StoredFile]()
        with self._told():
            self._files.invalidate_cache()
            for kind in KINDS:
                folder = f"{self._root}/{kind}"
                infos = self._files.find(folder, detail=True).values() if self._files.exists(folder) else ()
                found |= {f"{kind}/{_base(info['name'])}": (info["size"], _age_s(info)) for info in infos}
        return found

    def names(self) -> list[str]:
        """The names of the collections there. Raises StoreUnavailable."""
        with self._told():
            self._files.invalidate_cache()
            return sorted(
                _base(path).removesuffix(".json") for path in self._files.glob(f"{self._root}/*.json")
            )

    def read(self, name: str) -> bytes | None:
        """A file; None if there is none. Raises StoreUnavailable."""
        with self._told(), suppress(FileNotFoundError):
            return bytes(self._files.cat_file(f"{self._root}/{name}"))
        return None

    def put(self, name: str, raw: bytes) -> None:
        """Store a file that never changes. Raises StoreUnavailable."""
        n_bytes, age_s = self.stored.get(name, (-1, 0.0))
        if n_bytes != len(raw) or age_s > REUSED_S:
            self._write(name, raw, FOR_EVER)

    def publish(self, description: bytes) -> None:
        """Replace the description. Raises StoreUnavailable."""
        if self._is_local and hasattr(os, "sync"):  # not on Windows
            os.sync()  # what it names is on the disk before
        self._write(f"{self.name}.json", description, f"max-age={CACHED_S}")

    def delete(self, names: Iterable[str]) -> None:
        """Delete files. Raises StoreUnavailable."""
        if paths := [f"{self._root}/{name}" for name in names]:
            with self._told():
                self._files.rm(paths)

    def _write(self, name: str, raw: bytes, cached: str) -> None:
        path = f"{self._root}/{name}"
        with self._told():
            if self._is_local:
                temporary = f"{self._root}/{PIECES}/{uuid4().hex}.tmp"
                for file in (temporary, path):
                    os.makedirs(os.path.dirname(file), exist_ok=True)
                self._files.pipe_file(temporary, raw)
                os.replace(temporary, path)
            else:
                self._files.pipe_file(path, raw, **_headers(self._files, cached))
        with self._lock:
            self.written += len(raw)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Access to the target, inside: each library of an object store has errors of its own."""
        try:
            yield
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise StoreUnavailable(
                f"{self._root} cannot be read or written ({why}): correct its address or its credentials, and publish "
                "again"
            ) from error


def _headers(files: Any, cached: str) -> dict[str, Any]:
    """How an object store is told what caches may do. Others need rules for it: how-to/deliver-a-collection.md."""
    return {"CacheControl": f"public, {cached}"} if "s3" in files.protocol else {}


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _age_s(info: Mapping[str, Any]) -> float:
    """Seconds since a file was written, as its file system tells it."""
    for name in ("mtime", "LastModified", "last_modified", "updated"):
        value = info.get(name)
        written = value.timestamp() if isinstance(value, datetime) else value
        if isinstance(written, (int, float)):
            return time.time() - written
    return float("inf")
