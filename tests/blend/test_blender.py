"""Requests against stores that hold everything, something, nothing, or damage; the model is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve.blend.blender import Blender
from blendserve.config import BlendConfig
from blendserve.core import BlendReport, Chunk, Prompt, Reason, Span, TokenIds
from blendserve.errors import ConfigError
from blendserve.store import KVStore, LMDBStore, MemoryStore
from blendserve.store.codecs.base import Coding
from blendserve.store.memory import MemoryChunk
from blendserve.store.record import Coded
from tests.support.blending import LeakyStore, assert_near, check_report, model_logits, some_ids, some_prompt
from tests.support.damages import DAMAGES
from tests.support.models import fresh_model, tiny_adapter
from tests.support.stores import ROOMY, FaultyStore, OnDisk

PREFIX = some_ids(5)
PROMPT = some_prompt([14, 9, 0, 20, 1, 9])
CHUNKS = [chunk.ids for chunk in PROMPT.chunks]
BLEND = BlendConfig(method="blend")


def blender(
    store: KVStore, context: TokenIds = PREFIX, dtype: Any = torch.float32, **options: Any
) -> Blender:
    return Blender(tiny_adapter("llama", dtype), "fingerprint", store, PREFIX, context, **options)


def filled(store: KVStore) -> Blender:
    made = blender(store)
    made.precompute(CHUNKS)
    return made


def found(report: BlendReport) -> tuple[int, int, int]:
    check_report(report, PROMPT)
    return report.chunks_hit, report.chunks_missing, report.chunks_corrupt


def test_the_same_request_from_memory_a_warm_store_and_a_reopened_one(tmp_path: Path) -> None:
    memory = filled(MemoryStore(ROOMY)).run(PROMPT, BLEND)
    with LMDBStore(tmp_path / "kv", ROOMY) as store:
        warm = filled(store).run(PROMPT, BLEND)
    with LMDBStore(tmp_path / "kv", ROOMY, read_only=True) as store:
        cold = blender(store).run(PROMPT, BLEND)
    for other in (warm, cold):
        assert torch.equal(memory.prefilled.logits, other.prefilled.logits)
        assert torch.equal(memory.prefilled.cache.keys, other.prefilled.cache.keys)
        assert memory.report == other.report
    assert memory.report.blended
    assert memory.report.bytes_loaded == 58 * tiny_adapter("llama").kv_bytes_per_token


def test_missing_chunks_are_computed_and_written_back() -> None:
    maker = blender(MemoryStore(ROOMY))
    first = maker.run(PROMPT, BLEND)
    assert_near(first.prefilled.logits, model_logits(maker.adapter, PROMPT))
    assert found(first.report) == (0, 5, 0)
    assert first.absent == ((), *(ids for ids in CHUNKS if ids))
    assert maker.remember(first.absent) == 6
    second = maker.run(PROMPT, BLEND)
    assert (found(second.report), second.absent) == ((5, 0, 0), ())
    assert_near(second.prefilled.logits, filled(MemoryStore(ROOMY)).run(PROMPT, BLEND).prefilled.logits)


def break_layer(store: LeakyStore, maker: Blender) -> None:
    store.broken = {maker.key(CHUNKS[1]), maker.key(PREFIX, ())}


def put_wrong_record(store: LeakyStore, maker: Blender) -> None:
    """Of another chunk, under a chunk's key."""
    store.put(maker.key(CHUNKS[1]), maker.computer(PREFIX).compute([some_ids(3)])[0])


def put_foreign_codec(store: LeakyStore, maker: Blender) -> None:
    coded: Any = store.coded(maker.key(CHUNKS[1]))
    alien = Coded(coded.shape, Coding("alien", 3, bytes(range(16))), coded.segments)
    store.put_coded(maker.key(CHUNKS[1]), alien)


