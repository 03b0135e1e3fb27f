"""What every codec must do, by its line in the registry: of any shape and dtype, at every level, with hostile bytes."""

from __future__ import annotations

import tracemalloc
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.core import ChunkKV
from blendserve.errors import CorruptRecord, InputError, StoreError
from blendserve.registry import CODECS, parse_codec
from blendserve.store import record
from blendserve.store.chunk import StoredChunk
from blendserve.store.codecs.base import Buffer, ChunkShape, Codec, Coding, Undecodable, known_codec
from tests.store.helpers import chunk, key_of, same

KEY = key_of(1)
SHAPE: dict[str, Any] = {"layers": 4, "kv_heads": 2, "head_dim": 8}
HERE = [name for name in CODECS.names if known_codec(name)]  # without the extra `codecs` some are not
ALL = [(name, level) for name in HERE for level in CODECS.load(name).levels]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def test_the_extra_codecs_are_here() -> None:
    """Else the tests below leave some out in silence."""
    if list(CODECS.names) != HERE:
        pytest.skip("constriction is not installed: pip install 'blendserve[codecs]'")


def codec_of(name: str, level: int) -> Codec:
    made: type[Codec] = CODECS.load(name)
    return made.with_tables(level, tables_of(made) if made.needs_tables else b"")


@cache
def tables_of(made: type[Codec]) -> bytes:
    chunks = [chunk(40, **SHAPE, seed=100 + n) for n in range(6)]
    return made.fit((tuple(range(kv.n_tokens)), kv) for kv in chunks)


@pytest.fixture(params=ALL, ids=[f"{name}@{level}" for name, level in ALL])
def codec(request: pytest.FixtureRequest) -> Codec:
    return codec_of(*request.param)


def decoded(codec: Codec, kv: ChunkKV) -> ChunkKV:
    segments = codec.encode(kv)
    decoder = codec.decoder(ChunkShape.of(kv))
    layers = [decoder.layer(l, segment) for l, segment in enumerate(segments)]
    return ChunkKV(*(torch.stack(part) for part in zip(*layers, strict=True)))


def error(a: ChunkKV, b: ChunkKV) -> float:
    apart = torch.cat([(a.keys - b.keys).float().flatten(), (a.values - b.values).float().flatten()])
    size = torch.cat([b.keys.float().flatten(), b.values.float().flatten()])
    return float(apart.norm() / size.norm()) if size.norm() else float(apart.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 2, 33])
def test_a_chunk_comes_back_near_of_its_shape_and_the_same_every_time(
    codec: Codec, dtype: torch.dtype, tokens: int
) -> None:
    kv = chunk(tokens, **SHAPE, dtype=dtype)
    back = decoded(codec, kv)
    assert (back.keys.dtype, back.keys.shape, back.values.shape) == (dtype, kv.keys.shape, kv.values.shape)
    finest = codec.coding.level == type(codec).levels[0]
    assert error(back, kv) < (0.35 if finest else 1.0)  # of noise; 1 is what nothing at all gives
    assert same(decoded(codec, kv), back)
    codec.check(codec.coding, ChunkShape.of(kv), [len(s) for s in codec.encode(kv)])
    assert codec.coding.level in type(codec).levels
    assert type(codec).needs_tables == any(codec.coding.tables)


@pytest.mark.parametrize(("name", "level"), ALL)
def test_a_codec_writes_the_name_that_it_is_registered_by(name: str, level: int) -> None:
    coding = codec_of(name, level).coding
    assert (coding.codec, coding.level) == (name, level)


def test_levels_are_in_order_of_size() -> None:
    kv = chunk(200, **SHAPE)
    for name in HERE:
        sizes = [sum(map(len, codec_of(name, level).encode(kv))) for level in CODECS.load(name).levels]
        assert sizes == sorted(sizes, reverse=True), name


def test_what_is_expected_is_about_what_is_written(codec: Codec) -> None:
    kv = chunk(200, **SHAPE, dtype=torch.bfloat16)
    written = sum(map(len, codec.encode(kv)))
    expected = codec.expected_bytes(kv.n_bytes)  # of text; this is noise
    assert expected / 3 < written < 4 * expected


@given(data=st.data())
@settings(max_examples=60)
def test_layers_of_a_random_access_codec_need_none_below(data: st.DataObject) -> None:
    name, level = data.draw(st.sampled_from([a for a in ALL if CODECS.load(a[0]).random_access]))
    codec, kv = codec_of(name, level), chunk(7, **SHAPE)
    segments, whole = codec.encode(kv), decoded(codec, kv)
    decoder = codec.decoder(ChunkShape.of(kv))
    for l in data.draw(st.lists(st.integers(0, 3), max_size=6)):
        keys, values = decoder.layer(l, segments[l])
        assert torch.equal(keys, whole.keys[l])
        assert torch.equal(values, whole.values[l])


@pytest.mark.parametrize("odd", [0.0, float("nan"), float("inf"), 1e30, 1e-30])
def test_odd_values_change_no_other_token(codec: Codec, odd: float) -> None:
    """Of a codec whose layers stand alone; what one is that was no number, nobody says."""
    if not type(codec).random_access:
        pytest.skip("layers lean on each other")
    kv = chunk(6, **SHAPE)
    kv.keys[1, 0, 2] = odd
    back = decoded(codec, kv)
    others = [0, 1, 3, 4, 5]
    assert back.keys[:, :, others].isfinite().all()
    assert back.values.isfinite().all()


