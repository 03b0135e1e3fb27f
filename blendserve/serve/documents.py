"""Documents and their KV: /v1/documents, /v1/jobs, /v1/cache."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Query

from blendserve.config import StoreConfig
from blendserve.core import Passage, Steps, TokenIds
from blendserve.engine.documents import Documents
from blendserve.errors import InputError, NotFound, PermissionDenied
from blendserve.retrieve import VectorIndex
from blendserve.retrieve.tables import EmbeddedDocument
from blendserve.serve.auth import LimitedTenantDep, TenantDep, backend_of
from blendserve.serve.engine_client import LocalEngineClient
from blendserve.serve.fields import Body, Name
from blendserve.serve.jobs import Job, uncancelled
from blendserve.serve.schemas import CacheRequest, DocumentsRequest
from blendserve.store import ChunkKey
from blendserve.store.valkey import ValkeyStore

BATCH = 64  # passages whose tokens a job holds, and chunks that it fetches in one call
KEYS_PER_CALL = 1000  # between two calls, other tenants have their turn
PASSAGES_PER_STEP = 500  # searched before questions may run
EXCERPT = 240  # characters of a passage in a list
MAX_PAGE = 200  # entries

router = APIRouter(prefix="/v1", tags=["documents and cache"])

T = TypeVar("T")
ClientDep = Annotated[LocalEngineClient, Depends(backend_of)]


@dataclass(frozen=True)
class Caller:
    """The tenant of a request, whose calls run on the threads of the engine's client."""

    client: ClientDep
    tenant: LimitedTenantDep

    def find(self, collection: str | None) -> tuple[str, VectorIndex]:
        """A collection by name, or the tenant's only one. Raises InputError, NotFound."""
        return self.client.collections.find(self.tenant, collection)

    async def on_index(self, call: Callable[..., Steps[T]], *args: Any) -> T:
        """Run a call on the thread of the indexes; questions run between its steps."""

        def steps() -> Steps[T]:
            return (yield from call(*args))

        return await asyncio.wrap_future(self.client.collections.executor.submit(self.tenant.name, steps()))

    async def on_store(self, call: Callable[..., T], *args: Any) -> T:
        """Run a call on the thread of the store."""
        return await self.client.storage.run(self.tenant.name, call, *args)

    def start_job(
        self,
        body: Body,
        kind: str,
        work: Callable[[Job], Awaitable[None]],
        total_documents: int = 0,
        index: VectorIndex | None = None,
    ) -> dict[str, Any]:
        """Start a job -> its state, and the fields of the request that are ignored. index: that has its row."""
        job = self.client.jobs.start(self.tenant.namespace, kind, work, total_documents, index)
        return {**job.to_dict(), **self.client.notices.as_extras(body)}

    def documents(self, index: VectorIndex) -> Documents:
        """The documents of a collection, whose KV may be in every key's namespace."""
        client = self.client
        others = [other for other in client.collections.indexes.values() if other is not index]
        namespaces = client.batch.namespaces | client.keys.namespaces()
        writers = [client.batch.blender(namespace).writer for namespace in namespaces]
        return Documents(index, client.engine.prompts, writers, others)

    async def precompute(self, passages: Sequence[Passage], job: Job) -> None:
        """Compute and pin KV in batches, as the tokens of a collection may not fit in memory."""
        distinct = list({text: p for p in passages if (text := p.chunk_text)}.values())
        job.chunks = len(distinct)
        batch, writer = self.client.batch, self.client.batch.blender(self.tenant.namespace).writer

        async def compute(ids: TokenIds, on_leased: Literal["skip", "compute"]) -> bool:
            """Whether the chunk is left to another process. One task each: a request never waits for more than one."""
            task = batch.in_background(writer.precompute_one(ids, on_leased), self.tenant.name)
            is_left = await asyncio.wrap_future(task)
            job.computed += not is_left
            return is_left

        for some in _batches(distinct, BATCH):
            chunks = await self.on_index(self.chunk_ids, some)
            expected = {writer.key(ids): writer.expected_bytes(len(ids)) for ids in chunks if ids}
            await self.on_store(self.check_quota, expected)
            left = [ids for ids in chunks if await compute(ids, "skip")]
            for ids in left:
                await compute(ids, "compute")

    def check_quota(self, expected: Mapping[ChunkKey, int]) -> list[ChunkKey]:
        """The stored ones of these chunks. Raises PermissionDenied if the namespace may not pin all of them.

        So keys other than an admin's leave room for each other, and for chunks that are not pinned. expected: bytes of
        each chunk, 0 for one that is pinned only if it is stored. A full quota may be exceeded by a batch of each job.
        """
        store, namespace = self.client.engine.store, self.tenant.namespace
        infos = store.describe(expected)
        if self.tenant.admin:
            return [*infos]
        own, all_pins = store.stats(namespace).pinned_bytes, store.stats().pinned_bytes
        others = 0 if isinstance(store, ValkeyStore) else all_pins - own  # whose cap is of each namespace
        quota = round(StoreConfig.pinned_share * max(0, store.cap_bytes - others))
        more = sum(
            infos[key].n_bytes * (not infos[key].pinned) if key in infos else n_bytes
            for key, n_bytes in expected.items()
        )
        if more and own + more > quota:
            raise PermissionDenied(
                f"this key's namespace has pinned {own:,} bytes, and {more:,} more exceed its quota of {quota:,}: unpin "
                "or delete chunks, or let an admin warm them"
            )
        return [*infos]

    def chunk_ids(self, passages: Sequence[Passage]) -> Steps[list[TokenIds]]:
        """Raises InputError for a passage that no request could hold."""
        limit, prompts, chunks = self.client.max_tokens, self.client.engine.prompts, list[TokenIds]()
        for passage in passages:
            yield
            least = prompts.at_least((passage.title, passage.text), limit)  # without tokenising all of it
            ids = () if least else prompts.chunk(passage).ids
            if max(least, len(ids)) > limit:
                start = repr(passage.chunk_text[:40])
                raise InputError(
                    f"the passage that begins with {start} has more than {limit} tokens: shorten it"
                )
            chunks.append(ids)
        return chunks


