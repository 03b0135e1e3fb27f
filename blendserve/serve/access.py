"""Who asks, and whether they may: for every route that is not about the server's health."""

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

_bearer = HTTPBearer(auto_error=False, description="An API key, where the server has keys")


def service(request: Request) -> Service:
    """The server's parts."""
    found: Service = request.app.state.service
    return found


def asking(request: Request) -> Asking:
    """The server's parts, wherever its model runs."""
    found: Asking = request.app.state.service
    return found


def admit(connection: HTTPConnection, service: Front) -> Tenant:
    """Whose request it is; counts it, once. Raises NotAuthenticated, Busy."""
    state = connection.state
    if not hasattr(state, "admitted"):
        state.admitted = who = _who(connection, service)
        state.tenant = who.name if service.keys else ""
        service.limits.pay(who)
    admitted: Tenant = state.admitted
    return admitted


def _who(connection: HTTPConnection, service: Front) -> Tenant:
    """By key, or by address where there are no keys."""
    if service.keys is None:
        return service.anybody(connection.client.host if connection.client else "")
    scheme, key = get_authorization_scheme_param(connection.headers.get("Authorization"))
    if scheme.lower() != "bearer" or not key:
        raise NotAuthenticated("no API key: send one as `Authorization: Bearer ...`")
    return service.keys.tenant(key)


def front(request: Request) -> Front:
    """What stands before them."""
    found: Front = request.app.state.service
    return found


def tenant(
    request: Request,
    service: Annotated[Front, Depends(front)],
    _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],  # for the API's description
) -> Tenant:
    """Whose request it is. Raises NotAuthenticated, Busy."""
    return admit(request, service)


async def counted_tenant(
    service: Annotated[Front, Depends(front)], who: Annotated[Tenant, Depends(tenant)]
) -> AsyncIterator[Tenant]:
    """The same for what keeps a thread busy: so many at a time. Raises Busy, too."""
    with service.limits.one(who):
        yield who


ServiceArg = Annotated[Service, Depends(service)]
AskingArg = Annotated[Asking, Depends(asking)]
TenantArg = Annotated[Tenant, Depends(tenant)]
CountedTenantArg = Annotated[Tenant, Depends(counted_tenant)]