@pytest.mark.parametrize(
    ("damage", "counts", "kind", "absent"),
    [
        (break_layer, (4, 0, 1), "corrupt", ((), CHUNKS[1])),
        (put_wrong_record, (4, 0, 1), "corrupt", (CHUNKS[1],)),
        (put_foreign_codec, (4, 1, 0), "codec", (CHUNKS[1],)),
    ],
)
def test_an_unusable_chunk_counts_as_missing_and_is_replaced(
    damage: Callable[[LeakyStore, Blender], None],
    counts: tuple[int, int, int],
    kind: str,
    absent: tuple[TokenIds, ...],
) -> None:
    store = LeakyStore()
    maker = filled(store)
    whole = maker.run(PROMPT, BLEND)
    damage(store, maker)
    hurt = maker.run(PROMPT, BLEND)
    assert found(hurt.report) == counts
    assert [(unusable.chunk, unusable.kind) for unusable in hurt.report.unusable] == [(1, kind)]
    assert hurt.report.to_dict()["unusable"][0]["kind"] == kind
    assert hurt.absent == absent
    as_if_missing = filled(MemoryStore(ROOMY))
    for ids in absent:
        as_if_missing.store.delete(maker.key(ids) if ids else maker.key(PREFIX, ()))
    assert torch.equal(hurt.prefilled.logits, as_if_missing.run(PROMPT, BLEND).prefilled.logits)
    assert maker.remember(hurt.absent) == len(absent)
    healed = maker.run(PROMPT, BLEND)
    assert_near(healed.prefilled.logits, whole.prefilled.logits)
    assert (found(healed.report), healed.report.unusable) == ((5, 0, 0), ())


@pytest.mark.parametrize("name", ["flipped header", "flipped layer 1"])
def test_a_flipped_bit_on_disk_is_found_and_replaced(tmp_path: Path, name: str) -> None:
    place = OnDisk(tmp_path, ROOMY)
    with place.open() as store:
        maker = filled(store)
        whole = maker.run(PROMPT, BLEND)
    place.damage(maker.key(CHUNKS[3]), next(damage for damage in DAMAGES if damage.name == name))
    with place.open() as store:
        maker = blender(store)
        hurt = maker.run(PROMPT, BLEND)
        assert found(hurt.report) == (4, 0, 1)
        maker.remember(hurt.absent)
        assert not store.verify().bad
        assert torch.equal(maker.run(PROMPT, BLEND).prefilled.logits, whole.prefilled.logits)


def test_kv_of_another_model_tenant_prefix_or_dtype_is_not_found() -> None:
    store = MemoryStore(ROOMY)
    filled(store)
    others = [
        Blender(tiny_adapter("llama"), "another", store, PREFIX, PREFIX),
        blender(store, namespace="tenant"),
        blender(store, context=()),
        blender(store, dtype=torch.bfloat16),
    ]
    assert [found(other.run(PROMPT, BLEND).report) for other in others] == [(0, 5, 0)] * 4


def test_without_its_store_a_request_is_full_prefill() -> None:
    store = FaultyStore(MemoryStore(ROOMY))
    maker = filled(store)
    store.down = True
    done = maker.run(PROMPT, BLEND)
    assert_near(done.prefilled.logits, model_logits(maker.adapter, PROMPT))
    assert found(done.report) == (0, 0, 0)
    assert done.report.reason


@pytest.mark.parametrize("layers", [(), (4,), (1, 9)])
def test_a_check_layer_that_the_reader_does_not_have_is_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        blender(MemoryStore(ROOMY)).run(PROMPT, BlendConfig(policy="deviation", check_layers=layers))
    assert error.value.setting == "blend.check_layers"


def test_precompute_skips_stored_chunks_and_duplicates_and_counts() -> None:
    store, seen = MemoryStore(ROOMY), list[tuple[int, int]]()
    maker = blender(store)
    first = maker.precompute([*CHUNKS, CHUNKS[0]], lambda done, total: seen.append((done, total)))
    assert (first.chunks, first.computed, first.skipped, first.tokens) == (6, 6, 0, 5 + 53)
    assert first.bytes == 58 * maker.adapter.kv_bytes_per_token == store.stats().bytes
    assert seen == [(14, 53), (23, 53), (43, 53), (44, 53), (53, 53)]
    second = maker.precompute([*CHUNKS, some_ids(4, 77)])
    assert (second.computed, second.skipped, second.tokens) == (1, 6, 4)
    assert maker.missing(CHUNKS) == []