@dataclass(frozen=True)
class ListQuery(Caller):
    """The query of a list: which entries, and which page of them."""

    collection: Annotated[Name | None, Query(description="Collection; optional if there is only one.")] = None
    search: Annotated[
        str, Query(max_length=512, description="Text that entries must contain; case does not matter.")
    ] = ""
    offset: Annotated[int, Query(ge=0, le=10**9, description="Number of entries to skip.")] = 0
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="Largest number of entries to return.")] = 50

    def page(self, entries: Sequence[T]) -> Sequence[T]:
        """The entries of this page."""
        return entries[self.offset : self.offset + self.limit]

    def answer(self, name: str, total: int, data: list[dict[str, Any]]) -> dict[str, Any]:
        """The body of a response. name: of the collection. data: entries of this page."""
        return {"collection": name, "total": total, "offset": self.offset, "data": data}

    def matching(
        self, index: VectorIndex, fields: Callable[[Passage], tuple[str, ...]]
    ) -> Steps[list[Passage]]:
        """The passages with the text in one of their fields."""
        text, found = self.search.strip().casefold(), list[Passage]()
        for some in index.scan(PASSAGES_PER_STEP):
            yield
            found += [p for p in some if not text or any(text in field.casefold() for field in fields(p))]
        return found


@dataclass(frozen=True)
class CacheSelection(Caller):
    """The chunks that a cache request selects, in the namespace of its key."""

    body: CacheRequest

    def passages(self) -> list[Passage]:
        """Return the chosen passages; call it on the thread of the indexes. Raises InputError, NotFound."""
        body = self.body
        if body.passages is not None:
            if any(choice is not None for choice in (body.collection, body.documents, body.ids)):
                raise InputError("send either passages, or a collection with documents or ids")
            return [passage.passage() for passage in body.passages]
        index = self.find(body.collection)[1]
        chosen = index.passages if body.documents is None else index.passages_of(set(body.documents))
        ids = None if body.ids is None else set(body.ids)
        return [p for p in chosen if ids is None or p.id in ids]

    @property
    def index(self) -> VectorIndex | None:
        """The collection that the chunks are of; None for passages of the request's own."""
        return None if self.body.passages is not None else self.find(self.body.collection)[1]

    async def keys(self) -> list[ChunkKey]:
        """The keys of the chunks, without empty passages."""
        blender, prompts = self.client.batch.blender(self.tenant.namespace), self.client.engine.prompts

        def find() -> Steps[list[ChunkKey]]:
            keys = list[ChunkKey]()
            for passage in self.passages():
                yield
                if ids := prompts.chunk(passage).ids:
                    keys.append(blender.key(ids))
            return keys

        return await self.on_index(find)

    async def call(self, name: str, call: Callable[[Sequence[ChunkKey]], int]) -> dict[str, Any]:
        """Call the store for the chunks -> their number and, as `name`, the sum of the calls."""
        keys = await self.keys()
        n = sum([await self.on_store(call, some) for some in _batches(keys, KEYS_PER_CALL)])
        return {"chunks": len(keys), name: n, **self.client.notices.as_extras(self.body)}


