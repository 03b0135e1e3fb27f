"""The contract of every registered codec: error bounds, determinism, and refusal of bytes and headers that lie."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blendserve.errors import CorruptRecord, InputError, StoreError
from blendserve.kv import ChunkKV, KVShape, stacked
from blendserve.registry import CODECS
from blendserve.store import ChunkRecord, record
from blendserve.store.codecs.base import Buffer, ChunkShape, Codec, Undecodable, codec_for, known_codec
from blendserve.store.codecs.raw import Raw
from blendserve.store.view import RecordView
from tests.support.codecs import Toy, decoded, refuses
from tests.support.damages import TOP64
from tests.support.stores import chunk, chunk_by_layer, key_of, same

KEY = key_of(1)
SHAPE: dict[str, Any] = {"layers": 4, "kv_heads": 2, "head_dim": 8}
NINE = chunk(9, **SHAPE)
HERE = [name for name in CODECS.names if known_codec(name)]  # some need the extra `codecs`
ALL = [(name, level) for name in HERE for level in CODECS.load(name).levels]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
RESOLUTION = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}  # of a rounded value
dtypes = st.sampled_from(DTYPES)


@cache
def codec_of(name: str, level: int) -> Codec:
    made: type[Codec] = CODECS.load(name)
    return made.with_tables(level, tables_of(made) if made.needs_tables else b"")


@cache
def tables_of(made: type[Codec]) -> bytes:
    chunks = [chunk(40, **SHAPE, seed=100 + n) for n in range(6)]
    return made.fit((tuple(range(kv.n_tokens)), kv) for kv in chunks)


every_codec = pytest.mark.parametrize(("name", "level"), ALL)
codecs = st.sampled_from(ALL).map(lambda pair: codec_of(*pair))


@st.composite
def contents(draw: st.DrawFn) -> ChunkKV:
    """Noise, a constant, zeros, or noise in channels that lie far from zero; of 0 to 33 tokens."""
    tokens, dtype = draw(st.sampled_from([0, 1, 1, 2, 9, 33])), draw(dtypes)
    kv = chunk(tokens, **SHAPE, seed=draw(st.integers(0, 3)))
    scale, offset = draw(st.sampled_from([(1.0, 0.0), (0.0, 0.7), (0.0, 0.0), (0.3, 5.0)]))
    channels = torch.arange(8) % 3 - 1.0 if scale else 1.0
    return ChunkKV(
        *((scale * x + offset * channels).to(dtype) for x in (stacked(kv.keys), stacked(kv.values)))
    )


def step(name: str, level: int, x: Tensor) -> Tensor:
    """The distance of two quantised values of [L, K, C, D]: half of it is lost, and less by a scale in bf16."""
    if name == "int8":
        centre = x.mean(dim=2, keepdim=True).to(torch.bfloat16).float()
        return (x - centre).abs().amax(dim=-1, keepdim=True) / 127
    bins = {0: 16, 1: 16, 2: 8}[level]  # of the layers with the fewest
    return x.abs().amax(dim=(1, 3), keepdim=True) / (bins // 2 - 1)


@every_codec
@given(kv=contents())
def test_a_decoded_chunk_is_within_the_bound_and_always_the_same(name: str, level: int, kv: ChunkKV) -> None:
    codec = codec_of(name, level)
    back = decoded(codec, kv)
    assert ChunkShape.of(back) == ChunkShape.of(kv)
    assert stacked(back.values).shape == stacked(kv.values).shape
    assert same(decoded(codec, kv), back)
    codec.check(codec.coding, ChunkShape.of(kv), [len(s) for s in codec.encode(kv)])
    assert type(codec).needs_tables == any(codec.coding.tables)
    for got, want in (
        (stacked(back.keys).float(), stacked(kv.keys).float()),
        (stacked(back.values).float(), stacked(kv.values).float()),
    ):
        if name == "raw" or not want.numel():
            assert torch.equal(got, want)
        elif name in ("int8", "cachegen"):
            bound = step(name, level, want) + 2.1 * RESOLUTION[stacked(kv.keys).dtype] * want.abs()
            assert bool(((got - want).abs() <= bound + 1e-6).all())
        elif want.std(unbiased=False) > 0.5 and want.abs().max() < 5:  # like the text of the tables
            finest = level == type(codec).levels[0]
            assert float((got - want).norm() / want.norm()) < (0.35 if finest else 1.0)


def test_levels_are_ordered_by_size_and_sizes_are_near_the_expected_ones() -> None:
    kv = chunk(200, **SHAPE, dtype=torch.bfloat16)
    for name in HERE:
        codecs = [codec_of(name, level) for level in CODECS.load(name).levels]
        sizes = [sum(map(len, codec.encode(kv))) for codec in codecs]
        assert sizes == sorted(sizes, reverse=True), name
        for codec, written in zip(codecs, sizes, strict=True):
            expected = codec.expected_bytes(kv.n_bytes)  # of text; this is noise
            assert expected / 3 < written < 4 * expected


def view_of(
    codec: Codec, segments: Sequence[Buffer], read: Callable[[int], Buffer] | None = None
) -> RecordView:
    """A view of a chunk of nine tokens, whose segments have checksums that fit them. read: what is found instead."""
    tables = tables_of(type(codec)) if type(codec).needs_tables else b""
    made = ChunkRecord.from_segments(KEY, ChunkShape.of(NINE), codec.coding, segments)
    header = record.decode_header(KEY, made.header_bytes())
    return RecordView(ChunkRecord(KEY, header, read or segments.__getitem__), lambda hash: tables)


@given(codecs, st.lists(st.integers(0, 3), max_size=12))
def test_layers_are_decoded_in_any_order_by_any_thread_and_in_order_once(
    codec: Codec, asked: list[int]
) -> None:
    wanted, segments, reads = decoded(codec, NINE), codec.encode(NINE), list[int]()

    def noted(l: int) -> Buffer:
        reads.append(l)
        return segments[l]

    view, other = view_of(codec, segments, noted), view_of(codec, segments)

    def is_right(l: int, by: RecordView = view) -> bool:
        keys, values = by.layer(l)
        return torch.equal(keys, wanted.keys[l]) and torch.equal(values, wanted.values[l])

    assert all(map(is_right, range(4)))
    assert reads == [0, 1, 2, 3]
    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(is_right, asked))
    assert all(is_right(l, other) for l in asked)
    for l in (-1, 4):
        with pytest.raises(IndexError):
            view.layer(l)


@every_codec
def test_damage_stops_no_layer_below_it_and_of_a_random_access_codec_none_above(
    name: str, level: int
) -> None:
    codec = codec_of(name, level)
    wanted, segments = decoded(codec, NINE), codec.encode(NINE)
    view = view_of(codec, segments, lambda l: b"" if l == 1 else segments[l])
    above = (2,) if type(codec).random_access else ()
    for l in {1, 2} - set(above):
        with pytest.raises(CorruptRecord) as error:
            view.layer(l)
        assert error.value.layer == 1
    assert all(torch.equal(view.layer(l)[0], wanted.keys[l]) for l in (0, *above))


@given(codecs, st.sampled_from([0.0, float("nan"), 1e30, 1e-30]))
def test_an_odd_number_harms_no_other_token_of_a_random_access_codec(codec: Codec, odd: float) -> None:
    if type(codec).random_access:
        kv = chunk(7, **SHAPE)
        stacked(kv.keys)[1, 0, 2] = odd
        back, others = decoded(codec, kv), [0, 1, 3, 4, 5, 6]
        assert stacked(back.keys)[:, :, others].isfinite().all()
        assert stacked(back.values).isfinite().all()


@given(codecs, st.integers(0, 3), st.data())
def test_a_false_segment_is_damage_or_has_the_right_shape(codec: Codec, l: int, data: st.DataObject) -> None:
    segments = [bytes(segment) for segment in codec.encode(NINE)]
    raw = segments[l]
    at = data.draw(st.integers(0, len(raw) - 1))
    segments[l] = data.draw(
        st.one_of(
            st.binary(min_size=len(raw), max_size=len(raw)),
            st.just(raw[:at]),
            st.binary(min_size=1, max_size=40).map(lambda more: raw + more),
            st.just(raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :]),
            st.just(segments[(l + 1) % 4]),
        )
    )
    try:
        view = view_of(codec, segments)
        for n in range(4):
            keys, values = view.layer(n)
            assert keys.shape == values.shape == stacked(NINE.keys).shape[1:]
    except CorruptRecord:
        pass


@every_codec
@given(kv=contents(), l=st.integers(0, 3), more=st.sampled_from([-1, 1, 7, 4096, 2**31, TOP64]))
def test_lengths_of_no_chunk_are_refused(name: str, level: int, kv: ChunkKV, l: int, more: int) -> None:
    codec = codec_of(name, level)
    lengths = [len(segment) for segment in codec.encode(kv)]
    fixed = name in ("raw", "int8")
    lengths[l] = min(TOP64, lengths[l] + more) if fixed else TOP64 - 3  # whole words
    assert refuses(codec.check, codec.coding, ChunkShape.of(kv), lengths)


@pytest.mark.parametrize("name", HERE)
def test_layers_of_several_shapes_are_stored_or_refused(name: str) -> None:
    codec = codec_of(name, CODECS.load(name).default_level)
    kv = chunk_by_layer(7, [(2, 8, 8), (1, 16, 16), (1, 4, 32), (2, 8, 8)], torch.bfloat16)
    if type(codec).needs_equal_layers:
        assert refuses(codec.check, codec.coding, ChunkShape.of(kv), [100] * 4)
        with pytest.raises(StoreError):
            codec.encode(kv)
        with pytest.raises(Undecodable):
            codec.decoder(ChunkShape.of(kv))
    else:
        assert ChunkShape.of(decoded(codec, kv)) == ChunkShape.of(kv)
        codec.check(codec.coding, ChunkShape.of(kv), [len(segment) for segment in codec.encode(kv)])


@given(codecs, st.data())
def test_no_header_causes_a_large_allocation(codec: Codec, data: st.DataObject) -> None:
    """Sizes of gigabytes over a few bytes: refused, or decoded from the bytes that there are."""
    huge = st.sampled_from([1, 2, 8, 4096, 2**20, 2**31, 2**32 - 1])
    sizes = data.draw(st.lists(huge, min_size=3, max_size=3))
    heads, dim, n_tokens = sizes
    layers = (KVShape(heads, dim, dim),) * data.draw(st.sampled_from([1, 4]))
    shape = ChunkShape(torch.bfloat16, n_tokens, layers)
    lengths = [data.draw(st.sampled_from([0, 4, 64, 4096])) for _ in range(shape.n_layers)]
    tracemalloc.start()
    try:
        codec.check(codec.coding, shape, lengths)
        codec.decoder(shape).layer(0, bytes(lengths[0]))
    except (ValueError, Undecodable):
        pass
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 50_000_000


@every_codec
def test_other_levels_tables_and_shapes_are_refused(name: str, level: int) -> None:
    codec = codec_of(name, level)
    made, coding = type(codec), codec.coding
    assert (coding.codec, coding.level) == (name, level)
    with pytest.raises(Undecodable) as error:
        made.for_reading(replace(coding, level=77), lambda hash: b"")
    assert error.value.kind == "level"
    if not made.needs_tables:
        with pytest.raises(NotImplementedError):
            made.fit([])
        return
    with pytest.raises(Undecodable) as error:
        made.for_reading(coding, lambda hash: None)
    assert error.value.kind == "tables"
    tables = tables_of(made)
    for wrong in (b"", b"none", tables[:-1], tables + b"\0", bytes(len(tables))):
        assert refuses(made.with_tables, level, wrong)
    other = chunk(5, layers=3, kv_heads=1, head_dim=4)
    with pytest.raises(StoreError):
        codec.encode(other)
    with pytest.raises(Undecodable):
        codec.decoder(ChunkShape.of(other))
    with pytest.raises(InputError):
        made.fit([])


@pytest.mark.parametrize("other", ["no tables", "other tables", "ready tables"])
def test_tables_that_are_read_hold_up_no_chunk_that_does_not_need_them(toy_codec: None, other: str) -> None:
    slow, ready, more = (Toy(table=bytes(range(n, 256)) + bytes(range(n))).coding for n in (1, 2, 3))
    coding = {"no tables": Raw().coding, "other tables": more, "ready tables": ready}[other]
    codec_for(ready)
    is_read, may_answer = threading.Event(), threading.Event()

    def tables(hash: bytes) -> None:  # the toy codec then takes its own
        is_read.set()
        assert may_answer.wait(120)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(codec_for, slow, tables)
        assert is_read.wait(60)
        try:
            assert pool.submit(codec_for, coding).result(20).coding == coding
        finally:
            may_answer.set()
        assert codec_for(slow) is first.result()  # read once
