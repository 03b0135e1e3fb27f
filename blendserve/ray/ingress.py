"""The HTTP process of a cluster: it retrieves passages and builds prompts; replicas run the model.

API keys, limits and streams belong to this process, so limits hold over all replicas. Its machine needs the indexes,
the embedder and the model's tokenizer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from blendserve.blend.chunk_kv import ChunkKeys
from blendserve.blend.policies import defaults_for
from blendserve.config import Config, ServeConfig
from blendserve.engine.documents import Collections, token_counter
from blendserve.engine.engine import Engine
from blendserve.engine.fair_executor import BackgroundThrottle, FairExecutor
from blendserve.engine.prompt import PromptBuilder
from blendserve.engine.request import prepare_request
from blendserve.errors import InputError, ShuttingDown
from blendserve.models.loader import load_tokenizer
from blendserve.paths import index_folder
from blendserve.ray.cluster import cluster, worker_config
from blendserve.ray.replica import RoutedRequest
from blendserve.ray.replicas import ReplicaCount, Replicas
from blendserve.retrieve import Embedder, VectorIndex, read_manifest
from blendserve.serve.app import create_engine_app
from blendserve.serve.engine_client import (
    EngineClient,
    QueryRequest,
    RequestHandle,
    TenantCollections,
    each_answer,
)
from blendserve.serve.keys import Tenant
from blendserve.serve.metrics import HttpMetrics
from blendserve.serve.server import listen, local_indexes
from blendserve.timing import Clock

log = logging.getLogger(__name__)


class RayEngineClient(EngineClient):
    """An EngineClient of replicas on a Ray cluster."""

    def __init__(
        self,
        config: Config,
        library: Collections,
        http: ServeConfig,
        tokenizer: Any,
        prompts: PromptBuilder,
        replicas: Replicas,
    ) -> None:
        """The replicas are their opener's to close. They share no evidence yet: blend.ratio applies."""
        self._facts = replicas.facts()
        self.prompts = prompts
        self._replicas = replicas
        config = config.replace("blend", defaults_for(config.blend, self._facts))
        super().__init__(config, http, HttpMetrics(), self._facts.name, tokenizer, self._facts.max_tokens)
        retrieval = FairExecutor("retrieval", http.max_concurrent, BackgroundThrottle(http.background_share))
        self.collections = TenantCollections(library, retrieval, self.reranker)

    async def submit(self, query: QueryRequest, tenant: Tenant) -> list[RequestHandle]:
        """See EngineClient."""
        if not self.is_alive:
            raise ShuttingDown("the server is shutting down: ask again in a moment")
        if query.check:
            raise InputError("a cluster does not check answers: leave out `check`", setting="check")
        clock = Clock()
        search = partial(self.collections.search, tenant, query.collections)
        limits = self._facts, self.max_tokens
        arguments = query.seeded(), self.config, *limits, self.prompts, search, clock
        prepared = await self.collections.executor.run(tenant.name, prepare_request, *arguments)
        of_model = self._facts.fingerprint, self._facts.dtype, self.prompts.kv_context
        key = ChunkKeys(*of_model, tenant.namespace)
        keys = frozenset(key(chunk.ids) for chunk in prepared.prompt.chunks if len(chunk))
        routed = [
            RoutedRequest(each, keys, tenant.name, tenant.namespace)
            for each in each_answer(prepared, query.n)
        ]
        # The task that awaits the events cancels the request.
        return [RequestHandle(each.prepared, self._replicas.answer(each), lambda: None) for each in routed]


def serve_cluster(
    settings: Config, indexes: Sequence[str], replicas: ReplicaCount, address: str | None
) -> None:
    """Serve replicas of the engine on a Ray cluster, which is joined or started (cluster.py), until told to stop.

    Raises ClusterUnavailable, ConfigError, IndexMissing, ModelError, StoreError.
    """
    config, folders = local_indexes(settings, indexes)
    folder = index_folder(folders[0])
    read_manifest(folder)  # raises before anything heavy is started
    open_engine = partial(Engine.open, worker_config(config, folder))
    log.info("Starting replicas: %d to %d", *replicas)
    with (
        cluster(address, replicas.most) as resources,
        Replicas(open_engine, config.serve, replicas, resources) as group,
    ):
        facts = group.facts()
        tokenizer = load_tokenizer(config.model)
        prompts = PromptBuilder(tokenizer, config.prompt)
        embedder = Embedder.load(config.retrieve.embedder)
        tokens = token_counter(facts.name, facts.dtype, facts.fingerprint, prompts)
        library = Collections.open(VectorIndex.open(folder, embedder, tokens), folders)
        client = RayEngineClient(config, library, settings.serve, tokenizer, prompts, group)
        listen(create_engine_app(client), client)