def test_a_product_is_rounded_once() -> None:
    """int8 by a second derivation: in 64 bits, rounded to the dtype."""
    codec = codec_of("int8", 0)
    for dtype in DTYPES:
        kv = chunk(19, **SHAPE, dtype=dtype)
        raw = codec.encode(kv)[2]
        n = 2 * 2 * 19 * 8
        integers = torch.frombuffer(bytearray(raw[:n]), dtype=torch.int8).view(2, 2, 19, 8).double()
        rest = torch.frombuffer(bytearray(raw[n:]), dtype=torch.bfloat16).double()
        scales, centres = rest[: 2 * 2 * 19].view(2, 2, 19, 1), rest[2 * 2 * 19 :].view(2, 2, 1, 8)
        expected = (centres + integers * scales).to(dtype)
        assert torch.equal(torch.stack(decoded(codec, kv).keys.unbind())[2], expected[0])


def view_of(codec: Codec, kv: ChunkKV, segments: list[Buffer]) -> StoredChunk:
    """Of segments under checksums that fit them."""
    coded = record.Coded(ChunkShape.of(kv), codec.coding, segments)
    tables = tables_of(type(codec)) if type(codec).needs_tables else b""
    return StoredChunk(KEY, record.seal(KEY, coded), segments.__getitem__, lambda hash: tables)


@given(data=st.data())
@settings(max_examples=120)
def test_a_segment_that_is_none_under_a_checksum_that_fits_is_damage_or_of_the_right_shape(
    data: st.DataObject,
) -> None:
    codec, kv = codec_of(*data.draw(st.sampled_from(ALL))), chunk(9, **SHAPE)
    segments = [bytes(segment) for segment in codec.encode(kv)]
    l = data.draw(st.integers(0, 3))
    kind = data.draw(st.sampled_from(["noise", "cut", "more", "flip", "other layer"]))
    raw = bytearray(segments[l])
    if kind == "noise":
        raw = bytearray(data.draw(st.binary(min_size=len(raw), max_size=len(raw))))
    elif kind == "cut":
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    elif kind == "more":
        raw += data.draw(st.binary(min_size=1, max_size=40))
    elif kind == "flip":
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        raw = bytearray(segments[(l + 1) % 4])
    segments[l] = bytes(raw)
    try:
        record.decode_header(KEY, record.encode_header(KEY, view_of(codec, kv, [*segments]).version))
        view = view_of(codec, kv, [*segments])
        for n in range(4):
            keys, values = view.layer(n)
            assert keys.shape == values.shape == kv.keys.shape[1:]
    except CorruptRecord:
        pass


@given(data=st.data())
@settings(max_examples=200)
def test_no_header_makes_anybody_allocate_more_than_its_record_has(data: st.DataObject) -> None:
    """Sizes of gigabytes over a few bytes: refused by `check`, by the decoder's shape, or decoded in what is there."""
    name, level = data.draw(st.sampled_from(ALL))
    codec = codec_of(name, level)
    sizes = data.draw(
        st.lists(st.sampled_from([1, 2, 8, 4096, 2**20, 2**31, 2**32 - 1]), min_size=3, max_size=3)
    )
    shape = ChunkShape(torch.bfloat16, data.draw(st.sampled_from([1, 4])), *sizes)
    lengths = [data.draw(st.sampled_from([0, 4, 64, 4096])) for _ in range(shape.n_layers)]
    tracemalloc.start()
    try:
        codec.check(codec.coding, shape, lengths)
        decoder = codec.decoder(shape)
        decoder.layer(0, bytes(lengths[0]))
    except (ValueError, Undecodable):
        pass
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 50_000_000


def test_other_tables_and_levels_are_not_taken(codec: Codec) -> None:
    made = type(codec)
    with pytest.raises(Undecodable, match="level"):
        made.for_reading(Coding(codec.coding.codec, 77, codec.coding.tables), lambda hash: b"")
    if made.needs_tables:
        with pytest.raises(Undecodable, match="store merge"):
            made.for_reading(codec.coding, lambda hash: None)
        tables = tables_of(made)
        for wrong in (b"", b"none", tables[:-1], tables + b"\0", bytes(len(tables))):
            with pytest.raises(ValueError, match=r"."):
                made.with_tables(codec.coding.level, wrong)
        other = chunk(5, layers=3, kv_heads=1, head_dim=4)
        with pytest.raises(StoreError, match="another reader"):
            codec.encode(other)
        with pytest.raises(Undecodable, match="shape"):
            codec.decoder(ChunkShape.of(other))
        with pytest.raises(InputError, match="too few"):
            made.fit([])
    else:
        with pytest.raises(NotImplementedError):
            made.fit([])


def test_words_for_codecs() -> None:
    assert parse_codec("raw") == ("raw", 0)
    assert parse_codec("int8") == ("int8", 0)
    with pytest.raises(ValueError, match="known are int8@0"):
        parse_codec("int8@3")
    with pytest.raises(ValueError, match=r"did you mean 'int8'"):
        parse_codec("int")
    if "cachegen" in HERE:
        assert parse_codec("cachegen") == ("cachegen", 1)
        assert parse_codec("cachegen@2") == ("cachegen", 2)
        for wrong in ("cachegen@", "cachegen@x", "cachegen@-1", "cachegen@7"):
            with pytest.raises(ValueError, match="cachegen@0, cachegen@1, cachegen@2"):
                parse_codec(wrong)
