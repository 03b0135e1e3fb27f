"""Requests against stores that hold everything, something or damage, are closed, or lie behind a slow link."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import count, islice
from typing import Any

import pytest
import torch

from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.cost import CostModel
from blendserve.blend.policies import AUTO_MIN_RATIO
from blendserve.config import BlendConfig
from blendserve.core import BlendReport, Span, Steps, run
from blendserve.errors import ConfigError
from blendserve.fetch import TieredStore
from blendserve.models.kv_cache import KVCache
from blendserve.store import ChunkRecord, MemoryStore, read_record
from blendserve.store.codecs.base import SLOW, Coding
from tests.support.blending import (
    assert_near,
    check_report,
    missing,
    model_logits,
    some_ids,
    some_prompt,
    tiny_blender,
)
from tests.support.links import ScriptedSource, slow_source
from tests.support.models import fresh_model, tiny_decoder
from tests.support.stores import ROOMY, FaultyStore, put_kv

PROMPT = some_prompt([14, 9, 0, 20, 1, 9])
CHUNKS = [chunk.ids for chunk in PROMPT.chunks]
FILLED = 5  # chunks that are not empty
BLEND = BlendConfig(method="blend")


def found(report: BlendReport) -> tuple[int, int, int]:
    check_report(report, PROMPT)
    return report.chunks_hit, report.chunks_missing, report.chunks_corrupt


def damage(how: str, store: MemoryStore, maker: Blender) -> None:
    key, record = maker.key(CHUNKS[1]), read_record(store, maker.key(CHUNKS[1]))
    assert record
    if how == "another chunk's KV":
        put_kv(store, key, maker.writer.chunks.compute([some_ids(3)])[0])
    elif how == "another model's KV":
        layers, shape = record.segments()[:-1], replace(record.shape, layers=record.shape.layers[:-1])
        store.put(key, ChunkRecord.from_segments(key, shape, record.coding, layers))
    else:
        coding = Coding("alien", 3, bytes(range(16)))
        store.put(key, ChunkRecord.from_segments(key, record.shape, coding, record.segments()))


@pytest.mark.parametrize(
    ("how", "counts", "kind"),
    [
        ("another chunk's KV", (4, 0, 1), "corrupt"),
        ("another model's KV", (4, 0, 1), "corrupt"),
        ("a foreign codec", (4, 1, 0), "codec"),
    ],
)
def test_an_unusable_chunk_counts_as_missing_and_is_replaced(
    how: str, counts: tuple[int, int, int], kind: str
) -> None:
    store = MemoryStore(ROOMY)
    maker, as_if_missing = tiny_blender(store, *CHUNKS), tiny_blender(None, *CHUNKS)
    whole = maker.run(PROMPT, BLEND)
    as_if_missing.store.delete([as_if_missing.key(CHUNKS[1])])
    damage(how, store, maker)
    hurt = maker.run(PROMPT, BLEND)
    assert found(hurt.report) == counts
    assert [(unusable["chunk"], unusable["kind"]) for unusable in hurt.report.unusable] == [(1, kind)]
    assert [chunk.ids for chunk in hurt.missing] == [CHUNKS[1]]
    assert torch.equal(hurt.result.logits, as_if_missing.run(PROMPT, BLEND).result.logits)
    assert run(maker.writer.write_back(hurt.missing)) == 1
    healed = maker.run(PROMPT, BLEND)
    assert_near(healed.result.logits, whole.result.logits)
    assert (found(healed.report), healed.report.unusable) == ((5, 0, 0), [])


def test_kv_of_another_model_tenant_prefix_or_dtype_is_not_found() -> None:
    store = MemoryStore(ROOMY)
    tiny_blender(store, *CHUNKS)
    others = [
        tiny_blender(store, fingerprint="another"),
        tiny_blender(store, namespace="tenant"),
        tiny_blender(store, context=()),
        tiny_blender(store, decoder=tiny_decoder("llama", torch.bfloat16)),
    ]
    assert [found(other.run(PROMPT, BLEND).report) for other in others] == [(0, 5, 0)] * 4


@pytest.mark.parametrize("layers", ["4", "1,9"])
def test_a_check_layer_that_the_reader_does_not_have_is_refused(layers: str) -> None:
    with pytest.raises(ConfigError) as error:
        tiny_blender(MemoryStore(ROOMY)).run(PROMPT, BlendConfig(policy=f"deviation[{layers}]"))
    assert error.value.setting == "blend.policy"


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
    ("options", "damaged", "down", "states"),
    [
        (
            {"method": "blend"},
            (),
            False,
            "exact | exact hit, computed absent, moved hit, computed absent, moved hit",
        ),
        ({"method": "prefix"}, (), False, "exact | exact hit" + 4 * ", computed "),
        ({"method": "full"}, (), False, "computed | computed " + 4 * ", computed "),
        (
            {"method": "blend", "near": True},
            (),
            True,
            "exact | computed unreachable" + 4 * ", computed unreachable",
        ),
        (
            {"method": "blend"},
            (3,),
            False,
            "exact | exact hit, computed absent, computed corrupt, computed absent, moved hit",
        ),
        (
            {"near": True, "method": "blend"},
            (),
            False,
            "exact | exact hit, computed absent, moved hit, computed absent, moved hit",
        ),
    ],
)
def test_spans_cover_the_prompt_in_order_each_with_its_reason(
    options: dict[str, Any], damaged: tuple[int, ...], down: bool, states: str
) -> None:
    """The first, fourth and last chunk are stored."""
    store = FaultyStore(MemoryStore(ROOMY))
    made = tiny_blender(store, *(CHUNKS[i] for i in (0, 3, 5)))
    made.finder.refresh()
    store.damaged, store.down = {made.key(CHUNKS[i]) for i in damaged}, down
    done = made.run(PROMPT, BlendConfig(**options))
    if down:
        assert_near(done.result.logits, model_logits(made.model, PROMPT))
    spans = prefix, *passages, suffix = done.report.layout
    assert [span.chunk for span in spans] == [None, 0, 1, 3, 4, 5, None]  # but for the one without tokens
    expected = [Span(0, 5), *(span for span in PROMPT.spans if len(span)), Span(58, len(PROMPT))]
    assert [Span(span.start, span.stop) for span in spans] == expected
    assert all(span.reason for span in spans)
    found = [f"{'moved' if span.is_moved else span.state} {span.lookup}" for span in passages]
    assert f"{prefix.state} | " + ", ".join(found) == states
    assert (suffix.kind, suffix.state) == ("suffix", "computed")
    assert all(bool(span.source) == span.is_read for span in spans)
    assert done.report.chunks_corrupt == len(damaged)


def test_the_models_weights_stay_as_they_are() -> None:
    decoder = fresh_model("llama")
    before = {name: tensor.clone() for name, tensor in decoder.reference.state_dict().items()}
    maker = tiny_blender(None, *CHUNKS, decoder=decoder)
    for policy in ("query", "deviation", "all"):
        maker.run(PROMPT, BlendConfig(policy=policy))
    assert all(torch.equal(tensor, before[name]) for name, tensor in decoder.reference.state_dict().items())


# Work that is closed before a layer


def advance(steps: Steps[Any], n: int) -> bool:
    """Run until it has paused n times -> whether it has, before its end."""
    return len(list(islice(steps, n))) == n


def loader_threads() -> int:
    return sum(thread.name.startswith("blendserve-") for thread in threading.enumerate())


@pytest.mark.parametrize("policy", ["query", "deviation"])
def test_a_prefill_closed_before_any_layer_leaves_nothing_open(policy: Any) -> None:
    blend, store = BLEND.with_values(policy=policy, ratio=0.5), FaultyStore(MemoryStore(ROOMY))
    made, before, n = tiny_blender(store, *CHUNKS[:-1]), loader_threads(), 0
    expected = made.run(PROMPT, blend).result.logits
    for n in count(1):
        steps = made.prefill(PROMPT, blend, cache=KVCache(made.model, len(PROMPT)))
        if not advance(steps, n):
            break
        assert store.n_open == 1
        steps.close()
        assert (store.n_open, loader_threads()) == (0, before)
    assert n == 1 + made.model.n_layers * (1 + (policy == "query"))
    assert torch.equal(made.run(PROMPT, blend).result.logits, expected)


@pytest.mark.parametrize("precompute", [False, True])
def test_a_chunk_whose_computation_is_closed_can_be_computed_by_another(precompute: bool) -> None:
    writer, last = tiny_blender(None, *CHUNKS[:-2]).writer, CHUNKS[-1]
    for n in count(1):
        steps: Any = writer.precompute_one(last, "skip") if precompute else writer.write_back(missing(last))
        if not advance(steps, n):
            break
        assert last in writer.missing(CHUNKS)
        steps.close()
    assert last not in writer.missing(CHUNKS)
    assert run(writer.write_back(missing(last))) == 0


# Chunks on another machine


def over_a_slow_link(row_s: float = 1e-3) -> tuple[ScriptedSource, Blender]:
    """A machine that has the chunks, behind a link that takes a second a token, and a blender without chunks.

    row_s: computing a row; 1 ms by default, which is 62 ms for the whole prompt.
    """
    source = slow_source(tiny_blender(None, *CHUNKS).store, 1.0)
    costs = CostModel(0.0, row_s, 0.0, 0.0)
    return source, tiny_blender(TieredStore(MemoryStore(0), source), costs=costs)


def kinds(done: Prefilled) -> list[tuple[int, str]]:
    check_report(done.report, PROMPT)
    return [(unusable["chunk"], unusable["kind"]) for unusable in done.report.unusable]


def test_auto_leaves_chunks_that_are_slower_to_fetch_and_a_fixed_method_fetches_them() -> None:
    source, made = over_a_slow_link()
    left = made.run(PROMPT, BlendConfig(method="auto"))
    made.fetcher.flush()
    assert kinds(left) == [(i, SLOW) for i, ids in enumerate(CHUNKS) if ids]
    assert (left.report.method, found(left.report)) == ("prefix", (0, FILLED, 0))
    assert source.asked.total() == 0
    fresh = tiny_blender(MemoryStore(ROOMY)).run(PROMPT, BlendConfig())
    assert torch.equal(left.result.logits, fresh.result.logits)
    fixed = made.run(PROMPT, BLEND)
    assert (found(fixed.report), kinds(fixed)) == ((FILLED, 0, 0), [])
    assert set(source.asked) == {made.key(ids) for ids in CHUNKS if ids}  # and not the prefix


def test_an_automatic_ratio_is_as_much_as_hides_behind_loading() -> None:
    blend, ratios = BLEND.with_values(policy="deviation"), list[float]()
    for row_s in (1.0, 1e-3):
        blender = tiny_blender(None, *CHUNKS, costs=CostModel(0.0, row_s, 0.0, 0.0))
        blender.planner.load_rate.record(1.0, 100)
        done = blender.run(PROMPT, blend.with_values(ratio="auto"))
        again = blender.run(PROMPT, blend.with_values(ratio=done.report.ratio))
        assert torch.equal(done.result.logits, again.result.logits)
        ratios.append(done.report.ratio)
    assert ratios[0] == AUTO_MIN_RATIO
    assert ratios[0] < ratios[1]


def test_requests_tell_what_their_chunks_save_and_take_to_compute() -> None:
    """With a row a second: the rows that a prefill does not run, and those of the chunk alone."""
    (_, made), blend = over_a_slow_link(row_s=1.0), BLEND.with_values(ratio=0.5)
    keys = {i: made.key(ids) for i, ids in enumerate(CHUNKS) if ids}
    requests = made.planner.requests(PROMPT, blend.with_values(method="auto"), keys, PROMPT.prefix)
    ran = made.run(PROMPT, blend).result.cost * len(PROMPT)
    n_saved = sum(map(len, CHUNKS)) + len(PROMPT.suffix) - ran
    assert sum(r.saved_s or 0.0 for r in requests.values()) == pytest.approx(n_saved)
    assert [(r.key, r.n_tokens, r.compute_s) for r in requests.values()] == [
        (keys[i], len(CHUNKS[i]), len(CHUNKS[i])) for i in keys
    ]
