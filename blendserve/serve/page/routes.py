"""The page: its files, as they lie in static/, from memory. Nothing of it waits for the model or asks for a key.

All figures that it shows come from the API that other clients use, too (docs/reference/http-api.md).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from blendserve.errors import NotFound

STATIC = Path(__file__).with_name("static")
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (  # nothing from elsewhere, nothing written into the markup, no frames
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, and asked about by its ETag: a new version shows at once
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class File:
    """One file, as it is sent."""

    body: bytes
    kind: str
    etag: str


@router.get("/")
async def index(request: Request) -> Response:
    """The page itself."""
    return _sent(request, "index.html")


@router.get("/page/{name}")
async def part(request: Request, name: str) -> Response:
    """One of its styles and modules. Raises NotFound."""
    return _sent(request, name)


@cache
def files() -> dict[str, File]:
    """All files by name, read once."""
    return {path.name: _read(path) for path in STATIC.iterdir() if path.suffix in KINDS}


def _read(path: Path) -> File:
    body = path.read_bytes()
    return File(body, f"{KINDS[path.suffix]}; charset=utf-8", f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def _sent(request: Request, name: str) -> Response:
    file = files().get(name)
    if file is None:
        raise NotFound(f"the page has no file {name!r}")
    headers = {**HEADERS, "ETag": file.etag}
    if file.etag in request.headers.get("If-None-Match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers={**headers, "Content-Type": file.kind})
