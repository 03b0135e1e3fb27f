"""An index on disk: manifest.json and the files that it names, replaced together.

The other files have a digest of their content in their names, so a new version never overwrites an old one. Every file
is written under a temporary name, synced and renamed, manifest.json last; then the files that it no longer names are
deleted. A process killed at any moment leaves the old or the new index.

Format 1 had fixed names, followed by ".new" when a writer was killed between two renames; such an index is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal

import xxhash
from filelock import FileLock, Timeout

from blendserve.errors import IndexChanged, IndexDamaged, IndexMismatch, IndexMissing, VectorIndexError

FORMAT = 2
MANIFEST = "manifest.json"
LOCK_TIMEOUT_S = 30.0  # a save takes far less
REBUILD = "rebuild with `blendserve index build`"


@dataclass(frozen=True, slots=True)
class Manifest:
    """Models, settings and corpus of an index, and the digests of its other files."""

    format: int
    embedder: str
    embedder_fingerprint: str
    dimension: int
    reader: str  # whose tokens limit the chunks
    reader_fingerprint: str
    chunk_tokens: int
    kind: Literal["flat", "hnsw"]
    corpus: str = ""  # digest of all document ids and contents, in any order
    documents: int = 0
    passages: int = 0
    vectors: int = 0
    files: dict[str, str] = field(default_factory=dict)  # name -> "<bytes> <xxh3>"
    # Number format of the embedder, several joined by "+". Not checked: questions embedded in fp32 find passages
    # embedded in bf16.
    embedder_dtype: str = "float32"

    @property
    def settings(self) -> tuple[object, ...]:
        """An index of other documents with the same settings may hold the same vectors."""
        return self.embedder_fingerprint, self.reader_fingerprint, self.chunk_tokens, self.kind

    def check(self, folder: Path, embedder: tuple[str, str], model: tuple[str, str]) -> None:
        """Raises IndexMismatch unless both (name, fingerprint) are the ones that the index was built with."""
        for part, name, digest, (given_name, given) in (
            ("embedder", self.embedder, self.embedder_fingerprint, embedder),
            ("model", self.reader, self.reader_fingerprint, model),
        ):
            if digest != given:
                raise IndexMismatch(
                    f"index {folder} was built with {part} {name!r} ({digest[:8]}), not with {given_name!r} "
                    f"({given[:8]}): open it with the {part} it was built with, or {REBUILD}",
                    setting=part,
                    path=folder,
                )


def read(folder: Path) -> tuple[Manifest, dict[str, bytes], str]:
    """The manifest, the other files' contents by name, and the manifest's digest (for `write`).

    Raises IndexMissing, IndexMismatch (written by a newer version) or IndexDamaged.
    """
    manifest, digest = read_manifest(folder)
    try:
        return manifest, {name: _content(folder, name, seal) for name, seal in manifest.files.items()}, digest
    except IndexDamaged:
        if manifest_digest(folder) == digest:
            raise
    return read(folder)  # another process has just replaced the index


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """The manifest without the other files, and its digest. Raises as `read`."""
    raw = _read(folder / MANIFEST)
    if raw is None:
        message = f"there is no index at {folder}: build one with `blendserve index build`"
        raise IndexMissing(message, path=folder)
    try:
        values = json.loads(raw)
        if values["format"] > FORMAT:
            raise IndexMismatch(
                f"index {folder} has format {values['format']}, this blendserve reads up to {FORMAT}: "
                f"update blendserve, or {REBUILD}",
                setting="format",
                path=folder,
            )
        values.setdefault("embedder_dtype", "float32")
        return Manifest(**{field.name: values[field.name] for field in fields(Manifest)}), _digest(raw)
    except (ValueError, TypeError, KeyError):
        message = f"index {folder}: {MANIFEST} cannot be parsed: {REBUILD}"
        raise IndexDamaged(message, path=folder / MANIFEST) from None


def manifest_digest(folder: Path) -> str | None:
    """Changes whenever the index on disk changes; None for an absent index."""
    try:
        return _digest((folder / MANIFEST).read_bytes())
    except OSError:
        return None


def write(folder: Path, manifest: Manifest, files: Mapping[str, bytes], base: str | None) -> str:
    """Replace the index in `folder`; fills `manifest.files` and returns the new manifest's digest.

    base: digest of the manifest that the change started from. Raises VectorIndexError when the folder cannot be
    written, IndexChanged when it holds another index than that one; the index there stays as it is.
    """
    seals = {name: _seal(content) for name, content in files.items()}
    raw = json.dumps({**asdict(manifest), "files": seals}, indent=2).encode()
    with _lock(folder):
        if manifest_digest(folder) != base:
            raise IndexChanged(
                f"index {folder} was changed by another process meanwhile: open it again and repeat",
                path=folder / MANIFEST,
            )
        try:
            for name, content in files.items():
                _replace(_path(folder, name, seals[name]), content)
            _replace(folder / MANIFEST, raw)
            if os.name == "posix":  # make the renames durable; other systems cannot sync a folder
                handle = os.open(folder, os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
        finally:
            _delete_unused(folder, files)
    return _digest(raw)


def _delete_unused(folder: Path, names: Iterable[str]) -> None:
    """Delete every version of these files that the manifest on disk does not name."""
    with suppress(VectorIndexError):  # no manifest: any file may belong to an index that someone repairs
        manifest, _ = read_manifest(folder)
        if manifest.format == 1:
            return  # the index lies in files of fixed names
        used = {_path(folder, name, seal) for name, seal in manifest.files.items()}
        for name in names:
            stem, suffix = os.path.splitext(name)
            for path in {*folder.glob(f"{stem}-*{suffix}"), folder / name, folder / f"{name}.new"} - used:
                path.unlink(missing_ok=True)


def _path(folder: Path, name: str, seal: str) -> Path:
    """passages.jsonl -> passages-<xxh3>.jsonl"""
    stem, suffix = os.path.splitext(name)
    return folder / f"{stem}-{seal.rpartition(' ')[2]}{suffix}"


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One writer at a time; errors of the file system become VectorIndexError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=LOCK_TIMEOUT_S):
            yield
    except Timeout:
        message = f"index {folder} is being written by another process: try again later"
        raise VectorIndexError(message) from None
    except OSError as error:
        raise VectorIndexError(
            f"index {folder} cannot be written ({error.strerror}) and is unchanged: make room or choose another folder",
            path=folder,
        ) from None


def _content(folder: Path, name: str, seal: str) -> bytes:
    for path in (_path(folder, name, seal), folder / name, folder / f"{name}.new"):  # the last two: format 1
        content = _read(path)
        if content is not None and _seal(content) == seal:
            return content
    raise IndexDamaged(
        f"index {folder}: {name} is missing or does not match its manifest: put the file back, or {REBUILD}",
        path=folder / name,
    )


def _read(path: Path) -> bytes | None:
    """None for a missing file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise VectorIndexError(f"{path} cannot be read ({error.strerror}): check its permissions") from None


def _replace(path: Path, content: bytes) -> None:
    """Write a file in one step, synced."""
    new = path.with_name(".new")
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)  # a full disk needs the room
        raise


def _seal(content: bytes) -> str:
    return f"{len(content)} {_digest(content)}"


def _digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)
