"""The backend of a server, and the authentication of every route except the health checks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from starlette.requests import HTTPConnection

from blendserve.config import HttpConfig
from blendserve.errors import NotAuthenticated
from blendserve.serve.keys import ApiKeys, Limits, Tenant
from blendserve.serve.metrics import HttpMetrics
from blendserve.serve.notices import Notices


class ServiceBackend:
    """What the routes of a server run on: an engine, replicas, or a store of collections; with its keys and limits."""

    def __init__(self, http: HttpConfig, metrics: HttpMetrics, namespace: str = "") -> None:
        """namespace: of requests without a key, and of the single key. Raises ConfigError for a damaged key file."""
        self.http = http
        self.metrics = metrics
        self.namespace = namespace
        self.keys = ApiKeys(http, namespace)
        self.notices = Notices()
        self.limits = Limits(http.max_concurrent, http.max_per_minute)
        self._is_draining = False

    @property
    def is_alive(self) -> bool:
        """Return whether the server accepts requests."""
        return not self._is_draining

    def start(self) -> None:
        """Begin to accept requests."""

    def drain(self) -> None:
        """Refuse new requests; accepted ones are answered."""
        self._is_draining = True

    async def finish(self) -> None:
        """Stop background jobs, and save what they have done; before `close`, on the event loop."""

    def close(self) -> None:
        """End all threads. Idempotent."""

    def identify(self, connection: HTTPConnection) -> Tenant:
        """Return the tenant of a connection: by API key; by address without keys. Raises NotAuthenticated."""
        if not self.keys.are_needed:
            address = connection.client.host if connection.client else ""
            return Tenant(address, self.namespace, admin=True)
        scheme, key = get_authorization_scheme_param(connection.headers.get("Authorization"))
        if scheme.lower() != "bearer":
            key = connection.headers.get("x-api-key", "")  # as clients of Anthropic's API send it
        if not key:
            raise NotAuthenticated("no API key: send one as `Authorization: Bearer ...` or `x-api-key: ...`")
        return self.keys.tenant(key)


def backend_of(connection: HTTPConnection) -> Any:
    """Return the backend of the server that a connection belongs to."""
    return connection.app.state.backend


_bearer = HTTPBearer(auto_error=False, description="An API key, if the server has keys")


async def authenticate(
    connection: HTTPConnection,
    _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)] = None,  # for the API's description
) -> Tenant:
    """Return the tenant of a request, and count the request once. Raises NotAuthenticated, RateLimited.

    A coroutine, so that FastAPI runs it on the event loop. RequestBodyMiddleware calls it before it reads a body.
    """
    known = connection.state
    if not hasattr(known, "authenticated"):
        backend = backend_of(connection)
        known.authenticated = backend.identify(connection)
        known.tenant = known.authenticated.name if backend.keys.are_needed else ""  # for the log
        backend.limits.take_request(known.authenticated)
    tenant: Tenant = known.authenticated
    return tenant


TenantDep = Annotated[Tenant, Depends(authenticate)]
BackendDep = Annotated[ServiceBackend, Depends(backend_of)]


async def limited_tenant(backend: BackendDep, tenant: TenantDep) -> AsyncIterator[Tenant]:
    """Return the tenant of a request that occupies a thread, and count it as a concurrent request."""
    with backend.limits.concurrency_slot(tenant):
        yield tenant


LimitedTenantDep = Annotated[Tenant, Depends(limited_tenant)]
