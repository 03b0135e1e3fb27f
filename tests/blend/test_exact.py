"""`report.exact`: over every source of KV, it says whether the prompt's KV is the model's own."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.blend import donors as donors_module
from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.cost import CostModel
from blendserve.config import BlendConfig
from blendserve.core import Chunk, Prompt, TokenIds
from blendserve.kv import stacked
from blendserve.models.kv_cache import KVCache
from blendserve.models.runner import append
from blendserve.store import MemoryStore
from blendserve.store.codecs.base import Codec
from blendserve.store.codecs.int8 import Int8
from blendserve.store.codecs.raw import Raw
from tests.support.blending import (
    PREFIX,
    distance,
    model_kv,
    model_logits,
    some_ids,
    some_prompt,
    tiny_blender,
)
from tests.support.plain import CHUNKS, END, TEXT, A, other, plain
from tests.support.stores import ROOMY, FaultyStore

BOUND = 1e-4  # of rounding, in a logit and in KV
COSTS = CostModel(1e-6, 1.0, 0.0, 1e-6)  # blending is cheap
METHODS = ("auto", "blend", "prefix", "full", "reuse")
RATIOS = (0.0, 0.3, 1.0)
EDITED = (*A[:40], *other(A[40:41]), *A[41:])  # near-duplicate of a stored chunk


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even on a busy machine a first request waits for the index."""
    monkeypatch.setattr(donors_module, "FIRST_WAIT_S", 60.0)


@dataclass(frozen=True)
class Source:
    """Where KV of a prompt's chunks may be from."""

    codec: Codec
    context: TokenIds  # what chunks were computed behind
    blend: BlendConfig

    def blender(self) -> Blender:
        by = tiny_blender(None, prefix=PREFIX, context=self.context, codec=self.codec, costs=COSTS)
        by.writer.precompute(CHUNKS)
        by.prefixes.cap_bytes = ROOMY
        return by


def blends() -> st.SearchStrategy[BlendConfig]:
    every = [
        BlendConfig(method=method, policy=policy, ratio=ratio, correction=correction, near=near)
        for method, policy, ratio, correction, near in product(
            METHODS, ("query", "deviation", "none", "all"), RATIOS, ("none", "shift"), (False, True)
        )
    ]
    return st.sampled_from(every)


SOURCES = st.builds(Source, st.sampled_from([Raw(), Int8()]), st.sampled_from([PREFIX, ()]), blends())
PASSAGES = st.lists(st.sampled_from([*CHUNKS, EDITED, some_ids(60, 7), ()]), max_size=3)
TURNS = st.lists(st.lists(st.sampled_from([*CHUNKS, TEXT]), max_size=3), min_size=1, max_size=3)


def check(by: Blender, done: Prefilled, cache: KVCache, prompt: Prompt) -> None:
    """Whether the report says of this prompt's KV what the model's own forward pass says of it."""
    n, own = len(prompt), model_kv(by.model, prompt.ids)
    sides = zip((stacked(cache.keys), stacked(cache.values)), own, strict=True)
    is_own = max(distance(ours[:, :, :n], stacked(theirs)) for ours, theirs in sides) < BOUND
    assert done.report.exact == is_own
    if done.report.exact:
        assert distance(done.result.logits, model_logits(by.model, prompt)) < BOUND


@given(SOURCES, PASSAGES)
def test_a_prompt_of_passages_is_exact_if_its_kv_is_the_models_own(
    source: Source, passages: list[TokenIds]
) -> None:
    by = source.blender()
    prompt = Prompt(PREFIX, tuple(map(Chunk, passages)), some_ids(4, 8))
    cache = KVCache(by.model, len(prompt))
    check(by, by.run(prompt, source.blend, cache=cache), cache, prompt)


@given(SOURCES, TURNS, st.sampled_from(["full", "prefix", "same"]))
def test_a_conversation_stays_approximate_once_it_is(
    source: Source, turns: list[list[TokenIds]], last: str
) -> None:
    """Every turn goes on from the kept KV of the one before, answers included; an exact method does not."""
    by, ids = source.blender(), PREFIX
    for n, turn in enumerate(turns):
        is_last = n == len(turns) - 1
        blend = source.blend.with_values(method=last) if is_last and last != "same" else source.blend
        prompt, answer = plain(ids, *turn, END), some_ids(5, n)
        cache = KVCache(by.model, len(prompt) + len(answer))
        done = by.run(prompt, blend, cache=cache)
        check(by, done, cache, prompt)
        append(by.model, cache, len(prompt), list(answer))
        by.keep(prompt, done.report, answer, cache)
        ids = (*prompt.ids, *answer)