CallerDep = Annotated[Caller, Depends()]
ListDep = Annotated[ListQuery, Depends()]
SelectionDep = Annotated[CacheSelection, Depends()]


# Documents and jobs


@router.post("/documents", status_code=202)
async def add_documents(body: DocumentsRequest, client: ClientDep, tenant: TenantDep) -> dict[str, Any]:
    """Add documents to a collection, or replace the ones with the same id. A job chunks, embeds and precomputes them."""
    tenant.require_write_access()
    caller = Caller(client, tenant)
    name, index = caller.find(body.collection)
    documents = caller.documents(index)

    def save(embedded: Sequence[EmbeddedDocument], job: Job) -> list[Passage]:
        """Save a document, and that the job has done so, in one transaction -> passages that the index did not have."""
        added = documents.commit(embedded, asdict(replace(job, documents=job.documents + 1)))
        job.documents += 1
        return added.passages

    async def work(job: Job) -> None:
        """Embed and save one document at a time; questions run between its parts."""
        passages = list[Passage]()
        for document in body.documents:
            embedded = await caller.on_index(index.embed_steps, [document.document()])
            passages += await uncancelled(asyncio.to_thread(save, embedded, job))
        await caller.precompute(passages, job)

    return caller.start_job(body, f"documents into {name}", work, len(body.documents), index)


@router.get("/jobs")
async def list_jobs(client: ClientDep, tenant: TenantDep) -> dict[str, Any]:
    """The jobs of this key's namespace, newest first."""
    return {"data": [job.to_dict() for job in client.jobs.of(tenant.namespace)]}


@router.get("/jobs/{job_id}")
async def get_job(job_id: str, client: ClientDep, tenant: TenantDep) -> dict[str, Any]:
    """The progress of a job."""
    return client.jobs.get(tenant.namespace, job_id).to_dict()


@router.get("/documents")
async def list_documents(query: ListDep) -> dict[str, Any]:
    """The documents of a collection whose id or title contains the text, with their numbers of passages."""
    name, index = query.find(query.collection)

    passages = await query.on_index(query.matching, index, lambda p: (p.doc_id, p.title))
    found = Counter((passage.doc_id, passage.title) for passage in passages)
    page = query.page(list(found.items()))
    data = [{"id": id, "title": title, "passages": n} for (id, title), n in page]
    return query.answer(name, len(found), data)


@router.delete("/documents/{doc_id:path}")
async def delete_document(
    doc_id: str, caller: CallerDep, collection: Annotated[Name | None, Query()] = None
) -> dict[str, Any]:
    """Delete a document with its passages, vectors and KV."""
    caller.tenant.require_write_access()
    name, index = caller.find(collection)
    documents = caller.documents(index)
    n, passages = await uncancelled(asyncio.to_thread(documents.delete, doc_id))
    if not n:
        raise NotFound(f"there is no document {doc_id!r} in this collection")
    return {"id": doc_id, "collection": name, "deleted": True, "passages": len(passages)}


# KV of chunks


@router.post("/cache/warm", status_code=202)
async def warm(chosen: SelectionDep) -> dict[str, Any]:
    """Start a job that computes and pins the KV of chunks in this key's namespace."""
    chosen.tenant.require_write_access()
    passages = await chosen.client.collections.executor.run(chosen.tenant.name, chosen.passages)
    return chosen.start_job(chosen.body, "warm", partial(chosen.precompute, passages), index=chosen.index)


