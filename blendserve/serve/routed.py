"""The ingress of a cluster: questions are searched for and laid out here, and answered by replicas elsewhere.

Keys, limits, bodies and streams are this process's own, as of any server, so that limits hold over all replicas. Its
machine needs the indexes and the embedder, and of the reader only the tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from blendserve.config import Config, ServeConfig
from blendserve.engine.fair_executor import BackgroundThrottle, FairExecutor
from blendserve.engine.library import Library
from blendserve.engine.prompt import PromptBuilder
from blendserve.engine.request import Plan, make_plan
from blendserve.errors import Stopping
from blendserve.ray.replica import ReaderFacts, RoutedRequest
from blendserve.ray.replicas import Replicas
from blendserve.serve.asking import Answering, Ask, Asking
from blendserve.serve.keys import Tenant
from blendserve.serve.metrics import HttpMetrics
from blendserve.store import chunk_key
from blendserve.timing import Clock


@dataclass(frozen=True, slots=True)
class RemoteReader:
    """A reader that runs elsewhere."""

    facts: ReaderFacts
    tokenizer: Any

    @property
    def name(self) -> str:
        return self.facts.name


class RoutedService(Asking):
    """Replicas and their collections."""

    def __init__(
        self,
        config: Config,
        library: Library,
        serve: ServeConfig,
        reader: RemoteReader,
        prompts: PromptBuilder,
        replicas: Replicas,
    ) -> None:
        self._facts, self._prompts, self._replicas = reader.facts, prompts, replicas
        self.slot_tokens = reader.facts.slot_tokens
        self._draining = False
        super().__init__(config, library, serve, HttpMetrics(), reader)

    def _retrieval(self) -> FairExecutor:
        serve = self.serve
        return FairExecutor(
            "retrieval",
            serve.queue,
            BackgroundThrottle(serve.background_share),
            lambda: False,
            lambda tenant: False,
        )

    @property
    def alive(self) -> bool:
        return not self._draining

    def start(self) -> None:
        """Replicas run already."""

    def drain(self) -> None:
        self._draining = True

    async def ask(self, tenant: Tenant, ask: Ask) -> Answering:
        if self._draining:
            raise Stopping("the server is shutting down: ask again in a moment")
        clock = Clock()
        plan: Plan = await self.on_retrieval(tenant, self._planned, tenant, ask, clock)
        request = RoutedRequest(
            plan.prompt,
            plan.passages,
            plan.blend,
            plan.decode,
            tenant.name,
            tenant.namespace,
            clock.elapsed(),
            clock.seconds["retrieve"],
        )
        events = self._replicas.answer(request, self._keys(plan, tenant.namespace))
        return Answering(plan, events, lambda: None)  # who awaits the events is cancelled, and so are they

    def _planned(self, tenant: Tenant, ask: Ask, clock: Clock) -> Plan:
        """What takes checking, searching and tokenising."""
        search = partial(self.search, tenant, ask.collections)
        return make_plan(
            ask.seeded(), self.config, self._facts, self._prompts, search, clock, self.slot_tokens
        )

    def _keys(self, plan: Plan, namespace: str) -> frozenset[bytes]:
        """Of the prompt's chunks in the store."""
        facts, context = self._facts, self._prompts.kv_context
        return frozenset(
            chunk_key(facts.fingerprint, context, chunk.ids, facts.dtype, namespace)
            for chunk in plan.prompt.chunks
            if len(chunk)
        )