LATER = Prompt(PREFIX, tuple(map(Chunk, CHUNKS[:3])), some_ids(4, 8))
FRONT = Prompt(PREFIX, (Chunk(CHUNKS[0]), Chunk(some_ids(60, 7))), some_ids(4, 8))
NEAR = Prompt(PREFIX, (Chunk(some_ids(60, 7)), Chunk(EDITED)), some_ids(4, 8))
SHIFT = BlendConfig(method="blend", policy="query", ratio=0.1, correction="shift")
EXACT_CASES = {  # name -> prompt, settings, and whether the prompt's KV is full prefill's
    "full": (LATER, SHIFT.with_values(method="full"), True),
    "prefix, first chunk stored": (LATER, SHIFT.with_values(method="prefix"), True),
    "blend, first chunk alone is stored": (FRONT, SHIFT, True),
    "blend, every token recomputed": (LATER, SHIFT.with_values(policy="all"), True),
    "blend": (LATER, SHIFT, False),
    "reuse": (LATER, SHIFT.with_values(method="reuse"), False),
    "near-duplicate": (NEAR, SHIFT.with_values(near=True), False),
    "near-duplicates are not looked for": (NEAR, SHIFT, True),
    "plain prompt": (plain(PREFIX, TEXT, CHUNKS[1], END), SHIFT, False),
    "plain prompt with no stored text": (plain(PREFIX, TEXT, END), SHIFT, True),
    "refined": (LATER, SHIFT.with_values(refine=0.5), False),
}
READ_FIRST = ("blend, first chunk alone is stored", "blend, every token recomputed")


@pytest.mark.parametrize("case", EXACT_CASES)
@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("codec", [Raw(), Int8()], ids=["raw", "int8"])
def test_an_exact_prompt_has_full_prefills_kv_and_another_has_not(
    case: str, damaged: bool, codec: Codec
) -> None:
    """damaged: all chunks that are stored, which then are computed. Int8 loses some of the first chunk's KV."""
    prompt, blend, is_exact = EXACT_CASES[case]
    store = FaultyStore(MemoryStore(ROOMY))
    by = tiny_blender(store, *CHUNKS, codec=codec)
    by.finder.refresh()
    if damaged:
        store.damaged = {by.key(ids) for ids in CHUNKS}
    reads_first = case in READ_FIRST and not damaged
    is_exact = damaged or (is_exact and not (reads_first and isinstance(codec, Int8)))
    own, cache = KVCache(by.model, len(prompt)), KVCache(by.model, len(prompt))
    tiny_blender().run(prompt, BlendConfig(method="full"), cache=own)
    done = by.run(prompt, blend, cache=cache)
    assert done.report.exact == is_exact
    difference = max(distance(cache.keys, own.keys), distance(cache.values, own.values))
    assert (difference < BOUND) == is_exact


@pytest.mark.parametrize("method", ["prefix", "full"])
@given(SOURCES, PASSAGES)
def test_an_exact_method_is_exact_whatever_is_stored(
    method: str, source: Source, passages: list[TokenIds]
) -> None:
    by, prompt = source.blender(), Prompt(PREFIX, tuple(map(Chunk, passages)), some_ids(4, 8))
    done = by.run(prompt, source.blend.with_values(method=method))
    assert done.report.exact
    assert distance(done.result.logits, model_logits(by.model, prompt)) < BOUND


@pytest.mark.floors
@pytest.mark.parametrize("policy", ["query", "deviation", "chunk_head", "random"])
@given(
    st.lists(st.sampled_from([3, 40, 63, 64, 90, 600]), min_size=2, max_size=5), st.sampled_from([0.0, 0.05])
)
def test_short_chunks_are_computed_and_some_tokens_of_each_other_one_recomputed(
    policy: str, lengths: list[int], ratio: float
) -> None:
    """Unless the ratio is 0, which stays full reuse. 5% of a long chunk is more than the floor."""
    prompt = some_prompt(lengths)
    by = tiny_blender(None, *(chunk.ids for chunk in prompt.chunks))
    done = by.run(prompt, BlendConfig(method="blend", policy=policy, ratio=ratio, correction="none"))
    later = [n for n in lengths[1:] if n >= 64 or not ratio]
    short = sum(lengths[1:]) - sum(later)
    report = done.report
    assert (report.tokens_computed, report.tokens_reused + report.tokens_recomputed) == (short, sum(later))
    share = round(ratio * (lengths[0] + sum(later)))
    assert report.tokens_recomputed == (min(max(share, 16 * len(later)), sum(later)) if ratio else 0)
    passages = [span for span in report.layout if span.kind == "passage"]
    assert [span.is_read for span in passages[1:]] == [n >= 64 or not ratio for n in lengths[1:]]
    assert report.chunks_hit == len(passages)


@pytest.mark.floors
def test_a_prompt_of_short_chunks_is_computed_and_says_why() -> None:
    prompt = some_prompt([17, 17, 30])
    by = tiny_blender(None, *(chunk.ids for chunk in prompt.chunks))
    done = by.run(prompt, BlendConfig(method="blend"))
    assert (done.report.exact, done.report.blended, done.report.chunks_hit) == (True, False, 3)
    assert done.report.reason
    assert distance(done.result.logits, model_logits(by.model, prompt)) < BOUND
    assert by.run(prompt, BlendConfig(method="reuse")).report.tokens_reused == 47
