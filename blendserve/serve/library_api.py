"""Documents and their KV: /v1/documents, /v1/jobs, /v1/cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query

from blendserve.core import Passage, TokenIds
from blendserve.engine.prompt import shown
from blendserve.errors import InputError, NotFound
from blendserve.retrieve import VectorIndex
from blendserve.serve.access import CountedTenantArg, ServiceArg, TenantArg
from blendserve.serve.jobs import Job
from blendserve.serve.keys import Tenant
from blendserve.serve.schema import CacheRequest, DocumentIn, DocumentsRequest, Name
from blendserve.serve.service import Service
from blendserve.store import ChunkKey

AT_A_TIME = 64  # passages whose tokens a job holds
SLICE = 1000  # keys that are looked up at a time

router = APIRouter(prefix="/v1", tags=["documents and cache"])


@router.post("/documents", status_code=202)
async def add(body: DocumentsRequest, service: ServiceArg, tenant: TenantArg) -> dict[str, Any]:
    """Add documents to a collection, or replace the ones with the same id. A job chunks, embeds and precomputes them."""
    tenant.require_writing()
    name, index = service.collection(tenant, body.collection)

    async def run(job: Job) -> None:
        await _add(service, tenant, index, body.documents, job)

    kind = f"documents into {name}"
    job = service.jobs.start(tenant.namespace, kind, run, given=len(body.documents))
    return {**job.to_dict(), **service.notices.in_extras(body)}


@router.get("/jobs")
async def jobs(service: ServiceArg, tenant: TenantArg) -> dict[str, Any]:
    """The jobs of this key's namespace, newest first."""
    return {"data": [job.to_dict() for job in service.jobs.of(tenant.namespace)]}


@router.get("/jobs/{job_id}")
async def job(job_id: str, service: ServiceArg, tenant: TenantArg) -> dict[str, Any]:
    """The progress of a job."""
    return service.jobs.get(tenant.namespace, job_id).to_dict()


@router.delete("/documents/{doc_id:path}")
async def delete(
    doc_id: str,
    service: ServiceArg,
    tenant: CountedTenantArg,
    collection: Annotated[Name | None, Query()] = None,
) -> dict[str, Any]:
    """Delete a document with its passages, vectors and KV."""
    tenant.require_writing()
    name, index = service.collection(tenant, collection)
    passages = await service.on_retrieval(tenant, _delete, service, index, doc_id, long=True)
    return {"id": doc_id, "collection": name, "deleted": True, "passages": len(passages)}


@router.post("/cache/warm", status_code=202)
async def warm(body: CacheRequest, service: ServiceArg, tenant: CountedTenantArg) -> dict[str, Any]:
    """Start a job that computes and pins the KV of chunks in this key's namespace."""
    passages = await service.on_retrieval(tenant, _chosen, service, tenant, body)

    async def run(job: Job) -> None:
        await _precompute(service, tenant, passages, job)

    job = service.jobs.start(tenant.namespace, "warm", run)
    return {**job.to_dict(), **service.notices.in_extras(body)}


@router.post("/cache/fetch", status_code=202)
async def fetch(body: CacheRequest, service: ServiceArg, tenant: CountedTenantArg) -> dict[str, Any]:
    """Start a job that copies the KV of chunks from the remote store into the local one."""
    keys, store = await _keys(service, tenant, body), service.engine.store

    def bring(some: Sequence[ChunkKey]) -> int:
        with store.reading() as snapshot:  # reading through the tiers copies a chunk into the local store
            snapshot.expect(some)
            return sum(snapshot.get(key) is not None for key in some)

    async def run(job: Job) -> None:
        job.chunks = len(keys)
        for at in range(0, len(keys), AT_A_TIME):
            job.computed += await service.on_storage(tenant, bring, keys[at : at + AT_A_TIME])

    job = service.jobs.start(tenant.namespace, "fetch", run)
    return {**job.to_dict(), **service.notices.in_extras(body)}


@router.post("/cache/pin")
async def pin(body: CacheRequest, service: ServiceArg, tenant: CountedTenantArg) -> dict[str, Any]:
    """Pin chunks: they are not evicted."""
    keys = await _keys(service, tenant, body)
    pinned = await _in_slices(service, tenant, service.engine.store.pin, keys)
    return {"chunks": len(keys), "pinned": pinned, **service.notices.in_extras(body)}


@router.post("/cache/unpin")
async def unpin(body: CacheRequest, service: ServiceArg, tenant: CountedTenantArg) -> dict[str, Any]:
    """Unpin chunks."""
    keys = await _keys(service, tenant, body)
    unpinned = await _in_slices(service, tenant, partial(service.engine.store.pin, pinned=False), keys)
    return {"chunks": len(keys), "unpinned": unpinned, **service.notices.in_extras(body)}


@router.post("/cache/lookup")
async def lookup(body: CacheRequest, service: ServiceArg, tenant: CountedTenantArg) -> dict[str, Any]:
    """Whether chunks are in the store, in this key's namespace. Does not count as a use of them."""
    keys, found = await _keys(service, tenant, body), list[bool]()

    def look_up(some: Sequence[ChunkKey]) -> int:
        there = service.engine.store.present(some)
        found.extend(key in there for key in some)
        return len(some)

    await _in_slices(service, tenant, look_up, keys)
    return {"chunks": len(keys), "found": sum(found), "there": found, **service.notices.in_extras(body)}


