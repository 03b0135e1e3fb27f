"""Documents and the jobs that add them: /v1/documents, /v1/jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Query, Request

from blendserve.config import StoreConfig
from blendserve.core import Document, Passage, Steps, TokenIds
from blendserve.engine.documents import Documents
from blendserve.errors import InputError, NotFound, PermissionDenied
from blendserve.retrieve import VectorIndex
from blendserve.retrieve.tables import EmbeddedDocument
from blendserve.serve.auth import LimitedTenantDep, TenantDep, backend_of
from blendserve.serve.engine_client import LocalEngineClient
from blendserve.serve.fields import Body, Name
from blendserve.serve.jobs import Job, uncancelled
from blendserve.serve.schemas import DocumentsRequest
from blendserve.serve.uploads import FORM, SCHEMA, Upload, UploadRoute
from blendserve.store import ChunkKey

BATCH = 64  # passages whose tokens a job holds at a time, and chunks that it fetches in one call
PASSAGES_PER_STEP = 500  # that a list searches between two questions
MAX_PAGE = 200  # entries of a list

router = APIRouter(prefix="/v1", tags=["documents and cache"])

T = TypeVar("T")
ClientDep = Annotated[LocalEngineClient, Depends(backend_of)]


@dataclass(frozen=True)
class Caller:
    """The tenant of a request, whose calls run on the threads of the engine's client."""

    client: ClientDep
    tenant: LimitedTenantDep

    def find(self, collection: str | None) -> tuple[str, VectorIndex]:
        """Return a collection by name, or the tenant's only one. Raises InputError, NotFound."""
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
        """Start a job -> its state, and the ignored fields of the request. index: the collection that saves the job."""
        job = self.client.jobs.start(self.tenant.namespace, kind, work, total_documents, index)
        return {**job.to_dict(), **self.client.notices.as_extras(body)}

    def documents(self, index: VectorIndex) -> Documents:
        """Return the documents of a collection, for changes that reach their KV in every key's namespace."""
        client = self.client
        others = [other for other in client.collections.indexes.values() if other is not index]
        namespaces = client.batch.namespaces | client.keys.namespaces()
        writers = [client.batch.blender(namespace).writer for namespace in namespaces]
        return Documents(index, client.engine.prompts, writers, others)

    async def precompute(self, passages: Sequence[Passage], job: Job) -> None:
        """Compute and pin KV in batches, as the tokens of a collection may not fit in memory."""
        distinct = list({text: p for p in passages if (text := p.chunk_text)}.values())
        job.chunks = len(distinct)
        batch = self.client.batch
        writer = batch.blender(self.tenant.namespace).writer

        async def compute(ids: TokenIds, on_leased: Literal["skip", "compute"]) -> bool:
            """Compute a chunk in a task of its own, as a request waits for one task -> whether another process has it."""
            task = batch.in_background(writer.precompute_one(ids, on_leased), self.tenant.name)
            is_left = await asyncio.wrap_future(task)
            job.computed += not is_left
            return is_left

        for some in in_batches(distinct, BATCH):
            chunks = await self.on_index(self.chunk_ids, some)
            limit = self.client.engine.model.decoder.context_limit
            for passage, ids in zip(some, chunks, strict=True):
                if len(ids) > limit:
                    raise InputError(
                        f"a passage has {len(ids):,} tokens, and the model's context has {limit:,}: send the one that "
                        f"begins with {passage.chunk_text[:40]!r} in parts",
                        setting="passages",
                    )
            expected = {writer.key(ids): writer.expected_bytes(len(ids)) for ids in chunks if ids}
            await self.on_store(self.check_quota, expected)
            left = [ids for ids in chunks if await compute(ids, "skip")]
            for ids in left:
                await compute(ids, "compute")

    def check_quota(self, expected: Mapping[ChunkKey, int]) -> list[ChunkKey]:
        """Return those of the chunks that are stored. Raises PermissionDenied if the namespace may not pin all of them.

        So keys other than an admin's leave room for each other, and for chunks that are not pinned. expected: bytes of
        each chunk, 0 for one that is pinned only if it is stored. Concurrent jobs may exceed the quota by a batch each.
        """
        store = self.client.engine.store
        namespace = self.tenant.namespace
        infos = store.describe(expected)
        if self.tenant.admin:
            return [*infos]
        own = store.stats(namespace).pinned_bytes
        others = store.stats().pinned_bytes - own
        quota = round(StoreConfig.pinned_share * max(0, store.cap_bytes - others))
        more = 0
        for key, n_bytes in expected.items():
            if key not in infos:
                more += n_bytes
            elif not infos[key].pinned:
                more += infos[key].n_bytes
        if more and own + more > quota:
            raise PermissionDenied(
                f"this key's namespace has pinned {own:,} bytes, and {more:,} more exceed its quota of {quota:,}: unpin "
                "or delete chunks, or let an admin warm them"
            )
        return [*infos]

    def chunk_ids(self, passages: Sequence[Passage]) -> Steps[list[TokenIds]]:
        """Return the token ids of passages. Raises InputError for a passage that no request could hold."""
        limit = self.client.max_tokens
        prompts = self.client.engine.prompts
        chunks: list[TokenIds] = []
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
    """The parameters of a list: which entries, and which page of them."""

    collection: Annotated[Name | None, Query(description="Collection; optional if there is only one.")] = None
    search: Annotated[
        str, Query(max_length=512, description="Text that entries must contain; case does not matter.")
    ] = ""
    offset: Annotated[int, Query(ge=0, le=10**9, description="Number of entries to skip.")] = 0
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="Largest number of entries to return.")] = 50

    def page(self, entries: Sequence[T]) -> Sequence[T]:
        """Return the entries of this page."""
        return entries[self.offset : self.offset + self.limit]

    def answer(self, name: str, total: int, data: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the body of the response. name: of the collection. data: entries of this page."""
        return {"collection": name, "total": total, "offset": self.offset, "data": data}

    def matching(
        self, index: VectorIndex, fields: Callable[[Passage], tuple[str, ...]]
    ) -> Steps[list[Passage]]:
        """Return the passages that contain the searched text in one of these fields."""
        text = self.search.strip().casefold()
        found: list[Passage] = []
        for some in index.scan(PASSAGES_PER_STEP, self.tenant.selection):
            yield
            found += [p for p in some if not text or any(text in field.casefold() for field in fields(p))]
        return found


class Adding:
    """Adds documents to a collection in a job, one at a time; questions run between the parts of each."""

    def __init__(self, caller: Caller, collection: str | None) -> None:
        """Raises InputError, NotFound."""
        self._caller = caller
        self._name, self._index = caller.find(collection)
        self._documents = caller.documents(self._index)
        self._passages: list[Passage] = []

    def start(self, add_all: Callable[[Job], Awaitable[None]], total_documents: int) -> Job:
        """Start a job that adds all documents, then computes their KV. Raises RateLimited."""

        async def work(job: Job) -> None:
            await add_all(job)
            await self._caller.precompute(self._passages, job)

        jobs = self._caller.client.jobs
        namespace = self._caller.tenant.namespace
        return jobs.start(namespace, f"documents into {self._name}", work, total_documents, self._index)

    async def add(self, document: Document, job: Job) -> None:
        """Embed a document, and save it with the job's progress in one transaction."""
        embedded = await self._caller.on_index(self._index.embed_steps, [document])
        self._passages += await uncancelled(asyncio.to_thread(self._save, embedded, job))

    def _save(self, embedded: Sequence[EmbeddedDocument], job: Job) -> list[Passage]:
        """Save a document -> the passages that the index did not have."""
        added = self._documents.commit(embedded, asdict(replace(job, documents=job.documents + 1)))
        job.documents += 1
        return added.passages


CallerDep = Annotated[Caller, Depends()]
ListDep = Annotated[ListQuery, Depends()]


async def add_files(request: Request, client: ClientDep, tenant: TenantDep) -> dict[str, Any]:
    """Add the documents of uploaded files. A job reads them, then continues as `add_documents`."""
    tenant.require_write_access()
    upload = await Upload.receive(request)
    try:
        adding = Adding(Caller(client, tenant), upload.collection)
        return adding.start(
            partial(upload.read, turn=client.jobs.reading, add=adding.add), len(upload.files)
        ).to_dict()
    except BaseException:
        upload.close()
        raise


router.add_api_route(
    "/documents",
    add_files,
    methods=["POST"],
    status_code=202,
    include_in_schema=False,
    route_class_override=UploadRoute,
)


@router.post(
    "/documents", status_code=202, openapi_extra={"requestBody": {"content": {FORM: {"schema": SCHEMA}}}}
)
async def add_documents(body: DocumentsRequest, client: ClientDep, tenant: TenantDep) -> dict[str, Any]:
    """Add documents to a collection, or replace the ones with the same id. A job chunks, embeds and precomputes them."""
    tenant.require_write_access()
    adding = Adding(Caller(client, tenant), body.collection)

    async def add_all(job: Job) -> None:
        for document in body.documents:
            await adding.add(document.document(), job)

    job = adding.start(add_all, len(body.documents))
    return {**job.to_dict(), **client.notices.as_extras(body)}


@router.get("/jobs")
async def list_jobs(client: ClientDep, tenant: TenantDep) -> dict[str, Any]:
    """List the jobs of this key's namespace, newest first."""
    return {"data": [job.to_dict() for job in client.jobs.of(tenant.namespace)]}


@router.get("/jobs/{job_id}")
async def get_job(job_id: str, client: ClientDep, tenant: TenantDep) -> dict[str, Any]:
    """Return the progress of a job."""
    return client.jobs.get(tenant.namespace, job_id).to_dict()


@router.get("/documents")
async def list_documents(query: ListDep) -> dict[str, Any]:
    """List the documents of a collection whose id or title contains the text, with their numbers of passages."""
    name, index = query.find(query.collection)
    text = query.search.strip().casefold()

    def find() -> Steps[list[tuple[str, str, int]]]:
        yield
        rows = index.documents(query.tenant.selection)
        return [row for row in rows if not text or any(text in part.casefold() for part in row[:2])]

    found = await query.on_index(find)
    data = [{"id": id, "title": title, "passages": n} for id, title, n in query.page(found)]
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


def in_batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Cut a sequence into parts of at most `size` items."""
    return (items[at : at + size] for at in range(0, len(items), size))
