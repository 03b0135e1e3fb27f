"""What the routes of a server share, and the authentication of every route except the health checks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from starlette.requests import HTTPConnection

from blendserve.errors import NotAuthenticated
from blendserve.serve.engine_client import Backend, EngineClient
from blendserve.serve.keys import ApiKeys, Tenant
from blendserve.serve.limits import Limits
from blendserve.serve.notices import Notices

AnyBackend = TypeVar("AnyBackend", bound=Backend)


class ServerState(Generic[AnyBackend]):
    """A server's backend, API keys, limits and notices. Raises ConfigError for a damaged key file."""

    def __init__(self, backend: AnyBackend) -> None:
        self.backend = backend
        self.http, self.metrics = backend.http, backend.metrics
        self.keys = ApiKeys(self.http, backend.namespace)
        self.limits = Limits(self.http.max_concurrent, self.http.max_per_minute)
        self.notices = Notices()

    def identify(self, connection: HTTPConnection) -> Tenant:
        """The tenant of a connection: by API key; by address without keys. Raises NotAuthenticated."""
        if not self.keys.are_needed:
            address = connection.client.host if connection.client else ""
            return Tenant(address, self.backend.namespace, admin=True)
        scheme, key = get_authorization_scheme_param(connection.headers.get("Authorization"))
        if scheme.lower() != "bearer" or not key:
            raise NotAuthenticated("no API key: send one as `Authorization: Bearer ...`")
        return self.keys.tenant(key)


def server_state(connection: HTTPConnection) -> ServerState[Any]:
    """The state of the server that a connection belongs to."""
    state: ServerState[Any] = connection.app.state.server
    return state


_bearer = HTTPBearer(auto_error=False, description="An API key, if the server has keys")


async def authenticate(
    connection: HTTPConnection,
    _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)] = None,  # for the API's description
) -> Tenant:
    """The tenant of a request, which is counted once. Raises NotAuthenticated, RateLimited.

    A coroutine, so that FastAPI runs it on the event loop. RequestBodyMiddleware calls it before it reads a body.
    """
    known = connection.state
    if not hasattr(known, "authenticated"):
        state = server_state(connection)
        known.authenticated = state.identify(connection)
        known.tenant = known.authenticated.name if state.keys.are_needed else ""  # for the log
        state.limits.take_request(known.authenticated)
    tenant: Tenant = known.authenticated
    return tenant


TenantDep = Annotated[Tenant, Depends(authenticate)]
StateDep = Annotated[ServerState[EngineClient], Depends(server_state)]
AnyStateDep = Annotated[ServerState[Any], Depends(server_state)]


async def limited_tenant(state: AnyStateDep, tenant: TenantDep) -> AsyncIterator[Tenant]:
    """The same for routes that occupy a thread: they count as concurrent requests."""
    with state.limits.concurrency_slot(tenant):
        yield tenant


LimitedTenantDep = Annotated[Tenant, Depends(limited_tenant)]
