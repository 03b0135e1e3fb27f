"""What the store holds of a prompt. Each method looks for what it can use; nobody looks for empty chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from blendserve.blend.layout import Run
from blendserve.blend.near import Donors
from blendserve.blend.while_waiting import COMPUTED, WhileWaiting
from blendserve.config import Method
from blendserve.core import ChunkKV, Prompt, TokenIds, Unusable
from blendserve.errors import CorruptRecord, StoreVersion
from blendserve.store import ChunkKey, ChunkView, Snapshot
from blendserve.store.base import LOCAL, REMOTE, TimeSaved
from blendserve.store.codecs.base import SLOW
from blendserve.store.memory import MemoryChunk

CORRUPT = "corrupt"
FAR = "it lies on another machine, and fetching it was estimated to take longer than it could save"
KeyOf = Callable[[TokenIds], ChunkKey]


@dataclass(frozen=True, slots=True)
class Found:
    """Stored views of a prompt's prefix and chunks, None where there is none to use."""

    prefix: ChunkView | None
    chunks: tuple[ChunkView | None, ...]
    looked_for: tuple[int, ...] = ()  # chunks by number
    unusable: tuple[Unusable, ...] = ()  # of those, the ones that may be there all the same
    tier_of: Mapping[int, str] = field(default_factory=dict)  # where each chunk that is there is read from
    prefix_tier: str = ""
    far_tokens: int = 0  # of chunks that came, or are coming, from another machine
    seconds: float = 0.0  # that looking took
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


def nothing(prompt: Prompt) -> Found:
    """When there is no store to read."""
    return Found(None, (None,) * len(prompt.chunks))


def supposed(prompt: Prompt, which: Iterable[int], prefix: bool = True) -> Found:
    """As if the chunks `which` were found, and the prefix: to lay out, not to read."""
    there, some = set(which), cast(ChunkView, object())
    chunks = tuple(some if i in there else None for i in range(len(prompt.chunks)))
    return Found(some if prefix else None, chunks, tuple(there))


def look_up(
    snapshot: Snapshot,
    prompt: Prompt,
    which: list[int],
    key_of: KeyOf,
    prefix_key: ChunkKey,
    n_layers: int,
    corrupt: dict[ChunkKey, str],
    slow: Mapping[ChunkKey, str],
    waiting: WhileWaiting | None = None,
    prefix: ChunkView | None = None,
    saved: TimeSaved | None = None,
) -> Found:
    """Look for the prefix and the chunks `which`, but not for `slow` ones, which says why.

    waiting: computes some of them while others are on their way; None = nobody does. prefix: where the caller has its KV;
    the store is not asked for it then. saved: what the chunks save, where the store compares that with fetching them.
    What is found damaged is added to `corrupt`, which says why.
    """

    computed = waiting.computed if waiting else {}

    def asked(key: ChunkKey) -> bool:
        return key not in corrupt and key not in slow and key not in computed

    def view(key: ChunkKey, n_tokens: int) -> ChunkView | None:
        try:
            return None if not asked(key) else _view(snapshot, key, n_tokens, n_layers)
        except CorruptRecord as error:
            corrupt[key] = error.what
            return None

    keys = {i: key_of(prompt.chunks[i].ids) for i in which}
    # The prefix in front: what is asked for last is still coming when the prefill begins, and is to be worth that.
    wanted = keys.values() if prefix else (prefix_key, *keys.values())
    snapshot.expect([key for key in dict.fromkeys(wanted) if asked(key)], waiting, saved)
    chunks: list[ChunkView | None] = [None] * len(prompt.chunks)
    for i in which:
        chunks[i] = view(keys[i], len(prompt.chunks[i]))
    here, prefix = prefix is not None, prefix or view(prefix_key, len(prompt.prefix))
    damaged = [Unusable(i, CORRUPT, corrupt[key]) for i, key in keys.items() if key in corrupt]
    lacking = [
        Unusable(i, why.kind, str(why)) for i, key in keys.items() if (why := snapshot.undecodable.get(key))
    ]
    left = [Unusable(i, SLOW, slow[key]) for i, key in keys.items() if key in slow and key not in corrupt]
    tier_of = {i: snapshot.tier(keys[i]) for i in which if chunks[i] is not None}
    done = {i: computed[key] for i, key in keys.items() if key in computed}
    for i, kv in done.items():
        chunks[i], tier_of[i] = MemoryChunk(kv), COMPUTED
    prefix_tier = LOCAL if here else "" if prefix is None else snapshot.tier(prefix_key)
    far = sum(len(prompt.chunks[i]) for i, tier in tier_of.items() if tier == REMOTE)
    return Found(
        prefix,
        tuple(chunks),
        tuple(which),
        (*damaged, *lacking, *left),
        tier_of,
        prefix_tier,
        far,
        computed=done,
    )


def look_near(
    snapshot: Snapshot,
    prompt: Prompt,
    found: Found,
    donors: Donors,
    n_layers: int,
    corrupt: dict[ChunkKey, str],
    worth: Callable[[Mapping[ChunkKey, int]], Collection[ChunkKey]],
) -> Found:
    """With what stored chunks have of those that are not there; damaged ones are added to `corrupt`.

    worth: of donors, with their numbers of tokens, those that are worth reading. Raises StoreError.
    """
    why: dict[ChunkKey, str] = {}

    def views(asked: Mapping[ChunkKey, int]) -> dict[ChunkKey, ChunkView]:
        near_enough = worth(asked)
        wanted = [key for key in near_enough if key not in corrupt]
        snapshot.expect(wanted)
        there: dict[ChunkKey, ChunkView] = {}
        for key in wanted:
            try:
                if view := _view(snapshot, key, asked[key], n_layers):
                    there[key] = view
            except CorruptRecord as error:
                corrupt[key] = error.what
        why.update({key: FAR for key in asked if key not in near_enough})
        why.update({key: str(told) for key in wanted if (told := snapshot.undecodable.get(key))})
        why.update({key: f"it is damaged ({corrupt[key]})" for key in asked if key in corrupt})
        return there

    missed = {i: prompt.chunks[i].ids for i in found.looked_for if found.chunks[i] is None}
    looked = donors.find(missed, views) if missed else {}
    return replace(
        found,
        near={i: near.runs for i, near in looked.items() if near.runs},
        looked_near={
            i: "; ".join(why.get(key, "it has gone") for key in near.lost) for i, near in looked.items()
        },
    )


def wanted(prompt: Prompt, method: Method, exact_first: bool) -> list[int]:
    """Which chunks a method asks the store for; prefix caching, only for the one that is exact."""
    filled = [i for i, chunk in enumerate(prompt.chunks) if len(chunk)]
    if method == "prefix":
        return filled[:1] if exact_first else []
    return filled


def _view(snapshot: Snapshot, key: ChunkKey, n_tokens: int, n_layers: int) -> ChunkView | None:
    try:
        view = snapshot.get(key)
    except StoreVersion as error:  # one chunk by a newer blendserve: computed here, and left alone there
        raise CorruptRecord(key, str(error)) from None
    if view is not None and (view.n_tokens, view.n_layers) != (n_tokens, n_layers):
        raise CorruptRecord(key, "is not the chunk that its key names")
    return view
