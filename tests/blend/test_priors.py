"""Priors: fitted by least squares, kept by a store for their model and context, and ignored where they are unusable."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch

from blendserve.blend import priors
from blendserve.blend.blender import Blender
from blendserve.blend.priors import NAME, Priors, PriorStore, prompts_of
from blendserve.core import TokenIds
from blendserve.kv import ChunkKV
from blendserve.store.codecs.base import Codec
from blendserve.store.codecs.int8 import Int8
from blendserve.store.codecs.raw import Raw
from blendserve.store.memory import MemoryStore
from tests.support.blending import assert_near, distance, model_kv, some_ids
from tests.support.models import tiny_decoder
from tests.support.stores import ROOMY, FaultyStore

CORPUS = [some_ids(60, seed) for seed in range(60)]
PREFIX = some_ids(5, 999)
DECODER = tiny_decoder("llama")


def known(
    store: MemoryStore | FaultyStore, fingerprint: str = "reader", context: TokenIds = PREFIX
) -> PriorStore:
    return PriorStore(DECODER, fingerprint, store, PREFIX, context)


@pytest.fixture(scope="module")
def fitted() -> Priors:
    found = known(MemoryStore(ROOMY)).fit(CORPUS)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def learnt() -> MemoryStore:
    """A store that holds the corpus's priors."""
    store, calls = MemoryStore(ROOMY), list[tuple[int, int]]()
    first = known(store)
    assert first.current() is None
    for _ in range(2):
        first.learn(CORPUS, lambda done, total: calls.append((done, total)))
        assert first.current() is not None
    assert calls.count(calls[-1]) == 1  # fitted once
    assert calls[-1][0] == calls[-1][1] > 0
    return store


def test_the_fit_is_least_squares_over_the_models_own_kv(fitted: Priors) -> None:
    """By the model's own forward, with rows added for the penalty; of one head of the last layer."""
    l, head = DECODER.n_layers - 1, 1
    xs, ys, places = [], [], []
    for prompt in prompts_of(CORPUS, PREFIX, DECODER.context_limit):
        keys, values = model_kv(DECODER, prompt.ids)
        rope = DECODER.rope(torch.arange(len(prompt)))[l]
        whole = torch.cat([DECODER.rotate(keys[l], rope.inverse), values[l]], dim=-1)[head]
        for chunk, span in list(zip(prompt.chunks, prompt.spans, strict=True))[1:]:  # the first is exact
            at, n = len(PREFIX), len(PREFIX) + len(chunk)
            keys, values = model_kv(DECODER, (*PREFIX, *chunk.ids))
            rotated = DECODER.rotate(keys[l], DECODER.rope(torch.arange(n))[l].inverse)
            alone = torch.cat([rotated, values[l]], dim=-1)[head, at:]
            xs.append(alone)
            ys.append(whole[span.start : span.stop] - alone)
            places.append(torch.full((len(span), 1), span.start / span.stop))  # the share that precedes it
    x, y, by = (torch.cat(parts).double() for parts in (xs, ys, places))
    dim, total = DECODER.kv_shapes[l].dim, (by**2).sum()
    spread = ((by * (x - (by**2 * x).sum(0) / total)) ** 2).sum(0) / total
    size = torch.cat([part.mean().sqrt().expand(dim) for part in spread.chunk(2)])
    added = torch.cat([priors.PENALTY**0.5 * torch.diag(size), torch.zeros(2 * dim, 1)], dim=1)
    rows = torch.cat([by * torch.cat([x, torch.ones(len(x), 1)], dim=1), added])
    expected = torch.linalg.lstsq(rows, torch.cat([y, torch.zeros(2 * dim, 2 * dim)])).solution
    weights, constant = fitted.layer(l)
    assert_near(weights[head].double(), expected[:-1], 1e-3)
    assert_near(constant[head].double(), expected[-1], 1e-3)


def test_every_chunk_is_in_one_prompt_and_no_prompt_is_too_long() -> None:
    found = prompts_of([*CORPUS, (), some_ids(900, 1)], PREFIX, 500)
    assert all(len(prompt) <= 500 and len(prompt.chunks) > 1 for prompt in found)
    used = [chunk.ids for prompt in found for chunk in prompt.chunks]
    assert len(used) == len(set(used)) >= len(CORPUS) - 1  # one may be left over, alone
    assert set(used) <= set(CORPUS)
    assert prompts_of(CORPUS, PREFIX, 500) == prompts_of(CORPUS, PREFIX, 500)
    assert known(MemoryStore(ROOMY)).fit(CORPUS[:3]) is None  # too little text


def test_a_store_gives_them_to_the_same_reader_and_context_once_it_is_reachable(
    learnt: MemoryStore, fitted: Priors
) -> None:
    store = FaultyStore(learnt)
    later, store.down = known(store), True
    assert later.current() is None
    store.down = False
    found = later.current()
    assert found is not None
    for mine, kept in zip(fitted.layer(1), found.layer(1), strict=True):
        assert distance(mine, kept) < 2**-7 * float(mine.abs().max())  # weights are kept as bf16
    assert known(learnt, "another").current() is None
    assert known(learnt, context=(*PREFIX, 7)).current() is None


def test_unusable_ones_are_ignored(learnt: MemoryStore, fitted: Priors) -> None:
    weights, constant = fitted.layer(1)
    other_shape = Priors(weights[None, :1], constant[None, :1]).to_bytes()
    with pytest.raises(ValueError):  # noqa: PT011
        Priors.from_bytes(other_shape, DECODER)
    (info,) = learnt.blobs.list()
    for raw in (b"", b"no safetensors", b"\xff" * 64, other_shape):
        store = MemoryStore(ROOMY)
        store.blobs.put(NAME, info.owner, raw)
        assert known(store).current() is None


@pytest.mark.parametrize("codec", [Raw(), Int8()], ids=["raw", "int8"])
def test_chunks_whose_kv_is_kept_exactly_are_read_and_others_computed(codec: Codec, fitted: Priors) -> None:
    store = FaultyStore(MemoryStore(ROOMY))
    blender = Blender(DECODER, "reader", store, PREFIX, PREFIX, codec=codec)
    writer = blender.writer
    writer.precompute(CORPUS[3:])
    store.damaged = {writer.key(CORPUS[5])}
    store.damaged_layer = 1
    computed = list[TokenIds]()
    compute = writer.chunks.compute

    def counted(chunks: Sequence[TokenIds]) -> list[ChunkKV]:
        computed.extend(chunks)
        return compute(chunks)

    with patch.object(writer.chunks, "compute", counted):
        made = blender.priors.fit(CORPUS, alone=writer.as_computed)
        if codec.is_lossless:
            assert set(computed) <= {*CORPUS[:3], CORPUS[5]}
        store.down = True
        (kv,) = writer.as_computed([CORPUS[9]])
    assert made is not None
    for l in range(1, DECODER.n_layers):
        assert all(map(torch.equal, made.layer(l), fitted.layer(l)))
    (expected,) = compute([CORPUS[9]])
    assert all(map(torch.equal, kv.values, expected.values))
