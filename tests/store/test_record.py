"""Bytes to chunk and back, in both formats; any damage is told."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable, Mapping

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.core import ChunkKV
from blendserve.errors import CorruptRecord, StoreError, StoreVersion
from blendserve.store import record
from blendserve.store.chunk import StoredChunk
from blendserve.store.codecs.base import Coding, Undecodable
from blendserve.store.codecs.raw import Raw
from tests.store import format1
from tests.store.helpers import chunk, key_of, same
from tests.support.damages import BYTES, LIES, Damage

KEY = key_of(1)
Encode = Callable[[bytes, ChunkKV], "tuple[bytes, list[bytes]]"]
sizes = st.fixed_dictionaries(
    {
        "tokens": st.integers(0, 9),
        "layers": st.integers(1, 4),
        "kv_heads": st.integers(1, 3),
        "head_dim": st.integers(1, 8),
        "dtype": st.sampled_from(list(record.CODE_OF)),
        "seed": st.integers(0, 5),
    }
)


def encode(key: bytes, kv: ChunkKV) -> tuple[bytes, list[bytes]]:
    """As today's format has it."""
    header, segments = record.encode(key, kv, Raw())
    return record.encode_header(key, header), [bytes(segment) for segment in segments]


def encode_2(key: bytes, kv: ChunkKV) -> tuple[bytes, list[bytes]]:
    """As format 2 had it: today's without token ids, by another number, which every checksum covers."""
    header, layers = encode(key, ChunkKV(kv.keys, kv.values))
    fields = header[:4] + struct.pack("<H", 2) + header[6:52]
    body = fields
    for l, raw in enumerate(layers):
        seed = xxhash.xxh3_64_intdigest(key + fields + struct.pack("<I", l))
        body += struct.pack("<QQ", len(raw), xxhash.xxh3_64_intdigest(raw, seed))
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(key + body)), layers


FORMATS: dict[int, Encode] = {1: format1.encode, 2: encode_2, 3: encode}
both_formats = pytest.mark.parametrize("encode", FORMATS.values(), ids=FORMATS)


def decode(key: bytes, header: bytes, layers: list[bytes]) -> ChunkKV:
    view = StoredChunk(key, record.decode_header(key, header), lambda l: layers[l])
    parts = [view.layer(l) for l in range(view.n_layers)]
    return ChunkKV(*(torch.stack(part) for part in zip(*parts, strict=True)))


def sealed(body: bytes) -> bytes:
    """The header with a checksum that fits it."""
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(KEY + body))


def changed(header: bytes, changes: Mapping[int, tuple[str, object]]) -> bytes:
    """The header with other fields, by offset, under a checksum that fits."""
    body = bytearray(header[:-8])
    for offset, (kind, value) in changes.items():
        struct.pack_into("<" + kind, body, offset, value)
    return sealed(bytes(body))


@both_formats
@given(size=sizes)
def test_round_trip(encode: Encode, size: dict[str, int]) -> None:
    kv = chunk(**size)  # type: ignore[arg-type]
    assert same(decode(KEY, *encode(KEY, kv)), kv)


def test_a_header_says_what_is_stored() -> None:
    kv = chunk(tokens=7, layers=2, kv_heads=3, head_dim=4, dtype=torch.float16)
    header = record.decode_header(KEY, encode(KEY, kv)[0])
    assert (header.shape.dtype, header.shape.n_layers, header.shape.n_tokens) == (torch.float16, 2, 7)
    assert (header.shape.n_kv_heads, header.shape.head_dim) == (3, 4)
    assert header.coding == Coding("raw")
    assert header.lengths == (336, 336)
    assert header.n_bytes == header.shape.n_bytes == kv.n_bytes == 672


def test_the_layout_is_as_it_is_written_down() -> None:
    """Header and payload against bytes put together by hand."""
    kv = chunk(tokens=3, layers=2)
    header, layers = encode(KEY, kv)
    for l, raw in enumerate(layers):
        flat = [*kv.keys[l].flatten().tolist(), *kv.values[l].flatten().tolist()]
        assert raw == struct.pack(f"<{len(flat)}f", *flat)
    fields = b"BSKV" + struct.pack("<HHIIII", 3, 3, 2, 2, 4, 3) + b"raw\0\0\0\0\0" + bytes(4 + 16)
    assert header[:52] == fields
    assert struct.unpack_from("<QxxxxxxxxQ", header, 52) == (len(layers[0]), len(layers[1]))
    for l, raw in enumerate(layers):
        seed = xxhash.xxh3_64_intdigest(KEY + fields + struct.pack("<I", l))
        assert struct.unpack_from("<Q", header, 52 + 16 * l + 8) == (xxhash.xxh3_64_intdigest(raw, seed),)
    assert header[84:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(KEY + header[:84]))