@router.post("/cache/delete")
async def forget(body: CacheRequest, service: ServiceArg, tenant: CountedTenantArg) -> dict[str, Any]:
    """Delete the KV of chunks from this key's namespace, pinned or not. Documents stay; KV is computed on demand."""
    tenant.require_writing()
    keys, store = await _keys(service, tenant, body), service.engine.store

    def delete(some: Sequence[ChunkKey]) -> int:
        service.engine.fetcher.forget(some)
        deleted = store.delete(some)
        service.engine.fetcher.forget(some)  # also what a request read in the meantime
        return deleted

    deleted = await _in_slices(service, tenant, delete, keys)
    return {"chunks": len(keys), "deleted": deleted, **service.notices.in_extras(body)}


@router.get("/cache/stats")
async def stats(service: ServiceArg, tenant: CountedTenantArg) -> dict[str, Any]:
    """Statistics of this key's namespace; for an admin's key also of the whole store, as `store`."""
    stats = service.engine.fetcher.stats
    found = await service.on_storage(tenant, stats, tenant.namespace)
    values: dict[str, Any] = found.to_dict()
    of_all_tenants = {"path", "cap_bytes", "evictions", "admissions_refused", "tables", "tables_bytes"}
    own = {name: value for name, value in values.items() if name not in of_all_tenants}
    if tenant.admin:
        whole = (await service.on_storage(tenant, stats)).to_dict()
        own["store"] = {name: value for name, value in whole.items() if name != "path"}
    return own


async def _add(
    service: Service, tenant: Tenant, index: VectorIndex, documents: Sequence[DocumentIn], job: Job
) -> None:
    """Add one document at a time; questions run between its parts. The index is saved once, at the end."""
    new, gone = list[Passage](), list[Passage]()

    def put(document: DocumentIn) -> None:
        _, more, less = service.documents(index).put([document.document()])
        new.extend(more)
        gone.extend(less)

    try:
        for document in documents:
            await service.on_retrieval(tenant, put, document, long=True)
            job.documents += 1
    finally:
        await service.on_retrieval(tenant, lambda: service.documents(index).settle(gone), long=True)
    await _precompute(service, tenant, new, job)


def _delete(service: Service, index: VectorIndex, doc_id: str) -> list[Passage]:
    deleted, passages = service.documents(index).delete(doc_id)
    if not deleted:
        raise NotFound(f"there is no document {doc_id!r} in this collection")
    return passages


async def _precompute(service: Service, tenant: Tenant, passages: Sequence[Passage], job: Job) -> None:
    """A few passages at a time, as the tokens of a collection may not fit in memory."""
    distinct = list({text: p for p in passages if (text := shown(p))}.values())
    job.chunks = len(distinct)
    blender = service.batch.blender(tenant.namespace)
    for start in range(0, len(distinct), AT_A_TIME):
        some = distinct[start : start + AT_A_TIME]
        chunks = await service.on_retrieval(tenant, _chunk_ids, service, some, long=True)

        def done(n: int, before: int = start) -> None:
            job.computed = before + n

        future = service.batch.background.precompute(blender, chunks, done, tenant.name)
        await asyncio.wrap_future(future)


def _chunk_ids(service: Service, passages: Sequence[Passage]) -> list[TokenIds]:
    """Raises InputError for a passage that no request could hold."""
    most, prompts = service.batch.pool.n_tokens, service.engine.prompts
    for passage in passages:
        if prompts.at_least((passage.title, passage.text), most):
            raise _too_long(passage, most)
    chunks = prompts.chunk_ids(passages)
    for passage, ids in zip(passages, chunks, strict=True):
        if len(ids) > most:
            raise _too_long(passage, most)
    return chunks


def _too_long(passage: Passage, most: int) -> InputError:
    return InputError(
        f"the passage that begins with {shown(passage)[:40]!r} has more than {most} tokens: shorten it"
    )


def _chosen(service: Service, tenant: Tenant, body: CacheRequest) -> list[Passage]:
    """The passages that a cache request selects."""
    if body.passages is not None:
        if any(choice is not None for choice in (body.collection, body.documents, body.ids)):
            raise InputError("send either passages, or a collection with documents or ids")
        return [Passage(p.text, p.title, p.id) for p in body.passages]
    _, index = service.collection(tenant, body.collection)
    found = index.passages
    if body.documents is not None:
        documents = set(body.documents)
        found = [p for p in found if p.doc_id in documents]
    if body.ids is not None:
        ids = set(body.ids)
        found = [p for p in found if p.id in ids]
    return found


async def _keys(service: Service, tenant: Tenant, body: CacheRequest) -> list[ChunkKey]:
    """The keys of the chunks that a cache request selects, without empty passages."""
    blender, prompts = service.batch.blender(tenant.namespace), service.engine.prompts

    def keys() -> list[ChunkKey]:
        chunks = map(prompts.chunk, _chosen(service, tenant, body))
        return [blender.key(chunk.ids) for chunk in chunks if len(chunk)]

    found: list[ChunkKey] = await service.on_retrieval(tenant, keys, long=True)
    return found


async def _in_slices(
    service: Service, tenant: Tenant, call: Callable[[Sequence[ChunkKey]], int], keys: Sequence[ChunkKey]
) -> int:
    """The sum of `call` over slices of the keys; other tenants have their turn between slices."""
    starts = range(0, len(keys), SLICE)
    return sum([await service.on_storage(tenant, call, keys[at : at + SLICE]) for at in starts])
