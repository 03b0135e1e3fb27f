"""From a question to a response, whole or streamed, that lets go of everything when the client goes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from blendserve.core import Answer
from blendserve.serve.keys import Tenant
from blendserve.serve.replies import EventStream, while_connected
from blendserve.serve.service import Answering, Ask, Service

Whole = Callable[[Answering, Answer], dict[str, Any]]
Events = Callable[[Answering], AsyncIterator["dict[str, Any] | str"]]


async def reply(
    request: Request, service: Service, tenant: Tenant, ask: Ask, whole: Whole, events: Events | None
) -> Response:
    """Ask, and answer by `whole`, or by `events` where they are given. Raises BlendserveErrors and ClientGone.

    Events begin as soon as the request is queued, so that its passages are seen while it waits and is prefilled.
    """
    with ExitStack() as stack:
        stack.enter_context(service.limits.one(tenant))
        if service.serve.log_text:
            request.state.text = ask.question
        answering = await while_connected(request, service.ask(tenant, ask))
        stack.callback(answering.cancel)
        if events is None:
            return JSONResponse(whole(answering, await while_connected(request, answering.answer())))
        return EventStream(events(answering), stack.pop_all().close)
