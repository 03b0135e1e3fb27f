"""Keys, and records: bytes to chunk and back; any damage is reported."""

from __future__ import annotations

import struct
from functools import partial
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import assume, given
from hypothesis import strategies as st

from blendserve.errors import CorruptRecord, StoreError, StoreVersion
from blendserve.kv import ChunkKV, KVShape, Layers
from blendserve.store import ChunkRecord, record
from blendserve.store.codecs.base import ChunkShape, Coding
from blendserve.store.codecs.raw import Raw
from blendserve.store.key import KEY_BYTES, TAG_BYTES, chunk_key, namespace_tag
from blendserve.store.view import RecordView
from tests.support.damages import DAMAGES, LIES, Damage, relabelled, sealed
from tests.support.stores import chunk, chunk_by_layer, copy_of, key_of, same

KEY = key_of(1)


def encode(key: bytes, kv: ChunkKV) -> tuple[bytes, list[bytes]]:
    record = ChunkRecord.encode(key, kv, Raw())
    return record.header_bytes(), [bytes(segment) for segment in record.segments()]


def decode(key: bytes, header: bytes, layers: list[bytes]) -> ChunkKV:
    return copy_of(RecordView(ChunkRecord(key, record.decode_header(key, header), lambda l: layers[l])))


@given(
    *(st.integers(0, 9), st.integers(1, 4), st.integers(1, 3), st.integers(1, 8)),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_round_trip(tokens: int, layers: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    kv = chunk(tokens, layers, heads, dim, dtype)
    header, segments = encode(KEY, kv)
    assert same(decode(KEY, header, segments), kv)
    found = record.decode_header(KEY, header)
    assert (found.shape, found.coding) == (
        ChunkShape(dtype, tokens, (KVShape(heads, dim, dim),) * layers),
        Coding("raw"),
    )
    assert found.n_bytes == kv.n_bytes


@given(
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(1, 3), *[st.integers(1, 8)] * 2), min_size=1, max_size=4),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_layers_of_any_shapes_round_trip(
    tokens: int, shapes: list[tuple[int, int, int]], dtype: torch.dtype
) -> None:
    kv = chunk_by_layer(tokens, shapes, dtype)
    header, segments = encode(KEY, kv)
    assert same(decode(KEY, header, segments), kv)
    assert record.decode_header(KEY, header).shape == ChunkShape.of(kv)
    is_plain = len(set(shapes)) == 1 and shapes[0][1] == shapes[0][2]
    assert header[4] == (3 if is_plain else 4)  # its format
    sizes = [k * tokens * (d + d_v) * dtype.itemsize for k, d, d_v in shapes]
    assert [len(segment) for segment in segments] == sizes


@given(st.integers(0, 9), st.lists(st.sampled_from([0, 13, 15]), min_size=1, max_size=4), st.integers(1, 3))
def test_state_maps_round_trip_beside_kv(tokens: int, rows: list[int], heads: int) -> None:
    """rows: of a layer's state map, 0 = it keeps KV."""
    assume(0 in rows and any(rows))
    layers = [chunk_by_layer(n or tokens, [(heads, 2, 4)]) for n in rows]
    sides = (
        tuple(side[0] for side in sides) for sides in ([x.keys for x in layers], [x.values for x in layers])
    )
    kv = ChunkKV(*sides, recurrent=frozenset(l for l, n in enumerate(rows) if n))
    header, segments = encode(KEY, kv)
    assert header[4] == 5  # its format
    found = record.decode_header(KEY, header)
    assert (found.shape, found.shape.recurrent, found.shape.n_tokens) == (
        ChunkShape.of(kv),
        kv.recurrent,
        tokens,
    )
    assert same(decode(KEY, header, segments), kv)
    assert [len(segment) for segment in segments] == [(n or tokens) * heads * 24 for n in rows]
    for lie in (tuple(n or 1 for n in rows), (0,) * len(rows)):  # no layer keeps KV; all do
        at = 52 + 12 * len(rows)  # behind the fields and the shapes
        changed = [(at + 4 * l, "I", n) for l, n in enumerate(lie)]
        raw = header
        for change in changed:
            raw = relabelled(KEY, raw, change)
        with pytest.raises(CorruptRecord):
            decode(KEY, raw, segments)


@pytest.mark.parametrize(
    ("keys", "values", "ids"),
    [
        (torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 4, 4), ()),
        (torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4).half(), ()),
        (*[torch.zeros(1, 2, 3, 4).char()] * 2, ()),
        (*[torch.zeros(2, 3, 4)] * 2, ()),
        (*[torch.zeros(0, 2, 3, 4)] * 2, ()),
        (*[torch.zeros(1, 2, 3, 0)] * 2, ()),
        (*[torch.zeros(1, 2, 3, 4)] * 2, (1,)),
        (*[(torch.zeros(2, 3, 4), torch.zeros(2, 5, 4))] * 2, ()),
        ((torch.zeros(2, 3, 4), torch.zeros(1, 3, 4)), (torch.zeros(2, 3, 4),), ()),
        (torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 0), ()),
        (*[(torch.zeros(2, 3, 4), torch.zeros(1, 3, 4).half())] * 2, ()),
    ],
)
def test_tensors_that_are_no_chunk_are_refused(keys: Layers, values: Layers, ids: tuple[int, ...]) -> None:
    with pytest.raises(StoreError):
        encode(KEY, ChunkKV(keys, values, ids=ids))


