"""What was fetched of a prompt. Each method asks for what it can use; empty chunks are not asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from blendserve.blend.layout import Run
from blendserve.blend.near import NearDuplicates
from blendserve.config import Method
from blendserve.core import ChunkKV, Prompt, Unusable
from blendserve.errors import CorruptRecord
from blendserve.fetch.fetcher import ChunkRequest, Fetch
from blendserve.store import ChunkKey, ChunkView
from blendserve.store.base import Miss
from blendserve.store.request_reads import LOCAL

CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class Found:
    """Stored views of a prompt's prefix and chunks, None where there is none to use."""

    prefix: ChunkView | None
    chunks: tuple[ChunkView | None, ...]
    looked_for: tuple[int, ...] = ()  # chunks by number
    unusable: tuple[Unusable, ...] = ()  # of those, the ones that may be there all the same
    tier_of: Mapping[int, str] = field(default_factory=dict)  # where each chunk that is there is read from
    prefix_tier: str = ""
    near: Mapping[int, tuple[Run, ...]] = field(
        default_factory=dict
    )  # what others have of chunks that are not there
    computed: Mapping[int, ChunkKV] = field(default_factory=dict)  # while others were on their way
    looked_near: Mapping[int, str] = field(
        default_factory=dict
    )  # chunks that donors were looked for, and why one of those could not be used, "" where none was refused

    @property
    def corrupt(self) -> int:
        """How many are damaged."""
        return sum(found.kind == CORRUPT for found in self.unusable)

    @property
    def tiers(self) -> Counter[str]:
        """How many chunks are read from where."""
        return Counter(self.tier_of.values())

    @property
    def hits(self) -> int:
        return sum(self.chunks[i] is not None for i in self.looked_for)

    def only(self, method: Method, exact_first: bool) -> Found:
        """What is left of a full search when a method uses less of it."""
        if method == "full":
            return replace(self, prefix=None, chunks=(None,) * len(self.chunks), near={}, looked_near={})
        if method == "prefix":
            first = next((i for i, view in enumerate(self.chunks) if i in self.looked_for), None)
            keep = first if exact_first else None
            kept = tuple(v if i == keep else None for i, v in enumerate(self.chunks))
            return replace(self, chunks=kept, near={}, looked_near={})
        return self


def supposed(prompt: Prompt, which: Iterable[int], prefix: bool = True) -> Found:
    """As if the chunks `which` were found, and the prefix: to lay out, not to read."""
    there, some = set(which), cast(ChunkView, object())
    chunks = tuple(some if i in there else None for i in range(len(prompt.chunks)))
    return Found(some if prefix else None, chunks, tuple(there))


def nothing(prompt: Prompt) -> Found:
    """Of a method that fetches nothing."""
    return Found(None, (None,) * len(prompt.chunks))


def look_up(
    fetch: Fetch,
    prompt: Prompt,
    keys: Mapping[int, ChunkKey],
    prefix_key: ChunkKey,
    n_layers: int,
    prefix: ChunkView | None = None,
) -> Found:
    """The fetched prefix and chunks. keys: by number of the chunk. prefix: where the caller has its KV."""
    for key in (*keys.values(), prefix_key):
        if (view := fetch.views.get(key)) and view.n_layers != n_layers:
            fetch.drop(CorruptRecord(key, "is not the chunk that its key names"))
    misses = {i: fetch.misses[key] for i, key in keys.items() if key in fetch.misses}
    return Found(
        prefix or fetch.views.get(prefix_key),
        tuple(fetch.views.get(keys[i]) if i in keys else None for i in range(len(prompt.chunks))),
        tuple(keys),
        tuple(Unusable(i, miss.kind, miss.detail) for i, miss in misses.items() if miss.kind != "absent"),
        {i: fetch.source[key] for i, key in keys.items() if key in fetch.source},
        LOCAL if prefix else fetch.source.get(prefix_key, ""),
        computed={i: fetch.computed[key] for i, key in keys.items() if key in fetch.computed},
    )


def look_near(
    fetch: Fetch,
    prompt: Prompt,
    found: Found,
    donors: NearDuplicates,
    n_layers: int,
    saved_per_token: float | None,
) -> Found:
    """With the runs that stored chunks have of those that are missing. Raises StoreError.

    saved_per_token: seconds that a donor's token saves; None: read every donor.
    """
    why: dict[ChunkKey, str] = {}

    def views(asked: Mapping[ChunkKey, int]) -> dict[ChunkKey, ChunkView]:
        saved = {key: None if saved_per_token is None else n * saved_per_token for key, n in asked.items()}
        fetch.extend([ChunkRequest(key, n, saved[key]) for key, n in asked.items()])
        why.update({key: _why(fetch.misses[key]) for key in asked if key in fetch.misses})
        there = {key: fetch.views[key] for key in asked if key in fetch.views}
        return {key: view for key, view in there.items() if view.n_layers == n_layers}

    missed = {i: prompt.chunks[i].ids for i in found.looked_for if found.chunks[i] is None}
    looked = donors.find(missed, views) if missed else {}
    return replace(
        found,
        near={i: near.runs for i, near in looked.items() if near.runs},
        looked_near={
            i: "; ".join(why.get(key) or "it has gone" for key in near.unavailable)
            for i, near in looked.items()
        },
    )


def wanted(prompt: Prompt, method: Method, exact_first: bool) -> list[int]:
    """Which chunks a method asks the store for; prefix caching, only for the one that is exact."""
    filled = [i for i, chunk in enumerate(prompt.chunks) if len(chunk)]
    if method == "prefix":
        return filled[:1] if exact_first else []
    return filled


def _why(miss: Miss) -> str:
    return f"it is damaged ({miss.detail})" if miss.kind == CORRUPT else miss.detail
