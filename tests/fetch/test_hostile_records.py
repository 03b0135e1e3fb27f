"""Records with right checksums and wrong content: whoever can write to a store must not reach the memory of a reader.

Each field of a header is changed within its type. The chunk is then a miss, or it gives the answer of its own bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blendserve.blend.blender import Prefilled
from blendserve.config import BlendConfig
from blendserve.fetch import KVFetcher
from blendserve.fetch.copies import Copies
from blendserve.kernels.ops import place
from blendserve.kernels.rotary import HALVES
from blendserve.kernels.types import Rope
from blendserve.kv import ChunkKV, join_layers
from blendserve.store import ChunkRecord, KVStore, MemoryStore
from blendserve.store.codecs.base import ChunkShape, Codec
from blendserve.store.codecs.int8 import Int8
from blendserve.store.codecs.raw import Raw
from tests.support.blending import check_report, some_prompt, tiny_blender
from tests.support.places import EVERY_KIND, REMOTE_STORES, STORES, Place, Tiered
from tests.support.stores import ROOMY

PROMPT = some_prompt([9, 14, 3])
KEYS = [tiny_blender().key(chunk.ids) for chunk in PROMPT.chunks]
CHUNKS = tiny_blender().writer.chunks.compute([chunk.ids for chunk in PROMPT.chunks])
FORGED = 1  # the number of the chunk whose record is forged
SHAPE = ChunkShape.of(CHUNKS[FORGED])
REUSE = BlendConfig(method="reuse")
KINDS = [*EVERY_KIND, *(pytest.param(kind) for kind in REMOTE_STORES)]

sizes = st.sampled_from([1, 2, 4, 8, 16, 32])
FIELDS: dict[str, st.SearchStrategy[object]] = {
    "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    "n_layers": st.integers(1, 2 * SHAPE.n_layers),
    "heads": sizes,
    "dim": sizes,
    "value_dim": sizes,
    "n_tokens": st.integers(0, 40),
    "state_rows": st.sampled_from([0, 3, SHAPE.n_tokens]),
    "with_ids": st.booleans(),
}
some_fields = st.sampled_from(list(FIELDS)).flatmap(lambda name: st.fixed_dictionaries({name: FIELDS[name]}))


def forged(fields: dict[str, object], codec: Codec, every_layer: bool) -> ChunkRecord:
    """A record under the chunk's key that says this of itself, and holds what it says."""
    heads, dim, value_dim = SHAPE.layers[0]
    said: dict[str, Any] = {
        "dtype": SHAPE.dtype,
        "n_layers": SHAPE.n_layers,
        "n_tokens": SHAPE.n_tokens,
        "state_rows": 0,
    }
    said |= {"heads": heads, "dim": dim, "value_dim": value_dim, "with_ids": True} | fields

    def layer(l: int, side: int, width: str, usual: int) -> Tensor:
        is_changed = every_layer or l == 0
        shape = said["heads"] if is_changed else heads, said["n_tokens"], said[width] if is_changed else usual
        if said["state_rows"] and l == 0:
            shape = shape[0], said["state_rows"], shape[2]
        source = (CHUNKS[FORGED].keys, CHUNKS[FORGED].values)[side][l % SHAPE.n_layers].flatten()
        count = shape[0] * shape[1] * shape[2]
        return source.repeat(1 + count // len(source))[:count].reshape(shape).to(said["dtype"])

    layers = range(said["n_layers"])
    sides = [
        join_layers([layer(l, side, width, usual) for l in layers])
        for side, width, usual in ((0, "dim", dim), (1, "value_dim", value_dim))
    ]
    ids = CHUNKS[FORGED].ids if said["with_ids"] and said["n_tokens"] == SHAPE.n_tokens else ()
    recurrent = frozenset({0} if said["state_rows"] and len(layers) > 1 else ())
    return ChunkRecord.encode(KEYS[FORGED], ChunkKV(*sides, ids=ids, recurrent=recurrent), codec)


def answer(store: KVStore, fetcher: KVFetcher | None = None) -> Prefilled:
    done = tiny_blender(store, fetcher=fetcher).run(PROMPT, REUSE)
    check_report(done.report, PROMPT)
    return done


def fill(store: KVStore, record: ChunkRecord | None) -> None:
    """The honest chunks, and this one."""
    for key, kv in zip(KEYS, CHUNKS, strict=True):
        if key != KEYS[FORGED]:
            store.put(key, ChunkRecord.encode(key, kv, Raw()))
    if record:
        store.put(KEYS[FORGED], record)


def answer_of(kind: str, folder: Path, record: ChunkRecord) -> Prefilled:
    """What a prompt gets from a store of this kind that holds the record."""
    place: Place = (STORES | REMOTE_STORES)[kind](folder, ROOMY)
    with closing(place), place.open() as store:
        fill(place.far or store, record)
        fetcher = place.fetcher(store, Copies()) if isinstance(place, Tiered) else KVFetcher(store)
        with closing(fetcher):
            return answer(store, fetcher)


@pytest.mark.parametrize("kind", KINDS)
@given(fields=some_fields, codec=st.sampled_from([Raw(), Int8()]), every_layer=st.booleans())
def test_a_chunk_whose_header_says_another_shape_is_a_miss(
    kind: str,
    tmp_path_factory: pytest.TempPathFactory,
    fields: dict[str, object],
    codec: Codec,
    every_layer: bool,
) -> None:
    try:
        record = forged(fields, codec, every_layer)
    except ValueError:
        return  # the codec cannot write such a record
    is_right, expected = record.shape == SHAPE, MemoryStore(ROOMY)
    fill(expected, record if is_right else None)
    done = answer_of(kind, tmp_path_factory.mktemp(kind), record)
    assert torch.equal(done.result.logits, answer(expected).result.logits)
    unusable = [(miss["chunk"], miss["kind"]) for miss in done.report.unusable]
    assert unusable == ([] if is_right else [(FORGED, "corrupt")])


def _spoil(x: Tensor, value: float, everywhere: bool) -> Tensor:
    x = x.clone()
    x[..., slice(None) if everywhere else x.shape[-2] // 2, 1] = value
    return x


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(
    value=st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e38]),
    sides=st.sampled_from(["keys", "values", "both"]),
    everywhere=st.booleans(),
    is_coded=st.booleans(),
)
def test_numbers_that_are_not_finite_reach_no_answer(
    kind: str,
    tmp_path_factory: pytest.TempPathFactory,
    value: float,
    sides: str,
    everywhere: bool,
    is_coded: bool,
) -> None:
    """The chunks of such a prompt are computed, and the report says so."""
    spoil: Callable[[Tensor], Tensor] = partial(_spoil, value=value, everywhere=everywhere)
    kv = CHUNKS[FORGED]
    assert isinstance(kv.keys, Tensor)
    assert isinstance(kv.values, Tensor)
    kv = replace(
        kv,
        keys=kv.keys if sides == "values" else spoil(kv.keys),
        values=kv.values if sides == "keys" else spoil(kv.values),
    )
    record = ChunkRecord.encode(KEYS[FORGED], kv, Int8() if is_coded else Raw())
    done = answer_of(kind, tmp_path_factory.mktemp(kind), record)
    assert torch.isfinite(done.result.logits).all()
    if sides == "keys" and value == value:  # such a key may get no attention at all: finite, so no sign of it
        return
    assert {(miss["chunk"], miss["kind"]) for miss in done.report.unusable} >= {(FORGED, "corrupt")}
    nothing = answer(MemoryStore(ROOMY))
    assert torch.equal(done.result.logits, nothing.result.logits)


@pytest.mark.parametrize("cut", ["heads", "dim", "value_dim", "values", "behind", "dtype"])
def test_kernels_place_no_chunk_of_another_size_than_the_cache(cut: str) -> None:
    """They get pointers, so they would read and write other memory."""
    keys, rope = torch.zeros(2, 8, 32), Rope(torch.ones(8, 32), torch.zeros(8, 32))
    chunk = torch.zeros(2, 4, 32)
    pairs = {
        "heads": (chunk[:1], chunk[:1]),
        "dim": (chunk[..., :16], chunk),
        "value_dim": (chunk, chunk[..., :16]),
        "values": (chunk, chunk[:, :3]),
        "dtype": (chunk.half(), chunk),
    }
    start = 5 if cut == "behind" else 0
    with pytest.raises(ValueError):  # noqa: PT011
        place([(start, *pairs.get(cut, (chunk, chunk)))], keys, keys.clone(), rope, HALVES)
