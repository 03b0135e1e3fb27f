"""Authentication and request limits of every route except the health checks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from starlette.requests import HTTPConnection

from blendserve.errors import NotAuthenticated
from blendserve.serve.asking import Asking
from blendserve.serve.front import Front
from blendserve.serve.keys import Tenant
from blendserve.serve.service import Service

_bearer = HTTPBearer(auto_error=False, description="An API key, if the server has keys")


def service(request: Request) -> Service:
    """The server's parts."""
    found: Service = request.app.state.service
    return found


def asking(request: Request) -> Asking:
    """The same, for routes that also run on a cluster's ingress."""
    found: Asking = request.app.state.service
    return found


def admit(connection: HTTPConnection, service: Front) -> Tenant:
    """The tenant of a request, which is counted once. Raises NotAuthenticated, Busy."""
    state = connection.state
    if not hasattr(state, "admitted"):
        state.admitted = who = _who(connection, service)
        state.tenant = who.name if service.keys else ""
        service.limits.pay(who)
    admitted: Tenant = state.admitted
    return admitted


def _who(connection: HTTPConnection, service: Front) -> Tenant:
    """The tenant by API key, or by address on a server without keys."""
    if service.keys is None:
        return service.anonymous(connection.client.host if connection.client else "")
    scheme, key = get_authorization_scheme_param(connection.headers.get("Authorization"))
    if scheme.lower() != "bearer" or not key:
        raise NotAuthenticated("no API key: send one as `Authorization: Bearer ...`")
    return service.keys.tenant(key)


def front(request: Request) -> Front:
    """The part that every server has."""
    found: Front = request.app.state.service
    return found


def tenant(
    request: Request,
    service: Annotated[Front, Depends(front)],
    _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],  # for the API's description
) -> Tenant:
    """The tenant of a request. Raises NotAuthenticated, Busy."""
    return admit(request, service)


async def counted_tenant(
    service: Annotated[Front, Depends(front)], who: Annotated[Tenant, Depends(tenant)]
) -> AsyncIterator[Tenant]:
    """The same for routes that occupy a thread: they count as concurrent requests."""
    with service.limits.one(who):
        yield who


ServiceArg = Annotated[Service, Depends(service)]
AskingArg = Annotated[Asking, Depends(asking)]
TenantArg = Annotated[Tenant, Depends(tenant)]
CountedTenantArg = Annotated[Tenant, Depends(counted_tenant)]
