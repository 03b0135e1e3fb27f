"""Paged lists: GET /v1/documents and GET /v1/cache/chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query

from blendserve.core import Passage
from blendserve.engine.prompt import shown
from blendserve.retrieve import VectorIndex
from blendserve.serve.access import CountedTenantArg, ServiceArg
from blendserve.serve.schema import Name
from blendserve.serve.service import Service
from blendserve.store import ChunkInfo, ChunkKey

SHOWN = 240  # characters of a passage
MOST = 200  # entries per page
AT_A_TIME = 500  # passages searched between two pauses

router = APIRouter(prefix="/v1", tags=["documents and cache"])

CollectionArg = Annotated[Name | None, Query(description="Collection; optional if there is only one.")]
SearchArg = Annotated[
    str, Query(max_length=512, description="Text that entries must contain; case does not matter.")
]
OffsetArg = Annotated[int, Query(ge=0, le=10**9, description="Number of entries to skip.")]
LimitArg = Annotated[int, Query(ge=1, le=MOST, description="Largest number of entries to return.")]


@router.get("/documents")
async def documents(
    service: ServiceArg,
    tenant: CountedTenantArg,
    collection: CollectionArg = None,
    search: SearchArg = "",
    offset: OffsetArg = 0,
    limit: LimitArg = 50,
) -> dict[str, Any]:
    """The documents of a collection whose id or title contains the text, with their numbers of passages."""
    name, index = service.collection(tenant, collection)

    def look() -> tuple[int, list[dict[str, Any]]]:
        found: Counter[tuple[str, str]] = Counter()
        for passage in _matching(service, index, search, lambda p: (p.doc_id, p.title)):
            found[passage.doc_id, passage.title] += 1
        page = list(found.items())[offset : offset + limit]
        return len(found), [{"id": id, "title": title, "passages": n} for (id, title), n in page]

    total, data = await service.on_retrieval(tenant, look, long=True)
    return {"collection": name, "total": total, "offset": offset, "data": data}


@router.get("/cache/chunks")
async def chunks(
    service: ServiceArg,
    tenant: CountedTenantArg,
    collection: CollectionArg = None,
    search: SearchArg = "",
    offset: OffsetArg = 0,
    limit: LimitArg = 50,
) -> dict[str, Any]:
    """The passages of a collection that contain the text, with the state of their KV in this key's namespace."""
    name, index = service.collection(tenant, collection)

    def look() -> tuple[int, list[tuple[Passage, ChunkKey, int]]]:
        found = list(_matching(service, index, search, lambda p: (p.id, shown(p))))
        return len(found), _keyed(service, tenant.namespace, found[offset : offset + limit])

    total, page = await service.on_retrieval(tenant, look, long=True)
    infos = await service.on_storage(tenant, service.engine.store.describe, [key for _, key, _ in page])
    places = service.engine.fetcher.locate(infos)
    data = [_entry(p, n_tokens, infos.get(key), places.get(key)) for p, key, n_tokens in page]
    return {"collection": name, "total": total, "offset": offset, "data": data}


def _keyed(
    service: Service, namespace: str, passages: Sequence[Passage]
) -> list[tuple[Passage, ChunkKey, int]]:
    blender = service.batch.blender(namespace)
    made = [(passage, service.engine.prompts.chunk(passage).ids) for passage in passages]
    return [(passage, blender.key(ids), len(ids)) for passage, ids in made]


def _entry(passage: Passage, n_tokens: int, info: ChunkInfo | None, place: str | None) -> dict[str, Any]:
    return {
        "id": passage.id,
        "doc_id": passage.doc_id,
        "title": passage.title,
        "text": passage.text[:SHOWN],
        "tokens": n_tokens,
        "stored": info is not None,
        "pinned": info is not None and info.pinned,
        "bytes": info.n_bytes if info else 0,
        "raw_bytes": info.raw_bytes if info else 0,
        "tier": place,
    }


def _matching(
    service: Service, index: VectorIndex, search: str, texts: Callable[[Passage], tuple[str, ...]]
) -> Iterator[Passage]:
    """The passages with the text in one of their fields. Questions run in between."""
    wanted = search.strip().casefold()
    for n, passage in enumerate(index.passages):
        if n % AT_A_TIME == 0:
            service.retrieval.give_way()
        if not wanted or any(wanted in text.casefold() for text in texts(passage)):
            yield passage
