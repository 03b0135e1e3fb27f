"""Routes of the stored KV of chunks: /v1/cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from blendserve.core import Passage, Steps, TokenIds
from blendserve.engine.text_forms import in_forms
from blendserve.errors import InputError
from blendserve.retrieve import VectorIndex
from blendserve.serve.auth import LimitedTenantDep
from blendserve.serve.documents import BATCH, Caller, CallerDep, ClientDep, ListDep, in_batches
from blendserve.serve.jobs import Job
from blendserve.serve.schemas import CacheRequest
from blendserve.store import ChunkKey

KEYS_PER_CALL = 1000  # chunks per call to the store; between two calls, other tenants have their turn
EXCERPT = 240  # characters of a passage in a list

router = APIRouter(prefix="/v1", tags=["documents and cache"])


@dataclass(frozen=True)
class CacheSelection(Caller):
    """The chunks that a cache request selects, in the namespace of its key."""

    client: ClientDep  # once more, as FastAPI resolves names in the module of a class
    tenant: LimitedTenantDep
    body: CacheRequest

    def passages(self) -> list[Passage]:
        """Return the chosen passages in all chosen forms; call it on the thread of the indexes.

        Raises InputError, NotFound.
        """
        return [each for passage in self._plain() for each in in_forms(passage, self.body.forms)]

    def _plain(self) -> list[Passage]:
        body = self.body
        if body.passages is not None:
            if any(choice is not None for choice in (body.collection, body.documents, body.ids)):
                raise InputError("send either passages, or a collection with documents or ids")
            return [passage.passage() for passage in body.passages]
        index = self.find(body.collection)[1]
        chosen = index.passages if body.documents is None else index.passages_of(set(body.documents))
        ids = None if body.ids is None else set(body.ids)
        if self.tenant.tags is not None:
            seen = {row[0] for row in index.documents(self.tenant.selection)}
            chosen = [p for p in chosen if p.doc_id in seen]
        return [p for p in chosen if ids is None or p.id in ids]

    @property
    def index(self) -> VectorIndex | None:
        """Return the collection of the chunks; None for passages in the request."""
        return None if self.body.passages is not None else self.find(self.body.collection)[1]

    async def keys(self) -> list[ChunkKey]:
        """Return the keys of the chunks, without empty passages."""
        blender = self.client.batch.blender(self.tenant.namespace)
        prompts = self.client.engine.prompts

        def find() -> Steps[list[ChunkKey]]:
            keys = list[ChunkKey]()
            for passage in self.passages():
                yield
                if ids := prompts.chunk(passage).ids:
                    keys.append(blender.key(ids))
            return keys

        return await self.on_index(find)

    async def call(self, name: str, call: Callable[[Sequence[ChunkKey]], int]) -> dict[str, Any]:
        """Call the store with the chunks -> the number of chunks and, as `name`, the sum of the results."""
        keys = await self.keys()
        n = sum([await self.on_store(call, some) for some in in_batches(keys, KEYS_PER_CALL)])
        return {"chunks": len(keys), name: n, **self.client.notices.as_extras(self.body)}


SelectionDep = Annotated[CacheSelection, Depends()]


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
        for some in in_batches(keys, BATCH):
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
    """Look up which chunks are in the store, in this key's namespace. A lookup does not count as a use."""
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
    """List the passages of a collection that contain the text, with the state of their KV in this key's namespace."""
    name, index = query.find(query.collection)
    engine = query.client.engine
    blender = query.client.batch.blender(query.tenant.namespace)

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
        data.append(
            {
                "id": passage.id,
                "doc_id": passage.doc_id,
                "title": passage.title,
                "text": passage.text[:EXCERPT],
                "tokens": len(ids),
                "stored": key in tiers,
                "tier": tiers.get(key),
                "pinned": info is not None and info.pinned,
                "bytes": info.n_bytes if info else 0,
                "raw_bytes": info.raw_bytes if info else 0,
            }
        )
    return query.answer(name, total, data)


@router.get("/cache/stats")
async def stats(caller: CallerDep) -> dict[str, Any]:
    """Return statistics of this key's namespace; for an admin's key also those of the whole store, as `store`."""
    read = caller.client.engine.fetcher.stats
    own: dict[str, Any] = (await caller.on_store(read, caller.tenant.namespace)).to_dict()
    for of_all_tenants in ("path", "cap_bytes", "evictions", "admissions_refused", "tables", "tables_bytes"):
        own.pop(of_all_tenants, None)
    if caller.tenant.admin:
        own["store"] = (await caller.on_store(read)).to_dict()
        own["store"].pop("path", None)
    return own
