"""Requests against stores that hold everything, something, nothing, or damage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.blend.blender import Blender
from blendserve.config import BlendConfig
from blendserve.core import BlendReport, Chunk, Prompt, TokenIds
from blendserve.errors import ConfigError, CorruptRecord, StoreUnavailable
from blendserve.store import KVStore, LMDBStore, MemoryStore
from blendserve.store.codecs.base import Coding
from blendserve.store.memory import MemoryChunk
from blendserve.store.record import Coded
from tests.support.blending import assert_near, check_report, distance, model_logits, some_ids, some_prompt
from tests.support.models import tiny_adapter

GIB = 2**30
PREFIX = some_ids(5)
PROMPT = some_prompt([14, 9, 0, 20, 1, 9])


def blender(store: KVStore, behind: TokenIds = PREFIX, name: str = "llama", **options: Any) -> Blender:
    return Blender(tiny_adapter(name), "fingerprint", store, PREFIX, behind, **options)


def filled(store: KVStore, prompt: Prompt = PROMPT, behind: TokenIds = PREFIX) -> Blender:
    made = blender(store, behind)
    made.precompute([chunk.ids for chunk in prompt.chunks])
    return made


def ids(prompt: Prompt = PROMPT) -> list[TokenIds]:
    return [chunk.ids for chunk in prompt.chunks]


def found(report: BlendReport) -> tuple[int, int, int]:
    return report.chunks_hit, report.chunks_missing, report.chunks_corrupt


class Leaky(MemoryStore):
    """A store whose chunks named in `broken` fail their checksum at layer 2, until they are put again."""

    def __init__(self) -> None:
        super().__init__(GIB)
        self.broken: set[bytes] = set()

    def put(self, key: bytes, *args: Any, **options: Any) -> Any:
        self.broken.discard(key)
        return super().put(key, *args, **options)

    def put_uncoded(self, key: bytes, *args: Any, **options: Any) -> Any:
        self.broken.discard(key)
        return super().put_uncoded(key, *args, **options)

    @contextmanager
    def reading(self) -> Iterator[Any]:
        with super().reading() as snapshot:
            yield LeakySnapshot(snapshot, self.broken)


class LeakySnapshot:
    def __init__(self, snapshot: Any, broken: set[bytes]) -> None:
        self._snapshot, self._broken = snapshot, broken
        self.undecodable = snapshot.undecodable
        self.expected: list[bytes] = []

    def expect(self, keys: Sequence[bytes], meanwhile: Any = None, saved: Any = None) -> None:
        self.expected += keys

    def tier(self, key: bytes) -> str:
        return str(self._snapshot.tier(key))

    def get(self, key: bytes) -> Any:
        assert key in self.expected
        view = self._snapshot.get(key)
        return DamagedChunk(key, view.kv) if key in self._broken else view


class DamagedChunk(MemoryChunk):
    _key: bytes

    def __init__(self, key: bytes, kv: Any) -> None:
        super().__init__(kv)
        object.__setattr__(self, "_key", key)

    __slots__ = ("_key",)

    def layer(self, l: int) -> tuple[torch.Tensor, torch.Tensor]:
        if l == 2:
            raise CorruptRecord(self._key, "layer 2 fails its checksum")
        return super().layer(l)


@given(
    order=st.lists(st.integers(0, 5), max_size=6),
    stored=st.sets(st.integers(0, 5)),
    broken=st.sets(st.integers(0, 5)),
    method=st.sampled_from(["blend", "full", "prefix", "reuse"]),
    policy=st.sampled_from(["query", "deviation", "chunk_head", "random", "none", "all"]),
    behind=st.sampled_from([PREFIX, PREFIX[:1], ()]),
)
def test_every_request_is_answered_and_accounted_for(
    order: list[int], stored: set[int], broken: set[int], method: str, policy: str, behind: TokenIds
) -> None:
    prompt = Prompt(PREFIX, tuple(PROMPT.chunks[i] for i in order), PROMPT.suffix)
    store = Leaky()
    maker = blender(store, behind)
    maker.precompute([PROMPT.chunks[i].ids for i in stored])
    store.broken = {maker.key(PROMPT.chunks[i].ids) for i in stored & broken}
    blended = maker.run(prompt, BlendConfig(method=method, policy=policy))
    report = blended.report
    check_report(report, prompt)
    assert torch.isfinite(blended.prefilled.logits).all()
    if method in {"full", "prefix"}:
        assert not report.blended
        assert_near(blended.prefilled.logits, model_logits(maker.adapter, prompt))
    if method in {"blend", "reuse"}:
        known = {c.ids for i, c in enumerate(PROMPT.chunks) if i in stored and len(c)}
        damaged = {PROMPT.chunks[i].ids for i in broken} & known
        asked = [chunk.ids for chunk in prompt.chunks if len(chunk)]
        hits = sum(x in known - damaged for x in asked)
        corrupt = sum(x in damaged for x in asked)
        assert found(report) == (hits, len(asked) - hits - corrupt, corrupt)


def test_the_same_request_from_memory_a_warm_store_and_a_reopened_one(tmp_path: Path) -> None:
    memory = filled(MemoryStore(GIB)).run(PROMPT, BlendConfig(method="blend"))
    with LMDBStore(tmp_path / "kv", GIB) as store:
        warm = filled(store).run(PROMPT, BlendConfig(method="blend"))
    with LMDBStore(tmp_path / "kv", GIB, read_only=True) as store:
        cold = blender(store).run(PROMPT, BlendConfig(method="blend"))
    for other in (warm, cold):
        assert torch.equal(memory.prefilled.logits, other.prefilled.logits)
        assert torch.equal(memory.prefilled.cache.keys, other.prefilled.cache.keys)
        assert memory.report == other.report
    assert memory.report.blended


def test_missing_chunks_are_computed_reported_and_written_back() -> None:
    store = MemoryStore(GIB)
    maker = blender(store)
    first = maker.run(PROMPT, BlendConfig(method="blend"))
    assert_near(first.prefilled.logits, model_logits(maker.adapter, PROMPT))
    assert found(first.report) == (0, 5, 0)
    assert "no chunk was found" in first.report.reason
    assert first.absent == ((), *(chunk for chunk in ids() if chunk))
    assert maker.remember(first.absent) == 6
    second = maker.run(PROMPT, BlendConfig(method="blend"))
    assert found(second.report) == (5, 0, 0)
    assert second.absent == ()
    reference = filled(MemoryStore(GIB)).run(PROMPT, BlendConfig(method="blend"))
    assert_near(second.prefilled.logits, reference.prefilled.logits)


def test_a_corrupt_chunk_is_recomputed_reported_and_replaced() -> None:
    store = Leaky()
    maker = filled(store)
    whole = maker.run(PROMPT, BlendConfig(method="blend"))
    store.broken = {maker.key(ids()[1]), maker.key(PREFIX, ())}
    hurt = maker.run(PROMPT, BlendConfig(method="blend"))
    assert found(hurt.report) == (4, 0, 1)
    assert hurt.absent == ((), ids()[1])
    check_report(hurt.report, PROMPT)
    as_if_missing = MemoryStore(GIB)
    filled(as_if_missing)
    as_if_missing.delete(maker.key(ids()[1]))
    as_if_missing.delete(maker.key(PREFIX, ()))
    expected = blender(as_if_missing).run(PROMPT, BlendConfig(method="blend"))
    assert torch.equal(hurt.prefilled.logits, expected.prefilled.logits)
    assert maker.remember(hurt.absent) == 2
    assert store.broken == set()
    healed = maker.run(PROMPT, BlendConfig(method="blend"))
    assert_near(healed.prefilled.logits, whole.prefilled.logits)
    assert found(healed.report) == (5, 0, 0)


def test_a_flipped_bit_on_disk_is_found_recomputed_and_replaced(tmp_path: Path) -> None:
    with LMDBStore(tmp_path / "kv", GIB) as store:
        maker = filled(store)
        whole = maker.run(PROMPT, BlendConfig(method="blend"))
        with store.reading() as snapshot:
            view = snapshot.get(maker.key(ids()[3]))
            assert view is not None
            needle = bytes(view.layer(3)[1].clone().view(torch.uint8).flatten()[:64].tolist())
    (file,) = [f for f in (tmp_path / "kv").iterdir() if needle in f.read_bytes()]
    raw = bytearray(file.read_bytes())
    raw[raw.index(needle) + 5] ^= 16
    file.write_bytes(raw)
    with LMDBStore(tmp_path / "kv", GIB) as store:
        maker = blender(store)
        hurt = maker.run(PROMPT, BlendConfig(method="blend"))
        assert found(hurt.report) == (4, 0, 1)
        maker.remember(hurt.absent)
        assert not store.verify().bad
        healed = maker.run(PROMPT, BlendConfig(method="blend"))
        assert torch.equal(healed.prefilled.logits, whole.prefilled.logits)


def test_kv_of_another_model_tenant_or_prefix_is_not_found() -> None:
    store = MemoryStore(GIB)
    filled(store)
    others = [
        Blender(tiny_adapter("llama"), "another", store, PREFIX, PREFIX),
        blender(store, namespace="tenant"),
        blender(store, behind=()),
        Blender(tiny_adapter("llama", torch.bfloat16), "fingerprint", store, PREFIX, PREFIX),
    ]
    reports = [other.run(PROMPT, BlendConfig(method="blend")).report for other in others]
    assert [report.chunks_hit for report in reports] == [0, 0, 0, 0]


def test_a_record_that_is_not_what_its_key_names_counts_as_corrupt() -> None:
    store = MemoryStore(GIB)
    maker = filled(store)
    wrong = maker.computer(PREFIX).compute([some_ids(3)])[0]
    store.put(maker.key(ids()[0]), wrong)
    report = maker.run(PROMPT, BlendConfig(method="blend")).report
    assert found(report) == (4, 0, 1)


def test_a_chunk_that_cannot_be_decoded_here_is_missing_with_its_reason_and_replaced() -> None:
    """Whole, in the store, and of no use: the report says which and why, and a damaged one beside it, too."""
    store = Leaky()
    maker = filled(store)
    key = maker.key(ids()[3])
    coded = store.coded(key)
    assert coded is not None
    foreign = Coding("alien", 3, bytes(range(16)))
    store.put_coded(key, Coded(coded.shape, foreign, coded.segments))
    store.broken = {maker.key(ids()[1])}
    hurt = maker.run(PROMPT, BlendConfig(method="blend"))
    assert found(hurt.report) == (3, 1, 1)
    assert [(u.chunk, u.kind) for u in hurt.report.unusable] == [(1, "corrupt"), (3, "codec")]
    assert "layer 2 fails its checksum" in hurt.report.unusable[0].reason
    assert "no codec 'alien'" in hurt.report.unusable[1].reason
    assert hurt.report.to_dict()["unusable"][1]["kind"] == "codec"
    check_report(hurt.report, PROMPT)
    assert maker.remember(hurt.absent) == 2
    assert maker.run(PROMPT, BlendConfig(method="blend")).report.unusable == ()


class Gone(MemoryStore):
    """A store whose disk has gone away."""

    @contextmanager
    def reading(self) -> Iterator[Any]:
        raise StoreUnavailable("the disk has gone")
        yield


def test_without_its_store_a_request_is_full_prefill_and_says_why() -> None:
    maker = blender(Gone(GIB))
    blended = maker.run(PROMPT, BlendConfig(method="blend"))
    assert_near(blended.prefilled.logits, model_logits(maker.adapter, PROMPT))
    assert "the disk has gone" in blended.report.reason
    check_report(blended.report, PROMPT)


@pytest.mark.parametrize(
    ("method", "lengths", "ratio", "reason"),
    [
        ("full", [9, 9], 0.15, "method 'full' does not blend"),
        ("prefix", [9, 9], 0.15, "method 'prefix' does not blend"),
        ("blend", [9, 9], 1.0, "every token was chosen for recomputation"),
        ("blend", [9], 0.15, "the only chunk found stands first, where its KV is exact"),
        ("blend", [], 0.15, "no chunk was found"),
        ("blend", [9, 9], 0.15, ""),
        ("reuse", [9, 9], 1.0, ""),
    ],
)
def test_the_report_says_why_nothing_was_blended(
    method: Any, lengths: list[int], ratio: float, reason: str
) -> None:
    prompt = some_prompt(lengths)
    report = filled(MemoryStore(GIB), prompt).run(prompt, BlendConfig(method=method, ratio=ratio)).report
    assert report.reason.startswith(reason)
    assert bool(report.reason) == bool(reason)
    check_report(report, prompt)


def test_share_recomputed_is_the_ratio_asked_for() -> None:
    prompt = some_prompt([40, 40, 40])
    report = filled(MemoryStore(GIB), prompt).run(prompt, BlendConfig(method="blend", ratio=0.2)).report
    assert report.share_recomputed == pytest.approx(0.2)
    assert report.bytes_loaded == 125 * tiny_adapter("llama").kv_bytes_per_token


@pytest.mark.parametrize("behind", [PREFIX[:1], ()])
def test_prefix_caching_is_exact_also_when_chunks_are_computed_behind_less(behind: TokenIds) -> None:
    maker = filled(MemoryStore(GIB), behind=behind)
    blended = maker.run(PROMPT, BlendConfig(method="prefix"))
    assert blended.report.tokens_exact == len(PREFIX)
    assert_near(blended.prefilled.logits, model_logits(maker.adapter, PROMPT))


@pytest.mark.parametrize("layers", [(), (4,), (1, 9)])
def test_a_check_layer_that_the_reader_does_not_have_is_refused(layers: tuple[int, ...]) -> None:
    maker = filled(MemoryStore(GIB))
    with pytest.raises(ConfigError, match=r"check_layers.*from 1 to the reader's last, 3"):
        maker.run(PROMPT, BlendConfig(policy="deviation", check_layers=layers))


def test_precompute_skips_what_is_there_and_counts() -> None:
    store = MemoryStore(GIB)
    maker, seen = blender(store), []
    first = maker.precompute(ids(), lambda done, total: seen.append((done, total)))
    assert (first.chunks, first.computed, first.skipped, first.tokens) == (6, 6, 0, 5 + 53)
    assert first.bytes == 58 * maker.adapter.kv_bytes_per_token == store.stats().bytes
    assert seen == [(14, 53), (23, 53), (43, 53), (44, 53), (53, 53)]
    second = maker.precompute([*ids(), some_ids(4, 77)])
    assert (second.computed, second.skipped, second.tokens) == (1, 6, 4)
    assert maker.missing(ids()) == []


def test_threads_get_what_each_gets_alone() -> None:
    maker = filled(MemoryStore(GIB))
    prompts = [Prompt(PREFIX, tuple(PROMPT.chunks[i:] + PROMPT.chunks[:i]), PROMPT.suffix) for i in range(6)]
    options = [BlendConfig(policy=p) for p in ("query", "deviation", "random")]
    jobs = [(prompt, option) for prompt in prompts for option in options] * 2
    alone = [maker.run(*job).prefilled.logits for job in jobs]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda job: maker.run(*job).prefilled.logits, jobs))
    assert all(map(torch.equal, alone, together))
    assert distance(alone[0], alone[3]) > 1e-3


def test_duplicates_share_their_kv_and_are_each_in_their_place() -> None:
    chunk = Chunk(some_ids(12, 5))
    prompt = Prompt(PREFIX, (chunk, chunk, chunk), PROMPT.suffix)
    store = MemoryStore(GIB)
    maker = filled(store, prompt)
    assert store.stats().chunks == 2
    blended = maker.run(prompt, BlendConfig(ratio=1.0))
    assert found(blended.report) == (3, 0, 0)
    assert_near(blended.prefilled.logits, model_logits(maker.adapter, prompt))