@both_formats
@settings(max_examples=300)
@given(data=st.data())
def test_any_flip_or_cut_is_told(encode: Encode, data: st.DataObject) -> None:
    header, layers = encode(KEY, chunk(tokens=2, layers=2))
    records = [header, *layers]
    n = data.draw(st.integers(0, len(records) - 1), "record")
    bad = bytearray(records[n])
    if data.draw(st.booleans(), "flip"):
        bit = data.draw(st.integers(0, 8 * len(bad) - 1), "bit")
        bad[bit // 8] ^= 1 << bit % 8
    else:
        bad = bad[: data.draw(st.integers(0, len(bad) - 1), "length")]
    records[n] = bytes(bad)
    with pytest.raises(CorruptRecord):
        decode(KEY, records[0], records[1:])


@both_formats
def test_bytes_too_many_are_told(encode: Encode) -> None:
    header, layers = encode(KEY, chunk())
    with pytest.raises(CorruptRecord):
        record.decode_header(KEY, header + b"\0")
    with pytest.raises(CorruptRecord, match="its header says"):
        decode(KEY, header, [layers[0] + b"\0", *layers[1:]])


@both_formats
def test_a_header_under_another_key_and_swapped_layers_are_told(encode: Encode) -> None:
    header, layers = encode(KEY, chunk())
    with pytest.raises(CorruptRecord):
        record.decode_header(key_of(2), header)
    with pytest.raises(CorruptRecord):
        decode(KEY, header, layers[::-1])


@both_formats
@pytest.mark.parametrize("damage", BYTES, ids=str)
def test_damage_is_told_by_the_record_that_has_it(encode: Encode, damage: Damage) -> None:
    header, layers = encode(KEY, chunk())
    bad, *records = damage.change(KEY, [header, *layers])
    if damage.layer is None:
        with pytest.raises(CorruptRecord):
            record.decode_header(KEY, bad or b"")
        return
    view = StoredChunk(KEY, record.decode_header(KEY, bad or b""), records.__getitem__)
    for l in range(damage.layer):
        view.layer(l)
    with pytest.raises(CorruptRecord):
        view.layer(damage.layer)


@pytest.mark.parametrize(
    ("version", "offset", "kind", "value"),
    [(n, *lie[:2], value) for n in (1, 2) for lie in LIES[n] for value in lie[2]],
)
def test_a_field_that_fits_no_other_is_told(version: int, offset: int, kind: str, value: object) -> None:
    header, _ = FORMATS[version](KEY, chunk())
    with pytest.raises(CorruptRecord):
        record.decode_header(KEY, changed(header, {offset: (kind, value)}))


@pytest.mark.parametrize("lies", [{6: 2}, {12: 4, 16: 2}, {12: 1, 20: 6}])
@both_formats
def test_another_reading_of_the_same_bytes_is_told(encode: Encode, lies: dict[int, int]) -> None:
    """float16 for bfloat16, K for D, K for C: as many bytes, under a checksum that fits."""
    header, layers = encode(KEY, chunk(tokens=3, dtype=torch.bfloat16))
    with pytest.raises(CorruptRecord, match="layer 0 fails"):
        decode(KEY, changed(header, {offset: ("B", value) for offset, value in lies.items()}), layers)


@pytest.mark.parametrize(("version", "lengths"), [(1, [24]), (2, [52, 68, 84]), (3, [52, 68, 84])])
def test_fields_that_lie_together_do_not_fit_the_payload(version: int, lengths: list[int]) -> None:
    """Twice the tokens and twice the bytes agree with each other, but not with the layer that is there."""
    header, layers = FORMATS[version](KEY, chunk(tokens=3))
    lies = {20: ("I", 6)} | {offset: ("Q", 2 * len(layers[0])) for offset in lengths}
    with pytest.raises(CorruptRecord, match="its header says"):
        decode(KEY, changed(header, lies), layers)


@pytest.mark.parametrize("version", [4, 65535])
def test_a_newer_format_says_upgrade(version: int) -> None:
    with pytest.raises(StoreVersion, match=f"format {version}.*upgrade"):
        record.decode_header(KEY, changed(encode(KEY, chunk())[0], {4: ("H", version)}))


def test_a_newer_header_may_be_longer_or_shorter() -> None:
    for rest in (b"whatever comes" * 9, b""):
        with pytest.raises(StoreVersion, match="format 7"):
            record.decode_header(KEY, sealed(struct.pack("<4sH", b"BSKV", 7) + rest))


def test_token_ids_are_told_again_or_refused() -> None:
    kv = ChunkKV(chunk(tokens=3).keys, chunk(tokens=3).values, ids=(7, 0, 70_000))
    header, layers = encode(KEY, kv)
    assert record.decode_header(KEY, header).ids == (7, 0, 70_000)
    assert len(header) == len(encode(KEY, chunk(tokens=3))[0]) + 12
    assert same(decode(KEY, header, layers), kv)
    for body in (header[:-12], header[:-8] + b"\0\0\0\0"):  # of two tokens, of four
        with pytest.raises(CorruptRecord, match="makes no sense"):
            record.decode_header(KEY, sealed(body))
    with pytest.raises(CorruptRecord, match="format 2 does not"):
        record.decode_header(KEY, changed(header, {4: ("H", 2)}))
    with pytest.raises(StoreError, match="ids of all of them or of none"):
        record.validate_kv(ChunkKV(kv.keys, kv.values, ids=(1,)))


def test_a_codec_that_is_not_here_is_no_damage() -> None:
    header, layers = encode(KEY, chunk())
    other = changed(header, {24: ("8s", b"later"), 32: ("I", 5), 52: ("Q", 3)})
    assert record.decode_header(KEY, other).coding.level == 5
    with pytest.raises(Undecodable, match="no codec 'later'"):
        decode(KEY, other, layers)


def test_a_coding_that_fits_no_header_cannot_be_made() -> None:
    for wrong in ({"codec": ""}, {"codec": "ninechars"}, {"codec": "raw", "tables": b"short"}):
        with pytest.raises(ValueError, match="bytes"):
            Coding(**wrong)


def test_reading_warns_nobody_and_leaves_the_filters_alone() -> None:
    code = (
        "import warnings, torch; before = list(warnings.filters)\n"
        "from blendserve.store.codecs import raw\n"
        "warnings.simplefilter('error')\n"
        "assert torch.frombuffer(memoryview(b'abcd'), dtype=torch.float32).numel() == 1\n"
        "warnings.simplefilter('default'); assert not [f for f in warnings.filters if 'buffer' in str(f)]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
