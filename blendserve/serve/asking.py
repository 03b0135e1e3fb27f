"""What the services with a local model and with a cluster share: collections, access to them, and retrieval."""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from blendserve.config import Config, ServeConfig
from blendserve.core import Answer, Passage
from blendserve.engine.fair_executor import FairExecutor
from blendserve.engine.library import Library
from blendserve.engine.request import Event, Failed, Finished, Plan, PrefillDone, Request
from blendserve.errors import InputError, NotFound
from blendserve.retrieve import VectorIndex
from blendserve.serve.front import Front
from blendserve.serve.keys import Tenant
from blendserve.serve.metrics import HttpMetrics


@dataclass(frozen=True, slots=True)
class Ask(Request):
    """A client's request."""

    collections: tuple[str, ...] | None = None  # None = all that the client may use

    def seeded(self) -> Ask:
        """The request with a random seed unless it has one, so that repeated sampling differs."""
        given = {k: v for k, v in self.decode.items() if v is not None}
        return replace(self, decode={"seed": secrets.randbits(31)} | given)


class Answering:
    """A queued or running request; call `cancel` when its client disconnects."""

    def __init__(self, plan: Plan, events: AsyncIterator[Event], cancel: Callable[[], None]) -> None:
        self._events, self.cancel = events, cancel
        self.passages, self.ids = plan.passages, plan.prompt.ids
        self.prompt_tokens, self.question_tokens = len(self.ids), len(plan.prompt.suffix)
        self.cached_tokens = 0  # of the prompt; known when prefill is done

    async def events(self) -> AsyncIterator[Event]:
        """PrefillDone when prefill is done, pieces, and at last Finished. Raises what the request failed with."""
        async for event in self._events:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, PrefillDone):
                self.cached_tokens = event.cached
            yield event
            if isinstance(event, Finished):
                return

    async def answer(self) -> Answer:
        """The whole answer. Raises what the request failed with."""
        async for event in self.events():
            if isinstance(event, Finished):
                return event.answer
        raise AssertionError("events end with Finished")


def served_names(reader: str, served: str | None) -> tuple[str, ...]:
    """The model names that requests may use, the public one first: `served`, or else a folder's last part."""
    folder = Path(reader)
    public = served or (folder.resolve().name if folder.is_dir() else reader)
    return tuple(dict.fromkeys((public, reader)))


class Asking(Front, ABC):
    """A service that takes questions."""

    slot_tokens: int  # of a request's prompt and answer, at most

    def __init__(
        self, config: Config, library: Library, serve: ServeConfig, metrics: HttpMetrics, reader: Any
    ) -> None:
        """reader: its `name` and `tokenizer` are used."""
        super().__init__(serve, metrics, config.store.namespace)
        self.config, self.library, self.serve = config, library, serve
        self.model_names = served_names(reader.name, serve.served_model_name)
        self.model_name = self.model_names[0]  # in responses
        self.tokenizer: Any = reader.tokenizer
        self.retrieval = self._retrieval()
        self.storage = FairExecutor("storage", serve.queue)  # counts, pins and looks things up in the store

    @abstractmethod
    def _retrieval(self) -> FairExecutor:
        """The thread that may touch indexes."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether the service accepts questions."""

    @abstractmethod
    async def ask(self, tenant: Tenant, ask: Ask) -> Answering:
        """Retrieve, lay out and queue. Raises InputError, NotFound, Busy, Stopping and other BlendserveErrors."""

    @abstractmethod
    def start(self) -> None:
        """Begin to accept questions."""

    @abstractmethod
    def drain(self) -> None:
        """Refuse new questions; accepted ones are answered."""

    def stopping(self) -> None:
        """On the event loop, before `close`."""
        return

    def close(self) -> None:
        """End the threads."""
        self.retrieval.stop()
        self.storage.stop()

    async def on_retrieval(self, tenant: Tenant, call: Any, *args: Any, long: bool = False) -> Any:
        """Run something on the thread that may touch indexes, when it is the tenant's turn. Raises Busy and Stopping.

        long: it may take longer than a question, and lets those go between its parts: `prompts` does before each
        passage, anything else by `retrieval.give_way`. Cancelled while it waits, it is not run.
        """
        return await asyncio.wrap_future(self.retrieval.submit(tenant.name, partial(call, *args), long))

    async def on_storage(self, tenant: Tenant, call: Any, *args: Any) -> Any:
        """Run something that is about the store alone, when it is the tenant's turn. Raises Busy and Stopping."""
        return await asyncio.wrap_future(self.storage.submit(tenant.name, partial(call, *args)))

    def collections(self, tenant: Tenant) -> list[str]:
        """The names of the collections that a tenant may use."""
        return [name for name in self.library.collections if tenant.may_use(name)]

    def collection(self, tenant: Tenant, name: str | None) -> tuple[str, VectorIndex]:
        """A collection by name, or the tenant's only one. Raises InputError; NotFound, also for another tenant's."""
        theirs = self.collections(tenant)
        if name is None and len(theirs) != 1:
            raise InputError(f"set `collection`: this API key has {', '.join(theirs) or 'none'}")
        name = theirs[0] if name is None else name
        if name not in theirs:
            raise NotFound(f"there is no collection {name!r}: this API key has {', '.join(theirs) or 'none'}")
        return name, self.library.collections[name]

    def search(
        self, tenant: Tenant, names: tuple[str, ...] | None, question: str, top_k: int
    ) -> list[Passage]:
        """The nearest passages of these collections, or of all that the tenant may use. On the retrieval thread."""
        wanted = self.collections(tenant) if names is None else dict.fromkeys(names)
        return self.library.search([self.collection(tenant, n)[0] for n in wanted], question, top_k)
