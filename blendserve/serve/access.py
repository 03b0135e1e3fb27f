"""Who asks, and whether they may: for every route that is not about the server's health."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from blendserve.errors import NotAuthenticated
from blendserve.serve.keys import Tenant
from blendserve.serve.service import Service

_bearer = HTTPBearer(auto_error=False, description="An API key, where the server has keys")


def service(request: Request) -> Service:
    """The server's parts."""
    found: Service = request.app.state.service
    return found


def tenant(
    request: Request,
    service: Annotated[Service, Depends(service)],
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Tenant:
    """Whose request it is; counts it. Raises NotAuthenticated, Busy."""
    if service.keys is None:
        who = service.anybody
    elif credentials is None:
        raise NotAuthenticated("no API key: send one as `Authorization: Bearer ...`")
    else:
        who = service.keys.tenant(credentials.credentials)
    request.state.tenant = who.name
    service.limits.pay(who)
    return who


ServiceArg = Annotated[Service, Depends(service)]
TenantArg = Annotated[Tenant, Depends(tenant)]
