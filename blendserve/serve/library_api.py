"""Documents and their KV: /v1/documents, /v1/jobs, /v1/cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query

from blendserve.core import Passage
from blendserve.errors import InputError, NotFound
from blendserve.retrieve import VectorIndex
from blendserve.serve.access import ServiceArg, TenantArg
from blendserve.serve.jobs import Job
from blendserve.serve.keys import Tenant
from blendserve.serve.schema import CacheRequest, DocumentIn, DocumentsRequest, Name
from blendserve.serve.service import Service
from blendserve.store import ChunkKey

router = APIRouter(prefix="/v1", tags=["documents and cache"])


@router.post("/documents", status_code=202)
async def add(body: DocumentsRequest, service: ServiceArg, tenant: TenantArg) -> dict[str, Any]:
    """Add documents to a collection, or replace those with the same id: chunked, embedded and precomputed by a job."""
    tenant.require_writing()
    name, index = service.collection(tenant, body.collection)

    async def run(job: Job) -> None:
        await _add(service, tenant, index, body.documents, job)

    return service.jobs.start(tenant.namespace, f"documents into {name}", run).to_dict()


@router.get("/jobs/{job_id}")
async def job(job_id: str, service: ServiceArg, tenant: TenantArg) -> dict[str, Any]:
    """How far a job is."""
    return service.jobs.get(tenant.namespace, job_id).to_dict()


@router.delete("/documents/{doc_id:path}")
async def delete(
    doc_id: str, service: ServiceArg, tenant: TenantArg, collection: Annotated[Name | None, Query()] = None
) -> dict[str, Any]:
    """Remove a document with its passages, vectors and KV."""
    tenant.require_writing()
    name, index = service.collection(tenant, collection)
    passages = await service.on_retrieval(_delete, service, index, doc_id)
    return {"id": doc_id, "collection": name, "deleted": True, "passages": len(passages)}


@router.post("/cache/warm", status_code=202)
async def warm(body: CacheRequest, service: ServiceArg, tenant: TenantArg) -> dict[str, Any]:
    """Compute and pin the KV of chunks in this key's namespace, by a job."""
    passages = await service.on_retrieval(_chosen, service, tenant, body)

    async def run(job: Job) -> None:
        await _precompute(service, tenant, passages, job)

    return service.jobs.start(tenant.namespace, "warm", run).to_dict()


@router.post("/cache/pin")
async def pin(body: CacheRequest, service: ServiceArg, tenant: TenantArg) -> dict[str, Any]:
    """Keep chunks from being evicted."""
    keys = await service.on_retrieval(_keys, service, tenant, body)
    return {"chunks": len(keys), "pinned": await service.on_retrieval(service.engine.store.pin, keys)}


@router.post("/cache/unpin")
async def unpin(body: CacheRequest, service: ServiceArg, tenant: TenantArg) -> dict[str, Any]:
    """Undo that."""
    keys = await service.on_retrieval(_keys, service, tenant, body)
    return {"chunks": len(keys), "unpinned": await service.on_retrieval(service.engine.store.unpin, keys)}


@router.post("/cache/lookup")
async def lookup(body: CacheRequest, service: ServiceArg, tenant: TenantArg) -> dict[str, Any]:
    """Whether chunks are in the store, in this key's namespace. Counts as no use of them."""
    keys = await service.on_retrieval(_keys, service, tenant, body)
    store = service.engine.store
    found = await service.on_retrieval(lambda: [key in store for key in keys])
    return {"chunks": len(keys), "found": sum(found), "there": found}


@router.get("/cache/stats")
async def stats(service: ServiceArg, tenant: TenantArg) -> dict[str, Any]:
    """Of this key's namespace alone."""
    found = await service.on_retrieval(service.engine.store.stats, tenant.namespace)
    values: dict[str, Any] = found.to_dict()
    of_all_tenants = {"path", "cap_bytes", "evictions", "admissions_refused"}
    return {name: value for name, value in values.items() if name not in of_all_tenants}


async def _add(
    service: Service, tenant: Tenant, index: VectorIndex, documents: Sequence[DocumentIn], job: Job
) -> None:
    """One document at a time, so that questions get their turn on the thread that searches."""
    new: list[Passage] = []
    for document in documents:
        new += await service.on_retrieval(_add_one, service, index, document)
        job.documents += 1
    await _precompute(service, tenant, new, job)


def _add_one(service: Service, index: VectorIndex, document: DocumentIn) -> list[Passage]:
    return service.documents(index).add([document.document()])[1]


def _delete(service: Service, index: VectorIndex, doc_id: str) -> list[Passage]:
    deleted, passages = service.documents(index).delete(doc_id)
    if not deleted:
        raise NotFound(f"there is no document {doc_id!r} in this collection")
    return passages


async def _precompute(service: Service, tenant: Tenant, passages: Sequence[Passage], job: Job) -> None:
    found = await service.on_retrieval(service.engine.prompts.chunk_ids, passages)
    chunks = [ids for ids in dict.fromkeys(found) if ids]
    job.chunks = len(chunks)

    def done(n: int) -> None:
        job.computed = n

    blender = service.batch.blender(tenant.namespace)
    await asyncio.wrap_future(service.batch.background.precompute(blender, chunks, done))


def _chosen(service: Service, tenant: Tenant, body: CacheRequest) -> list[Passage]:
    """The passages that a cache request is about."""
    if body.passages is not None:
        if body.collection is not None or body.documents is not None:
            raise InputError("give either passages of your own, or a collection and its documents")
        return [Passage(p.text, p.title, p.id) for p in body.passages]
    _, index = service.collection(tenant, body.collection)
    if body.documents is None:
        return index.passages
    wanted = set(body.documents)
    return [p for p in index.passages if p.doc_id in wanted]


def _keys(service: Service, tenant: Tenant, body: CacheRequest) -> list[ChunkKey]:
    blender = service.batch.blender(tenant.namespace)
    chunks = service.engine.prompts.chunk_ids(_chosen(service, tenant, body))
    return [blender.key(ids) for ids in chunks if ids]
