"""Uploads of files as documents: POST /v1/documents with a form, as browsers and curl send it."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.routing import Match
from starlette.types import Scope

from blendserve.core import Document
from blendserve.errors import InputError
from blendserve.readers.child import Child
from blendserve.retrieve import ReadReport, read_files
from blendserve.serve.jobs import Job

PATH, FORM = "/v1/documents", "multipart/form-data"
MAX_FILES = 100  # of a request; the state of its job lists them all
MAX_NAME = 512  # characters of a file's name, which becomes the document's id
MAX_PLACE = 60  # characters of a file's name on the disk
FIELDS = ("files", "collection")
SCHEMA = {
    "type": "object",
    "required": ["files"],
    "properties": {
        "files": {"type": "array", "items": {"type": "string", "format": "binary"}, "maxItems": MAX_FILES},
        "collection": {"type": "string"},
    },
}

Add = Callable[[Document, Job], Awaitable[None]]


class UploadRoute(APIRoute):
    """A route for forms. It leaves other bodies to the next route of its path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(scope) if is_upload_of_files(scope) else (Match.NONE, {})


def is_upload_of_files(scope: Scope) -> bool:
    """Return whether a request uploads files in a form."""
    path: str = scope["path"]
    kind = Headers(scope=scope).get("content-type", "").partition(";")[0]
    return path.removeprefix(scope.get("root_path", "")) == PATH and kind.strip().lower() == FORM


class Upload:
    """The files of a form, in a folder of their own until the job that reads them has ended."""

    def __init__(self, collection: str | None, files: Sequence[tuple[str, Path]], folder: Any) -> None:
        self.collection = collection
        self.files = files
        self._folder = folder

    @classmethod
    async def receive(cls, request: Request) -> Upload:
        """Save the files of a request. Raises InputError, BodyTooLarge, BodyTooSlow."""
        async with request.form(max_files=MAX_FILES, max_fields=len(FIELDS)) as form:
            collection, uploaded = _checked(form)
            return await asyncio.to_thread(cls._save, collection, uploaded)

    @classmethod
    def _save(cls, collection: str | None, uploaded: Sequence[UploadFile]) -> Upload:
        folder = TemporaryDirectory(prefix="blendserve-upload-")
        files = list[tuple[str, Path]]()
        for n, file in enumerate(uploaded):
            name = file.filename or ""
            safe_name = re.sub(r"[\x00-\x1f/\\]", "_", name.rpartition("/")[2])
            place = Path(folder.name, str(n), safe_name[-MAX_PLACE:])
            place.parent.mkdir()
            with place.open("wb") as copy:
                shutil.copyfileobj(file.file, copy)
            files.append((name, place))
        return cls(collection, files, folder)

    def close(self) -> None:
        """Delete the files."""
        self._folder.cleanup()

    async def read(self, job: Job, turn: asyncio.Semaphore, add: Add) -> None:
        """Read one file at a time, and add its documents. turn: limits how many files all jobs read at a time.

        Raises InputError if no file could be read.
        """
        report = ReadReport()
        child = Child()
        job.total_documents = len(self.files)  # corrected when a file has been read
        try:
            for file in self.files:
                async with turn:
                    documents = await _in_thread(child, partial(_documents, file, report, child))
                job.files = [asdict(read) for read in report.files]
                job.total_documents += len(documents) - 1
                for document in documents:
                    await add(document, job)
        finally:
            child.close()
            self.close()
        if not job.total_documents:
            raise InputError(f"no file could be read: {report.files[0]}")


def _documents(file: tuple[str, Path], report: ReadReport, child: Child) -> list[Document]:
    return list(read_files([file], report, child=child))


async def _in_thread(child: Child, read: Callable[[], list[Document]]) -> list[Document]:
    """Read on a thread. A cancellation kills the child, which ends the thread."""
    task = asyncio.ensure_future(asyncio.to_thread(read))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        child.kill()
        await asyncio.wait([task])
        raise


def _checked(form: FormData) -> tuple[str | None, list[UploadFile]]:
    """Return the collection and the files of a form. Raises InputError."""
    for name, value in form.multi_items():
        if name not in FIELDS:
            raise InputError(f"a form has the fields {' and '.join(FIELDS)}, not {name[:40]!r}: leave it out")
        if isinstance(value, UploadFile) != (name == "files"):
            raise InputError(f"the field {name!r} must be {'a file' if name == 'files' else 'text'}")
    files = [value for value in form.getlist("files") if isinstance(value, UploadFile)]
    for file in files:
        if not 0 < len(file.filename or "") <= MAX_NAME:
            raise InputError(f"a file needs a name of at most {MAX_NAME} characters: rename it")
    if not files:
        raise InputError("the form has no files: send them in the field `files`")
    collection = form.get("collection")
    return (collection if isinstance(collection, str) else None) or None, files
