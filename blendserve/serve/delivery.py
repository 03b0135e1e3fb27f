"""`blendserve kdn serve`: published collections over HTTP, for those without a web server.

The files of a folder are served as they are, as nginx or an object store would. A key reads the descriptions of its
collections. Other files are named by hashes that only descriptions and directories tell, so any key may read them.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import ExitStack
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

from blendserve.config import Config, DeliverConfig
from blendserve.errors import BodyTooSlow, InputError, NotFound
from blendserve.fetch.kdn.manifest import KINDS, NAME
from blendserve.kdn.target import CACHED_S, FOR_EVER
from blendserve.serve.app import create_app
from blendserve.serve.auth import ServiceBackend, TenantDep, backend_of
from blendserve.serve.keys import Tenant
from blendserve.serve.metrics import HttpMetrics
from blendserve.serve.server import check_http, listen
from blendserve.store.codecs.base import TABLES_BYTES

SEND_BYTES = 1 << 18  # read and sent at a time
MISSING = "not found, or not accessible with this API key"
FILE = re.compile(rf"(?P<name>{NAME})\.json|(?:{'|'.join(KINDS)})/[0-9a-f]{{{2 * TABLES_BYTES}}}")


class DeliveryBackend(ServiceBackend):
    """A folder of collections."""

    http: DeliverConfig

    def __init__(self, folder: Path, config: DeliverConfig) -> None:
        super().__init__(config, HttpMetrics())
        self.files = StaticFiles(directory=folder)

    def check_access(self, tenant: Tenant, path: str) -> None:
        """Raise NotFound for a collection that is missing, or, with the same error, hidden from this key."""
        match = FILE.fullmatch(path)
        if (
            not match
            or tenant.tags is not None
            or not (match["name"] is None or tenant.may_use(match["name"]))
        ):
            raise NotFound(MISSING)


class Delivery(Response):
    """A response that counts as a concurrent request until it is sent, and ends if the client stops reading."""

    def __init__(self, response: Response, timeout_s: float, slot: ExitStack) -> None:
        self._response = response
        self._timeout_s = timeout_s
        self._slot = slot
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def timed(message: Message) -> None:
            try:
                await asyncio.wait_for(send(message), self._timeout_s)
            except asyncio.TimeoutError:
                raise BodyTooSlow(f"the client received nothing for {self._timeout_s:g} s") from None

        with self._slot:
            await self._response(scope, receive, timed)


router = APIRouter(tags=["delivery"])


@router.head("/{name}.json", include_in_schema=False)
@router.get("/{name}.json")
async def description(name: str, request: Request, tenant: TenantDep) -> Response:
    """Return the description of a collection."""
    return await _send(f"{name}.json", request, tenant)


@router.head("/{kind}/{hash}", include_in_schema=False)
@router.get("/{kind}/{hash}")
async def named_file(kind: str, hash: str, request: Request, tenant: TenantDep) -> Response:
    """Return a file that never changes."""
    return await _send(f"{kind}/{hash}", request, tenant)


async def _send(path: str, request: Request, tenant: Tenant) -> Response:
    """Return a file, or a range of it. Raises NotFound."""
    backend: DeliveryBackend = backend_of(request)
    with ExitStack() as stack:
        stack.enter_context(backend.limits.concurrency_slot(tenant))
        backend.check_access(tenant, path)
        try:
            response = await backend.files.get_response(path, request.scope)
        except HTTPException:
            raise NotFound(MISSING) from None
        if isinstance(response, FileResponse):
            response.chunk_size = SEND_BYTES
        age = f"max-age={CACHED_S}" if path.endswith(".json") else FOR_EVER
        response.headers["Cache-Control"] = f"{'private' if backend.keys.are_needed else 'public'}, {age}"
        return Delivery(response, backend.http.send_s, stack.pop_all())


def serve(folder: Path, settings: Config) -> None:
    """Serve the collections of a folder until told to stop. Raises ConfigError, InputError."""
    check_http(settings.deliver)
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder}: publish into it by `blendserve kdn publish INDEX {folder}/NAME`"
        )
    backend = DeliveryBackend(folder, settings.deliver)
    listen(create_app(backend, [router]), backend)