@router.post("/cache/fetch", status_code=202)
async def fetch(chosen: SelectionDep) -> dict[str, Any]:
    """Start a job that copies the KV of chunks from the remote store into the local one."""
    chosen.tenant.require_write_access()
    keys = await chosen.keys()

    async def work(job: Job) -> None:
        job.chunks = len(keys)
        for some in _batches(keys, BATCH):
            job.computed += await chosen.on_store(chosen.client.engine.fetcher.copy_here, some)

    return chosen.start_job(chosen.body, "fetch", work, index=chosen.index)


@router.post("/cache/pin")
async def pin(chosen: SelectionDep) -> dict[str, Any]:
    """Pin chunks: they are not evicted."""
    chosen.tenant.require_write_access()

    def pin_some(keys: Sequence[ChunkKey]) -> int:
        return chosen.client.engine.store.pin(chosen.check_quota(dict.fromkeys(keys, 0)))

    return await chosen.call("pinned", pin_some)


@router.post("/cache/unpin")
async def unpin(chosen: SelectionDep) -> dict[str, Any]:
    """Unpin chunks."""
    chosen.tenant.require_write_access()
    return await chosen.call("unpinned", partial(chosen.client.engine.store.pin, pinned=False))


@router.post("/cache/lookup")
async def lookup(chosen: SelectionDep) -> dict[str, Any]:
    """Whether chunks are in the store, in this key's namespace. Does not count as a use of them."""
    is_cached = list[bool]()

    def look_up(keys: Sequence[ChunkKey]) -> int:
        cached = chosen.client.engine.fetcher.locate(keys, remote=True)
        is_cached.extend(key in cached for key in keys)
        return sum(key in cached for key in keys)

    found = await chosen.call("found", look_up)
    return {**found, "cached": is_cached}


@router.post("/cache/delete")
async def delete_kv(chosen: SelectionDep) -> dict[str, Any]:
    """Delete the KV of chunks from this key's namespace, pinned or not. Documents stay; KV is computed on demand."""
    chosen.tenant.require_write_access()
    engine = chosen.client.engine

    def delete(keys: Sequence[ChunkKey]) -> int:
        engine.fetcher.forget(keys)
        deleted = engine.store.delete(keys)
        engine.fetcher.forget(keys)  # also copies that a request made in the meantime
        return deleted

    return await chosen.call("deleted", delete)


@router.get("/cache/chunks")
async def list_chunks(query: ListDep) -> dict[str, Any]:
    """The passages of a collection that contain the text, with the state of their KV in this key's namespace."""
    name, index = query.find(query.collection)
    engine, blender = query.client.engine, query.client.batch.blender(query.tenant.namespace)

    def look_up() -> Steps[tuple[int, list[tuple[Passage, TokenIds, ChunkKey]]]]:
        found = yield from query.matching(index, lambda p: (p.id, p.chunk_text))
        page = [(passage, engine.prompts.chunk(passage).ids) for passage in query.page(found)]
        return len(found), [(passage, ids, blender.key(ids)) for passage, ids in page]

    total, page = await query.on_index(look_up)
    keys = [key for *_, key in page]
    infos = await query.on_store(engine.store.describe, keys)
    tiers = await query.on_store(partial(engine.fetcher.locate, remote=True), keys)
    data = []
    for passage, ids, key in page:
        info = infos.get(key)
        names = {"id": passage.id, "doc_id": passage.doc_id, "title": passage.title}
        text = {"text": passage.text[:EXCERPT], "tokens": len(ids)}
        state = {"stored": key in tiers, "tier": tiers.get(key), "pinned": info is not None and info.pinned}
        sizes = {"bytes": info.n_bytes if info else 0, "raw_bytes": info.raw_bytes if info else 0}
        data.append({**names, **text, **state, **sizes})
    return query.answer(name, total, data)


@router.get("/cache/stats")
async def stats(caller: CallerDep) -> dict[str, Any]:
    """Statistics of this key's namespace; for an admin's key also of the whole store, as `store`."""
    read = caller.client.engine.fetcher.stats
    own: dict[str, Any] = (await caller.on_store(read, caller.tenant.namespace)).to_dict()
    for of_all_tenants in ("path", "cap_bytes", "evictions", "admissions_refused", "tables", "tables_bytes"):
        own.pop(of_all_tenants, None)
    if caller.tenant.admin:
        own["store"] = (await caller.on_store(read)).to_dict()
        own["store"].pop("path", None)
    return own


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[at : at + size] for at in range(0, len(items), size))