@pytest.mark.parametrize("damage", [one for one in DAMAGES if not one.readable], ids=lambda one: one.name)
def test_damage_is_reported_by_the_record_that_has_it(damage: Damage) -> None:
    header, layers = encode(KEY, chunk())
    bad, *records = damage.change(KEY, [header, *layers])
    with pytest.raises(CorruptRecord) as error:
        decode(KEY, bad or b"", records)  # type: ignore[arg-type]  # None: a missing record
    assert error.value.layer == damage.layer
    with pytest.raises(CorruptRecord):
        record.decode_header(key_of(2), header)


@given(st.integers(0, 2), st.data())
def test_other_bytes_in_any_place_are_damage(n: int, data: st.DataObject) -> None:
    header, layers = encode(KEY, chunk())
    records = [header, *layers]
    ends = st.integers(0, len(records[n]))
    start, stop = sorted((data.draw(ends), data.draw(ends)))
    bad = records[n][:start] + data.draw(st.binary(max_size=200)) + records[n][stop:]
    assume(bad != records[n])
    records[n] = bad
    with pytest.raises((CorruptRecord, StoreVersion)):
        decode(KEY, records[0], records[1:])


def test_a_field_that_agrees_with_no_other_is_damage() -> None:
    header, _ = encode(KEY, chunk())
    for offset, kind, values in LIES:
        for value in values:
            with pytest.raises(CorruptRecord):
                record.decode_header(KEY, relabelled(KEY, header, (offset, kind, value)))


def test_lies_that_agree_with_each_other_are_damage() -> None:
    """float16 for bfloat16, K for D or C: as many bytes; twice the tokens and twice the bytes of each layer."""
    header, layers = encode(KEY, chunk(tokens=3, dtype=torch.bfloat16))
    for lies in (
        [(6, "B", 2)],
        [(12, "B", 4), (16, "B", 2)],
        [(12, "B", 1), (20, "B", 6)],
        [(20, "I", 6), *((at, "Q", 2 * len(layers[0])) for at in (52, 68, 84))],
    ):
        with pytest.raises(CorruptRecord) as error:
            decode(KEY, relabelled(KEY, header, *lies), layers)
        assert error.value.layer == 0


def test_the_bytes_of_a_record_are_those_of_the_format() -> None:
    """Other bytes make stored KV useless: raise the format when that is intended."""
    kv = chunk(3, layers=2, kv_heads=2, head_dim=4, dtype=torch.float16)
    header, segments = encode(KEY, ChunkKV(kv.keys, kv.values, ids=(7, 0, 70_000)))
    for segment, *sides in zip(segments, kv.keys, kv.values, strict=True):
        assert segment == b"".join(side.contiguous().numpy().tobytes() for side in sides)
    fields = struct.pack("<4sHHIIII8sI16s", b"BSKV", 3, 2, 2, 2, 4, 3, b"raw", 0, bytes(16))
    body = fields
    for l, segment in enumerate(segments):
        seed = xxhash.xxh3_64_intdigest(KEY + fields + struct.pack("<I", l))
        body += struct.pack("<QQ", len(segment), xxhash.xxh3_64_intdigest(segment, seed))
    assert header == sealed(KEY, body + struct.pack("<III", 7, 0, 70_000))


def test_another_format_is_not_damage() -> None:
    header, later = encode(KEY, chunk())[0], struct.pack("<4sH", b"BSKV", 7)
    relabels = [relabelled(KEY, header, (4, "H", version)) for version in (1, 2, 6, 65535)]
    for raw in (*relabels, sealed(KEY, later + b"any other fields" * 9), sealed(KEY, later)):
        with pytest.raises(StoreVersion):
            record.decode_header(KEY, raw)


def test_token_ids_are_read_back_or_refused() -> None:
    plain, layers = encode(KEY, chunk(tokens=3))
    kv = ChunkKV(chunk(tokens=3).keys, chunk(tokens=3).values, ids=(7, 0, 70_000))
    header, layers = encode(KEY, kv)
    assert record.decode_header(KEY, header).token_ids == (7, 0, 70_000)
    assert len(header) == len(plain) + 12
    assert same(decode(KEY, header, layers), kv)
    for bad in (sealed(KEY, header[:-12]), sealed(KEY, header[:-8] + b"\0\0\0\0")):
        with pytest.raises(CorruptRecord):
            record.decode_header(KEY, bad)


some_key = partial(chunk_key, fingerprint="f", kv_context=(1, 2), ids=(3, 4), dtype="bfloat16", namespace="")


def test_a_key_depends_on_everything_that_the_tensors_depend_on_and_is_stable() -> None:
    """Another first value orphans every store: raise the number in key.py's `person` when it is intended."""
    changes: list[dict[str, Any]] = [
        {"fingerprint": "g"},
        {"kv_context": (1, 2, 3), "ids": (4,)},  # the border between the two counts
        {"ids": (4, 3)},
        {"dtype": "float16"},
        {"fingerprint": "fb", "dtype": "float16"},
        {"namespace": "a"},
        {"namespace": "b"},
    ]
    one, *_, a, b = found = [some_key(), *(some_key(**change) for change in changes)]
    assert one.hex() == "80383814a3e681599c02afec55495af4b21b3ec2a8ac78bf3dd27184"
    assert some_key(kv_context=[1, 2], ids=range(3, 5)) == one
    assert len(set(found)) == len(found)
    assert len(a) == len(b) == KEY_BYTES
    assert a[:TAG_BYTES] == namespace_tag("a") != b[:TAG_BYTES]
    assert a[TAG_BYTES:] != b[TAG_BYTES:]