def test_threads_get_what_each_gets_alone() -> None:
    maker = filled(MemoryStore(ROOMY))
    chunks = tuple(map(Chunk, CHUNKS))
    prompts = [Prompt(PREFIX, chunks[i:] + chunks[:i], PROMPT.suffix) for i in range(6)]
    options = [BlendConfig(policy=policy) for policy in ("query", "deviation", "random")]
    jobs = [(prompt, option) for prompt in prompts for option in options] * 2
    alone = [maker.run(*job).prefilled.logits for job in jobs]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda job: maker.run(*job).prefilled.logits, jobs))
    assert all(map(torch.equal, alone, together))
    assert not torch.equal(alone[0], alone[3])


@pytest.mark.parametrize(
    ("options", "damaged", "down", "codes"),
    [
        ({"method": "blend"}, (), False, "stored | stored, not stored, moved, not stored, moved"),
        ({"method": "prefix"}, (), False, "stored | stored" + 4 * ", not looked up"),
        ({"method": "full"}, (), False, "not looked up | not looked up" + 4 * ", not looked up"),
        ({"method": "blend"}, (), True, "not looked up | not looked up" + 4 * ", not looked up"),
        ({"method": "blend"}, (3,), False, "stored | stored, not stored, unusable, not stored, moved"),
        ({"near": True, "method": "blend"}, (), False, "stored | stored, no donor, moved, no donor, moved"),
    ],
)
def test_parts_cover_the_prompt_in_order_each_with_its_reason(
    options: dict[str, Any], damaged: tuple[int, ...], down: bool, codes: str
) -> None:
    """The first, fourth and last chunk are stored."""
    store = FaultyStore(MemoryStore(ROOMY))
    made = blender(store)
    made.precompute([CHUNKS[i] for i in (0, 3, 5)])
    store.damaged, store.down = {made.key(CHUNKS[i]) for i in damaged}, down
    done = made.run(PROMPT, BlendConfig(**options))
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


def state_of(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors, and everything else that a borrower might leave changed."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    return {name: tensor.clone() for name, tensor in tensors.items()}, {
        "config": model.config.to_dict(),
        "training": [module.training for module in model.modules()],
        "grad": [parameter.requires_grad for parameter in model.parameters()],
        "hooks": [sorted(getattr(module, hook)) for module in model.modules() for hook in hooks],
        "attributes": [sorted(vars(module)) for module in model.modules()],
    }


def test_the_model_is_as_it_was_after_requests_damage_and_an_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter, store = fresh_model("llama"), LeakyStore()
    tensors, rest = state_of(adapter.model)
    maker = Blender(adapter, "fingerprint", store, PREFIX, PREFIX)
    maker.precompute(CHUNKS)
    good = maker.run(PROMPT, BLEND)
    for policy in ("query", "deviation", "all"):
        maker.run(PROMPT, BlendConfig(policy=policy))
    store.broken = {maker.key(CHUNKS[1])}
    assert maker.run(PROMPT, BLEND).report.chunks_corrupt == 1
    store.broken = set()

    def fails(self: Any, l: int) -> Any:
        if l == 2:
            raise KeyboardInterrupt
        return self.kv.keys[l], self.kv.values[l]

    with monkeypatch.context() as patch:
        patch.setattr(MemoryChunk, "layer", fails)
        with pytest.raises(KeyboardInterrupt):
            maker.run(PROMPT, BLEND)
    after, others = state_of(adapter.model)
    assert others == rest
    assert after.keys() == tensors.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in tensors.items())
    assert torch.equal(maker.run(PROMPT, BLEND).prefilled.logits, good.prefilled.logits)
