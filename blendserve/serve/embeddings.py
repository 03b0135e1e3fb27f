"""POST /v1/embeddings, /v1/rerank and /v1/rag/retrieve: vectors, relevance scores, and search without an answer."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter

from blendserve.core import Passage, PassageFilter, run
from blendserve.errors import InputError, NotFound
from blendserve.retrieve import Embedder
from blendserve.serve.auth import LimitedTenantDep
from blendserve.serve.engine_client import ClientDep, EngineClient, served_names
from blendserve.serve.schemas import EmbeddingsRequest, RerankRequest, RetrieveRequest

BATCH = 16  # texts; between two batches, the question of another client may be embedded

router = APIRouter(prefix="/v1")


@router.post("/rag/retrieve", tags=["RAG"])
async def retrieve(body: RetrieveRequest, client: ClientDep, tenant: LimitedTenantDep) -> dict[str, Any]:
    """Return the passages nearest to a question, from the named collections, or all that this key may use."""
    names = None if body.collections is None else tuple(body.collections)
    config = client.config.retrieve
    least = config.min_score if body.min_score is None else body.min_score
    selection = PassageFilter(least, body.filter or {})
    top_k = body.top_k or config.top_k
    search = partial(client.collections.search, tenant, names, body.question, top_k, selection)
    found = await client.collections.executor.run(tenant.name, search)
    return {"passages": [asdict(passage) for passage in found], **client.notices.as_extras(body)}


@router.post("/embeddings", tags=["OpenAI"])
async def embeddings(body: EmbeddingsRequest, client: ClientDep, tenant: LimitedTenantDep) -> dict[str, Any]:
    """Return unit vectors of texts, from the embedder of the index. A long text has the mean of its windows' vectors."""
    embedder = await client.collections.executor.run(tenant.name, _embedder, client)
    name = _served("embedder", embedder.name, client, body.model)
    if body.dimensions not in (None, embedder.dimension):
        raise InputError(
            f"dimensions {body.dimensions}: vectors of {name!r} have {embedder.dimension}; leave the field out",
            setting="dimensions",
        )
    texts = body.texts
    rows: list[np.ndarray] = []
    n_tokens = 0
    for start in range(0, len(texts), BATCH):
        arguments = embedder, texts[start : start + BATCH], body.input_type == "query"
        vectors, n = await client.collections.executor.run(tenant.name, embed, *arguments)
        rows += vectors
        n_tokens += n
    data = [
        {"object": "embedding", "index": i, "embedding": _encoded(row, body.encoding_format)}
        for i, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return {
        "object": "list",
        "data": data,
        "model": name,
        "usage": usage,
        **client.notices.as_extras(body),
    }


@router.post("/rerank", tags=["RAG"])
async def rerank(body: RerankRequest, client: ClientDep, tenant: LimitedTenantDep) -> dict[str, Any]:
    """Return documents by relevance to a query, best first, by the cross-encoder of the settings. As vLLM's route."""
    if (reranker := client.reranker) is None:
        raise NotFound("this server has no reranker: start it with --set retrieve.reranker=MODEL")
    name = _served("reranker", reranker.name, client, body.model)
    texts = body.texts
    scores: list[float] = []
    n_tokens = 0
    for start in range(0, len(texts), BATCH):
        part = texts[start : start + BATCH]
        scores += await client.collections.executor.run(tenant.name, reranker.scores, body.query, part)
        n_tokens += await client.collections.executor.run(tenant.name, reranker.n_tokens, body.query, part)
    best = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n or None]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": name,
        "results": results,
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        **client.notices.as_extras(body),
    }


def embed(embedder: Embedder, texts: Sequence[str], is_question: bool) -> tuple[list[np.ndarray], int]:
    """Return a unit vector [dimension] float32 for each text, and the number of tokens read."""
    cut = run(embedder.cut([Passage(text) for text in texts]))
    flat = [window for windows in cut for window in windows]
    encoded = run(embedder.encode(flat, None, is_question))
    at = 0
    rows: list[np.ndarray] = []
    for windows in cut:
        total = encoded[at : at + len(windows)].sum(0)
        rows.append(total / max(float(np.linalg.norm(total)), np.finfo(np.float32).tiny))
        at += len(windows)
    return rows, sum(len(window.ids) for window in flat)


def _served(kind: str, model: str, client: EngineClient, asked: str | None) -> str:
    """Return the public name of the embedder or reranker. Raises NotFound if the request names another model."""
    names = served_names(model, ())
    if asked not in (None, *names, *client.model_names):
        raise NotFound(f"there is no {kind} {asked!r} on this server: it has {names[0]!r}")
    return names[0]


def _embedder(client: EngineClient) -> Embedder:
    """Return the embedder of the collections; without collections, that of the settings."""
    for index in client.collections.indexes.values():
        return index.embedder
    return client.embedder


def _encoded(vector: np.ndarray, encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    values: list[float] = vector.tolist()
    return values
