"""Requests against stores that hold everything, something, nothing, or damage; the model is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve.blend.blender import Blender
from blendserve.config import BlendConfig
from blendserve.core import BlendReport, Reason, Span, TokenIds, run
from blendserve.errors import ConfigError
from blendserve.store import ChunkRecord, MemoryStore, read_record
from blendserve.store.codecs.base import Coding
from blendserve.store.view import RecordView
from tests.support.blending import (
    LeakyStore,
    assert_near,
    check_report,
    model_logits,
    some_ids,
    some_prompt,
    tiny_blender,
)
from tests.support.damages import DAMAGES, Damage
from tests.support.models import fresh_model, tiny_adapter
from tests.support.places import OnDisk
from tests.support.stores import ROOMY, FaultyStore, put_kv

PROMPT = some_prompt([14, 9, 0, 20, 1, 9])
CHUNKS = [chunk.ids for chunk in PROMPT.chunks]
BLEND = BlendConfig(method="blend")


def named(damage: str) -> Damage:
    return next(one for one in DAMAGES if one.name == damage)


def found(report: BlendReport) -> tuple[int, int, int]:
    check_report(report, PROMPT)
    return report.chunks_hit, report.chunks_missing, report.chunks_corrupt


def flip_header(place: OnDisk, maker: Blender) -> None:
    place.damage(maker.key(CHUNKS[1]), named("flipped header"))


def flip_layers(place: OnDisk, maker: Blender) -> None:
    place.damage(maker.key(CHUNKS[1]), named("flipped layer 1"))


def put_wrong_record(place: OnDisk, maker: Blender) -> None:
    """Of another chunk, under a chunk's key."""
    with place.open() as store:
        put_kv(store, maker.key(CHUNKS[1]), maker.writer.chunks.compute([some_ids(3)])[0])


def put_foreign_codec(place: OnDisk, maker: Blender) -> None:
    with place.open() as store:
        key = maker.key(CHUNKS[1])
        record: Any = read_record(store, key)
        coding = Coding("alien", 3, bytes(range(16)))
        store.put(key, ChunkRecord.from_segments(key, record.shape, coding, record.segments()))


@pytest.mark.parametrize(
    ("damage", "counts", "kind", "absent"),
    [
        (flip_header, (4, 0, 1), "corrupt", (CHUNKS[1],)),
        (flip_layers, (4, 0, 1), "corrupt", (CHUNKS[1],)),
        (put_wrong_record, (4, 0, 1), "corrupt", (CHUNKS[1],)),
        (put_foreign_codec, (4, 1, 0), "codec", (CHUNKS[1],)),
    ],
)
def test_an_unusable_chunk_counts_as_missing_and_is_replaced(
    damage: Callable[[OnDisk, Blender], None],
    counts: tuple[int, int, int],
    kind: str,
    absent: tuple[TokenIds, ...],
    tmp_path: Path,
) -> None:
    place, as_if_missing = OnDisk(tmp_path, ROOMY), tiny_blender(MemoryStore(ROOMY), *CHUNKS)
    whole = as_if_missing.run(PROMPT, BLEND)
    for ids in absent:
        as_if_missing.store.delete([as_if_missing.key(ids)])
    with place.open() as store:
        maker = tiny_blender(store, *CHUNKS)
    damage(place, maker)
    with place.open() as store:
        maker = tiny_blender(store)
        hurt = maker.run(PROMPT, BLEND)
        assert found(hurt.report) == counts
        assert [(unusable.chunk, unusable.kind) for unusable in hurt.report.unusable] == [(1, kind)]
        assert tuple(chunk.ids for chunk in hurt.missing) == absent
        assert torch.equal(hurt.result.logits, as_if_missing.run(PROMPT, BLEND).result.logits)
        assert run(maker.writer.write_back(hurt.missing)) == len(absent)
        healed = maker.run(PROMPT, BLEND)
        assert_near(healed.result.logits, whole.result.logits)
        assert (found(healed.report), healed.report.unusable) == ((5, 0, 0), ())
        assert not store.verify().bad


def test_kv_of_another_model_tenant_prefix_or_dtype_is_not_found() -> None:
    store = MemoryStore(ROOMY)
    tiny_blender(store, *CHUNKS)
    others = [
        tiny_blender(store, fingerprint="another"),
        tiny_blender(store, namespace="tenant"),
        tiny_blender(store, context=()),
        tiny_blender(store, adapter=tiny_adapter("llama", torch.bfloat16)),
    ]
    assert [found(other.run(PROMPT, BLEND).report) for other in others] == [(0, 5, 0)] * 4


