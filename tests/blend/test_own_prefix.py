"""What every prompt begins with is fetched from another machine once, and answers are those of a store that has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from blendserve.blend.blender import Blended, Blender
from blendserve.config import BlendConfig
from blendserve.store import ChunkKey, ChunkView, KVStore, MemoryStore, Snapshot
from blendserve.store.base import LOCAL, REMOTE
from blendserve.store.wrapped import WrappedStore
from tests.support.blending import some_prompt
from tests.support.models import tiny_adapter

PROMPT = some_prompt([9, 14])
BLEND = BlendConfig(method="blend", ratio=0.2)


class Far(WrappedStore):
    """A store on another machine, which knows what it was asked for."""

    def __init__(self, store: KVStore, far: bool = True, tier: str = REMOTE) -> None:
        """tier: where it says that things are."""
        super().__init__(store)
        self.got, self._far, self.tier = Counter[ChunkKey](), far, tier

    @property
    def far(self) -> bool:
        return self._far

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        with self._store.reading() as snapshot:
            yield cast(Snapshot, _Far(snapshot, self))

    def sample(self, keys: Sequence[ChunkKey], n_bytes: int) -> None:
        return None


class _Far:
    def __init__(self, snapshot: Snapshot, store: Far) -> None:
        self._snapshot, self._store = snapshot, store

    def get(self, key: ChunkKey) -> ChunkView | None:
        self._store.got[key] += 1
        return self._snapshot.get(key)

    def tier(self, key: ChunkKey) -> str:
        return self._store.tier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._snapshot, name)


def blender(store: KVStore) -> Blender:
    return Blender(tiny_adapter("llama"), "fingerprint", store, PROMPT.prefix, PROMPT.prefix)


@pytest.fixture(scope="module")
def stored() -> MemoryStore:
    store = MemoryStore(1 << 30)
    blender(store).precompute([chunk.ids for chunk in PROMPT.chunks])
    return store


def test_it_is_fetched_by_the_first_request_and_by_no_other(stored: MemoryStore) -> None:
    expected = blender(stored).run(PROMPT, BLEND)
    for first in (REMOTE, LOCAL):  # it may have been copied here, which says nothing of the next copy
        fetched_once(Far(stored, tier=first), first, expected)


def fetched_once(far: Far, first: str, expected: Blended) -> None:
    made = blender(far)
    for tier in (first, LOCAL, LOCAL):
        done = made.run(PROMPT, BLEND)
        assert torch.equal(done.prefilled.logits, expected.prefilled.logits)
        assert done.report.tokens_exact == expected.report.tokens_exact
        assert done.explanation.parts[0].tier == tier
    assert far.got[made.key(PROMPT.prefix, ())] == 1
    assert far.got[made.key(PROMPT.chunks[0].ids)] == 3


def test_an_engine_that_opens_fetches_it_and_all_namespaces_have_it(stored: MemoryStore) -> None:
    far = Far(stored)
    made = blender(far)
    made.sample_link()
    made.like(far, "another").run(PROMPT, BLEND)
    made.run(PROMPT, BLEND)
    assert far.got[made.key(PROMPT.prefix, ())] == 1


def test_another_prefix_is_another(stored: MemoryStore) -> None:
    """That of a conversation, say."""
    far = Far(stored)
    made = blender(far)
    made.run(PROMPT, BLEND)
    other = replace(PROMPT, prefix=PROMPT.prefix[::-1])
    done = made.run(other, BLEND)
    assert far.got[made.key(other.prefix, ())] == 1
    assert done.absent[0] == ()
    assert torch.equal(done.prefilled.logits, blender(stored).run(other, BLEND).prefilled.logits)


def test_a_store_on_this_machine_is_asked_each_time(stored: MemoryStore) -> None:
    """What it holds is in memory, or as good as there."""
    near = Far(stored, far=False, tier=LOCAL)
    made = blender(near)
    made.sample_link()
    for _ in range(2):
        made.run(PROMPT, BLEND)
    assert near.got[made.key(PROMPT.prefix, ())] == 2


def test_one_that_is_nowhere_is_computed_each_time() -> None:
    far = Far(MemoryStore(1 << 30))
    made = blender(far)
    made.sample_link()
    for _ in range(2):
        assert made.run(PROMPT, BLEND).absent[0] == ()
