"""An index on disk: indexes/<name>/{manifest.json, passages.jsonl, vectors.faiss}, replaced as one.

Three files cannot be renamed in one step, so the manifest is the switch: it holds size and digest of the
other two.

    1. passages.jsonl.new and vectors.faiss.new are written and synced   killed here: the old index is whole
    2. manifest.json is replaced by rename                               from here on the new one is
    3. the .new files take their names                                   killed here: readers match by digest

A reader takes, for each file, whichever of `name` and `name.new` the manifest describes; it never writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import xxhash
from filelock import FileLock, Timeout

from blendserve.errors import IndexDamaged, IndexMismatch, IndexMissing, VectorIndexError

FORMAT = 1
MANIFEST = "manifest.json"
_LOCK_WAIT = 30.0  # seconds; a save takes far less


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an index was built with and from, and what its other files look like."""

    format: int
    embedder: str
    embedder_fingerprint: str
    dimension: int
    reader: str  # whose tokens the chunks were measured in
    reader_fingerprint: str
    chunk_tokens: int
    kind: Literal["flat", "hnsw"]
    corpus: str  # digest of all document ids and contents, whatever their order
    documents: int
    passages: int
    vectors: int
    files: dict[str, str]  # name -> "<bytes> <xxh3>"
    # What the vectors were computed in, "+" between several: bf16 where a CPU is faster with it. Nobody has to match it:
    # a question's vector in fp32 finds what one in bf16 finds. Older manifests do not say.
    embedder_dtype: str = "float32"

    def check(self, folder: Path, embedder: tuple[str, str], reader: tuple[str, str]) -> None:
        """Raises IndexMismatch unless both (name, fingerprint) are what the index was built with."""
        built = {
            "embedder": (self.embedder, self.embedder_fingerprint),
            "reader": (self.reader, self.reader_fingerprint),
        }
        for role, given in (("embedder", embedder), ("reader", reader)):
            if built[role][1] != given[1]:
                raise IndexMismatch(
                    f"index {folder} was built with {role} {_shown(built[role])}, not with {_shown(given)}: "
                    f"open it with the {role} it was built with, or rebuild it with `blendserve index build`",
                    setting=role,
                    path=folder,
                )


def read(folder: Path) -> tuple[Manifest, dict[str, bytes], str]:
    """The manifest, the other files' contents, and the manifest's digest (for `write`).

    Raises IndexMissing, IndexMismatch (written by a newer version) or IndexDamaged.
    """
    while True:
        manifest, seal = read_manifest(folder)
        try:
            return manifest, {name: _content(folder, name, manifest) for name in manifest.files}, seal
        except IndexDamaged:
            if (
                manifest_digest(folder) == seal
            ):  # else another process has just replaced the index: read that one
                raise


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """The manifest alone, and its digest: says what to load before `read`. Raises as `read`."""
    try:
        raw = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise IndexMissing(
            f"there is no index at {folder}: build one with `blendserve index build`", path=folder
        ) from None
    except OSError as error:
        raise VectorIndexError(
            f"index {folder} cannot be read ({error.strerror}): check its permissions"
        ) from None
    return _parse(raw, folder), _digest(raw)


def manifest_digest(folder: Path) -> str | None:
    """Tells whether the index on disk has changed; None when there is none."""
    try:
        return _digest((folder / MANIFEST).read_bytes())
    except OSError:
        return None


def write(folder: Path, manifest: Manifest, files: Mapping[str, bytes], base: str | None) -> str:
    """Replace the index in `folder` as one and return the new manifest's digest; fills `manifest.files`.

    `base` is the digest of the manifest that the change started from. Raises VectorIndexError when the folder
    cannot be written, or when the index there is no longer that one; either way it stays as it is.
    """
    sealed = {**asdict(manifest), "files": {name: _seal(content) for name, content in files.items()}}
    raw = json.dumps(sealed, indent=2).encode()
    with _writing(folder):
        if manifest_digest(folder) != base:
            raise VectorIndexError(
                f"index {folder} was changed by another process meanwhile: open it again and repeat",
                path=folder / MANIFEST,
            )
        _finish(folder)
        for name, content in files.items():
            _write_synced(folder / f"{name}.new", content)
        _write_synced(folder / f"{MANIFEST}.new", raw)
        os.replace(folder / f"{MANIFEST}.new", folder / MANIFEST)
        _sync(folder)
        _finish(folder)
    return _digest(raw)


def _finish(folder: Path) -> None:
    """Step 3, also for a writer that was killed before it."""
    try:
        manifest, _ = read_manifest(folder)
    except VectorIndexError:
        return  # nothing that could be finished
    for name, seal in manifest.files.items():
        new = folder / f"{name}.new"
        if new.exists() and _seal(new.read_bytes()) == seal:
            os.replace(new, folder / name)
    _sync(folder)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """One writer at a time; what the system refuses becomes an error with advice."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=_LOCK_WAIT):
            yield
    except Timeout:
        raise VectorIndexError(
            f"index {folder} is being written by another process: try again later"
        ) from None
    except OSError as error:
        raise VectorIndexError(
            f"index {folder} cannot be written ({error.strerror}), what was there is unchanged: "
            f"make room or choose another folder",
            path=folder,
        ) from None


def _content(folder: Path, name: str, manifest: Manifest) -> bytes:
    named, new = folder / name, folder / f"{name}.new"
    for path in (named, new, named):  # once more: `new` may have become it between the two looks
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise VectorIndexError(
                f"{path} cannot be read ({error.strerror}): check its permissions"
            ) from None
        if _seal(content) == manifest.files[name]:
            return content
    raise IndexDamaged(
        f"index {folder}: {name} is missing or not the file its manifest describes: "
        f"put the file back, or rebuild with `blendserve index build`",
        path=folder / name,
    )


def _parse(raw: bytes, folder: Path) -> Manifest:
    try:
        values = json.loads(raw)
        version = values["format"]
        if version > FORMAT:
            raise IndexMismatch(
                f"index {folder} has format {version}, this blendserve reads up to {FORMAT}: "
                f"update blendserve, or rebuild with `blendserve index build`",
                setting="format",
                path=folder,
            )
        asked = (field.name for field in fields(Manifest) if field.name in values or field.default is MISSING)
        return Manifest(**{name: values[name] for name in asked})
    except (ValueError, TypeError, KeyError):
        raise IndexDamaged(
            f"index {folder}: {MANIFEST} cannot be understood: rebuild with `blendserve index build`",
            path=folder / MANIFEST,
        ) from None


def _write_synced(path: Path, content: bytes) -> None:
    try:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)  # a full disk needs the room
        raise


def _sync(folder: Path) -> None:
    """Make renames durable, where the system has directories that can be synced."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _seal(content: bytes) -> str:
    return f"{len(content)} {_digest(content)}"


def _digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def _shown(model: tuple[str, str]) -> str:
    return f"{model[0]!r} ({model[1][:8]})"