@pytest.mark.parametrize("layers", [(), (4,), (1, 9)])
def test_a_check_layer_that_the_reader_does_not_have_is_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        tiny_blender(MemoryStore(ROOMY)).run(PROMPT, BlendConfig(policy="deviation", check_layers=layers))
    assert error.value.setting == "blend.check_layers"


def test_precompute_skips_stored_chunks_and_duplicates_and_counts() -> None:
    store, seen = MemoryStore(ROOMY), list[tuple[int, int]]()
    maker = tiny_blender(store)
    first = maker.writer.precompute([*CHUNKS, CHUNKS[0]], lambda done, total: seen.append((done, total)))
    assert (first.chunks, first.computed, first.skipped, first.tokens) == (5, 5, 0, 53)
    assert first.bytes == 53 * maker.model.kv_bytes_per_token == store.stats().bytes
    assert seen == [(14, 53), (23, 53), (43, 53), (44, 53), (53, 53)]
    second = maker.writer.precompute([*CHUNKS, some_ids(4, 77)])
    assert (second.computed, second.skipped, second.tokens) == (1, 5, 4)
    assert maker.writer.missing(CHUNKS) == []


@pytest.mark.parametrize(
    ("options", "damaged", "down", "codes"),
    [
        ({"method": "blend"}, (), False, "stored | stored, not stored, moved, not stored, moved"),
        ({"method": "prefix"}, (), False, "stored | stored" + 4 * ", not looked up"),
        ({"method": "full"}, (), False, "not looked up | not looked up" + 4 * ", not looked up"),
        ({"method": "blend"}, (), True, "stored | unusable" + 4 * ", unusable"),
        ({"method": "blend"}, (3,), False, "stored | stored, not stored, unusable, not stored, moved"),
        ({"near": True, "method": "blend"}, (), False, "stored | stored, no donor, moved, no donor, moved"),
    ],
)
def test_parts_cover_the_prompt_in_order_each_with_its_reason(
    options: dict[str, Any], damaged: tuple[int, ...], down: bool, codes: str
) -> None:
    """The first, fourth and last chunk are stored."""
    store = FaultyStore(MemoryStore(ROOMY))
    made = tiny_blender(store, *(CHUNKS[i] for i in (0, 3, 5)))
    store.damaged, store.down = {made.key(CHUNKS[i]) for i in damaged}, down
    done = made.run(PROMPT, BlendConfig(**options))
    if down:
        assert_near(done.result.logits, model_logits(made.model, PROMPT))
    parts = prefix, *passages, suffix = done.explanation.parts
    assert [part.passage for part in parts] == [None, 0, 1, 3, 4, 5, None]  # but for the one without tokens
    spans = [Span(0, 5), *(span for span in PROMPT.spans if len(span)), Span(58, len(PROMPT))]
    assert [part.span for part in parts] == spans
    assert all(part.reason for part in parts)
    assert f"{prefix.code.value} | " + ", ".join(part.code.value for part in passages) == codes
    assert suffix.code is Reason.SUFFIX
    for part in (prefix, *passages):
        assert bool(part.tier) == (part.code in (Reason.STORED, Reason.MOVED))
    assert done.report.chunks_corrupt == len(damaged)


def test_weights_stay_and_answers_are_the_same_after_damage_and_an_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter, store = fresh_model("llama"), LeakyStore()
    before = {name: tensor.clone() for name, tensor in adapter.reference.state_dict().items()}
    maker = tiny_blender(store, *CHUNKS, adapter=adapter)
    good = maker.run(PROMPT, BLEND)
    for policy in ("deviation", "all"):
        maker.run(PROMPT, BlendConfig(policy=policy))
    store.broken = {maker.key(CHUNKS[1])}
    assert maker.run(PROMPT, BLEND).report.chunks_corrupt == 1
    store.broken = set()

    layer = RecordView.layer

    def fails(self: RecordView, l: int) -> Any:
        if l == 2:
            raise KeyboardInterrupt
        return layer(self, l)

    with monkeypatch.context() as patch:
        patch.setattr(RecordView, "layer", fails)
        with pytest.raises(KeyboardInterrupt):
            maker.run(PROMPT, BLEND)
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter.reference.state_dict().items())
    assert torch.equal(maker.run(PROMPT, BLEND).result.logits, good.result.logits)
