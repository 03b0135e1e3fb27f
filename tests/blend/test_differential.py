"""The blending prefill against its naive twin: any prompt, store, damage, method, policy, correction and prefix."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st
from torch import Tensor

from blendserve.blend import prefill as module
from blendserve.blend.blender import Prefilled
from blendserve.blend.priors import Priors
from blendserve.config import BlendConfig
from blendserve.core import Chunk, Prompt, Span, TokenIds
from blendserve.registry import CORRECTIONS, FULL_REUSE, POLICIES
from blendserve.store import MemoryStore
from tests.support.blending import (
    OneOff,
    TracedCache,
    assert_near,
    check_report,
    model_kv,
    model_logits,
    some_ids,
    some_priors,
    some_prompt,
    tiny_blender,
)
from tests.support.models import BLEND_KINDS, tiny_decoder
from tests.support.stores import ROOMY, FaultyStore
from tests.support.twin import Correct, Piece, Start, correction, naive_prefill, question_scores, start_from

DONOR = some_ids(45, 99)  # stored, where a chunk of the prompt is an edited copy of it
BOUND = 3e-4
WORDS = [*POLICIES.names, *(f"deviation{layers}" for layers in ("[1,2]", "[2]", "[3,2]", "[1,2,3]"))]
EVERY_KIND = pytest.mark.parametrize("kind", BLEND_KINDS)


@dataclass(frozen=True)
class Case:
    """A request, and what the store holds for it: `damaged` ones fail their check in layer 2."""

    kind: str
    prompt: Prompt
    stored: tuple[TokenIds, ...]
    context: TokenIds  # what stored chunks were computed behind
    edited: int | None  # the position of the token in which the prompt's copy of DONOR differs
    blend: BlendConfig
    prior: float  # the scale of its maps; 0 = there is none
    damaged: frozenset[TokenIds] = frozenset()

    @property
    def known(self) -> Priors | None:
        return some_priors(tiny_decoder(self.kind), self.prior) if self.prior else None

    @property
    def looked_up(self) -> list[int]:
        """The chunks that the method asks the store for."""
        filled = [i for i, chunk in enumerate(self.prompt.chunks) if len(chunk)]
        is_exact = self.context == self.prompt.prefix
        return {"full": [], "prefix": filled[:1] if is_exact else []}.get(self.blend.method, filled)

    def pieces(self) -> Iterator[Piece]:
        """Where the KV of the prompt's tokens is stored."""
        prompt = self.prompt
        if prompt.prefix and self.blend.method != "full":
            yield Piece(Span(0, len(prompt.prefix)), prompt.prefix, 0, ())
        for i in self.looked_up:
            span, chunk = prompt.spans[i], prompt.chunks[i]
            if chunk.ids in set(self.stored) - self.damaged:
                runs = [(0, len(chunk))]
            else:
                is_near = self._is_copy(chunk) and self.blend.near and self.blend.method != "prefix"
                runs = list(self._near_runs()) if is_near and DONOR not in self.damaged else []
            source = DONOR if self._is_copy(chunk) else chunk.ids
            for first, last in runs:
                yield Piece(Span(span.start + first, span.start + last), source, first, self.context)

    def _is_copy(self, chunk: Chunk) -> bool:
        return self.edited is not None and chunk.ids == edited_copy(self.edited)

    def _near_runs(self) -> Iterator[tuple[int, int]]:
        """At least 16 tokens before the edit, or behind it without the 8 next to it."""
        assert self.edited is not None
        if self.edited >= 16:
            yield 0, self.edited
        if len(DONOR) - self.edited - 1 >= 16 + 8:
            yield self.edited + 1 + 8, len(DONOR)


def edited_copy(at: int) -> TokenIds:
    """DONOR with another token at this position."""
    return (*DONOR[:at], 3 + (DONOR[at] - 2) % 94, *DONOR[at + 1 :])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pool = draw(st.lists(st.sampled_from([0, 1, 2, 7, 12]), min_size=1, max_size=4))
    base = some_prompt(pool, draw(st.sampled_from([0, 1, 3])), draw(st.sampled_from([1, 2, 5])))
    order = draw(st.lists(st.integers(0, len(pool) - 1), min_size=1, max_size=4))
    chunks = [base.chunks[i] for i in order]
    absent = draw(st.sets(st.sampled_from(order), max_size=2))
    stored = tuple(chunk.ids for i, chunk in enumerate(base.chunks) if i not in absent and len(chunk))
    edited = draw(st.sampled_from([None, None, 5, 20, 36]))
    if edited is not None:
        chunks.insert(draw(st.integers(0, len(chunks))), Chunk(edited_copy(edited)))
        stored = (*stored, DONOR)
    damaged = draw(st.just(frozenset()) | st.frozensets(st.sampled_from([*stored, ()]), max_size=2))
    blend = BlendConfig(
        method=draw(st.sampled_from(["blend"] * 6 + ["full", "prefix", "reuse"])),
        policy=draw(st.sampled_from(WORDS)),
        ratio=draw(st.sampled_from([0.3, 0.1, 0.6, 0.0, 1.0])),
        correction=draw(st.sampled_from(CORRECTIONS.names)),
        near=draw(st.booleans()),
    )
    return Case(
        kind=draw(st.sampled_from(BLEND_KINDS)),
        prompt=Prompt(base.prefix, tuple(chunks), base.suffix),
        stored=stored,
        context=draw(st.sampled_from([base.prefix, base.prefix, base.prefix[:1], ()])),
        edited=edited,
        blend=blend,
        prior=draw(st.sampled_from([0.0, 0.3, 0.02])),
        damaged=damaged - {()},
    )


def check_layers(policy: str) -> list[int]:
    """The layers in a policy's word."""
    name, bracket, layers = policy.partition("[")
    return sorted(json.loads(bracket + layers)) if bracket else [1] if name == "deviation" else []


def run(case: Case) -> tuple[Prefilled, TracedCache]:
    """The request as the package computes it, over a store that holds what the case says."""
    decoder, store = tiny_decoder(case.kind), FaultyStore(MemoryStore(ROOMY))
    prefix, context = case.prompt.prefix, case.context
    maker = tiny_blender(store, *case.stored, decoder=decoder, prefix=prefix, context=context)
    maker.priors.use(case.known)
    store.damaged, store.damaged_layer = {maker.key(ids) for ids in case.damaged}, 2
    maker.finder.refresh()
    cache = TracedCache(decoder, len(case.prompt))
    return maker.run(case.prompt, case.blend, cache=cache), cache


def check(case: Case) -> None:
    """Everything that the prefill computed is what its twin computes from the same selections, which are right."""
    decoder, prompt = tiny_decoder(case.kind), case.prompt
    done, cache = run(case)
    if case.blend.method == "reuse":
        case = replace(case, blend=case.blend.with_values(**FULL_REUSE))
    start = start_from(decoder, prompt, list(case.pieces()))
    left = torch.cat([(~start.known).nonzero()[:, 0], done.result.recomputed]).sort().values
    assert len(cache.rows) == decoder.n_kv_layers
    rows = [*cache.rows, *[left] * (1 + decoder.n_layers - decoder.n_kv_layers)]
    twin = naive_prefill(decoder, prompt, start, rows, correction_of(case, start, rows))
    assert_near(cache.keys, twin.keys, BOUND)
    assert_near(cache.values, twin.values, BOUND)
    assert_near(done.result.logits, twin.logits, BOUND)
    check_selection(case, start, rows, twin.deviations, done.report.scores)
    check_states(case, start, done)
    report, n_scored = done.report, 0
    check_report(report, prompt)
    assert (report.tokens_exact, report.tokens_suffix) == (int(start.exact.sum()), len(prompt.suffix))
    assert report.tokens_recomputed == int(start.reusable[left].sum())
    assert report.tokens_computed == int((~start.known).sum()) - len(prompt.suffix)
    stored = [prompt.chunks[i].ids in case.stored for i in case.looked_up]
    corrupt = sum(prompt.chunks[i].ids in case.damaged for i in case.looked_up)
    assert (report.chunks_hit, report.chunks_corrupt) == (sum(stored) - corrupt, corrupt)
    assert report.chunks_missing == len(stored) - sum(stored)
    n_chosen = budget(case, start, float(case.blend.ratio or 0.0))
    if case.blend.policy == "query" and 0 < n_chosen < int(start.reusable.sum()):
        n_scored = len(prompt.suffix)
    row_layers = sum(map(len, cache.rows)) + n_scored * decoder.n_layers
    row_layers += decoder.n_layers - decoder.n_kv_layers  # the last row alone, as nothing reads more
    assert report.cost == pytest.approx(row_layers / (len(prompt) * decoder.n_layers))


def budget(case: Case, start: Start, share: float) -> int:
    """The share of the stored tokens of chunks, exact ones included, as far as others can be recomputed."""
    n_found = int(start.known[len(case.prompt.prefix) :].sum())
    return min(round(min(1.0, share) * n_found), int(start.reusable.sum()))


def narrows(case: Case, start: Start, l: int, rows: Sequence[Tensor]) -> bool:
    """Whether rows are dropped in this layer."""
    return l in check_layers(case.blend.policy) and bool(start.reusable[rows[l]].any())


def correction_of(case: Case, start: Start, rows: Sequence[Tensor]) -> Correct | None:
    """The correction's formula in the layers where no row is about to be dropped."""
    name, known = case.blend.correction, case.known
    if name == "none" or not start.spans:
        return None
    expected = known.layer if known and name == "prior" else None
    formula = correction(name, start.spans, len(rows) - 1, expected)

    def correct(l: int, stored: Any, fresh: Any, at: list[int]) -> Any:
        return stored if narrows(case, start, l, rows) else formula(l, stored, fresh, at)

    return correct


def check_states(case: Case, start: Start, done: Prefilled) -> None:
    """The report says of each token what it started from."""
    near = {
        at
        for piece in case.pieces()
        if piece.source == DONOR
        for at in range(piece.span.start, piece.span.stop)
    }
    chosen, left = (
        set(done.result.recomputed.tolist()),
        "corrected" if done.result.corrected else "reused",
    )
    states = [state for state, n in done.report.states for _ in range(n)]
    for at, state in enumerate(states):
        stored = "recomputed" if at in chosen else "near_duplicate" if at in near else left
        assert state == (stored if start.reusable[at] else "exact" if start.exact[at] else "computed")
    assert len(states) == len(case.prompt)
    assert not (done.result.corrected and case.blend.correction == "none")


def check_selection(
    case: Case, start: Start, rows: Sequence[Tensor], deviations: Sequence[Tensor], scores: Tensor | None
) -> None:
    """Rows that must be computed are never dropped; others are as many as the policy's formula says, and the best."""
    blend, n_layers, ratio = case.blend, len(rows) - 1, float(case.blend.ratio or 0.0)
    n, n_reusable = budget(case, start, ratio), int(start.reusable.sum())
    chosen = [at[start.reusable[at]] for at in rows]
    for at in rows:
        assert at.tolist() == sorted(set(at.tolist()))
        assert not start.exact[at].any()
        assert int((~start.known[at]).sum()) == int((~start.known).sum())
    if checks := check_layers(blend.policy):
        sizes = [n_reusable if n else 0]
        shares = torch.linspace(2 if len(checks) > 1 else 1, 1, len(checks)).tolist()
        for l in range(n_layers):
            sizes.append(sizes[-1])
            if narrows(case, start, l, rows):
                share = ratio * shares[checks.index(l)]
                sizes[-1] = min(sizes[-1], budget(case, start, share))
                found = deviations[l][start.reusable[rows[l]]]
                check_best(torch.isin(chosen[l], chosen[l + 1]), found)
                assert scores is not None
                assert l < checks[-1] or torch.allclose(scores[chosen[l]], found, 1e-3, 1e-5)
        assert [len(at) for at in chosen] == sizes
        return
    expected = {"none": 0, "all": n_reusable}.get(blend.policy, n)
    assert [len(at) for at in chosen] == [expected] * (n_layers + 1)
    assert all(torch.equal(at, chosen[0]) for at in chosen)
    candidates = start.reusable.nonzero()[:, 0]
    if blend.policy == "chunk_head":
        heads = [(at - span.start, at) for span in start.spans for at in range(span.start, span.stop)]
        assert chosen[0].tolist() == sorted(at for _, at in sorted(heads)[:n])
    if blend.policy == "query" and 0 < n < n_reusable:
        found = question_scores(tiny_decoder(case.kind), case.prompt, start)[candidates]
        check_best(torch.isin(candidates, chosen[0]), found)
        assert scores is not None
        assert scores.isfinite().nonzero()[:, 0].tolist() == candidates.tolist()
        assert torch.allclose(scores[candidates], found.float(), 1e-3, 1e-5)
    else:
        assert scores is None


def check_best(kept: Tensor, scores: Tensor) -> None:
    """No dropped token has a larger score than one that is kept, but for rounding."""
    if kept.any() and not kept.all():
        assert float(scores[kept].min()) >= float(scores[~kept].max()) * (1 - 1e-4) - 1e-6


@given(cases())
def test_blending_is_what_the_formulas_say(case: Case) -> None:
    event(f"policy {case.blend.policy}")
    event(f"correction {case.blend.correction}")
    usable = [ids for i in case.looked_up if (ids := case.prompt.chunks[i].ids) not in case.damaged]
    assume(case.blend.correction in {"none", "shift"} or len(usable) < 2 or len(set(usable)) > 1)
    check(case)


def test_a_prompt_of_one_chunk_many_times() -> None:
    """Three recomputed tokens are the same token of the same chunk, so they show nothing of how others move."""
    prompt = Prompt((), (Chunk((40, 52)),) * 4, (78,))
    blend = BlendConfig(method="blend", ratio=0.3, correction="ridge")
    check(Case("llama-yarn", prompt, ((40, 52),), (), None, blend, 0.0))


def example(kind: str = "llama-yarn", **options: Any) -> Case:
    """Three stored chunks, one missing chunk, and an edited copy, of which 16 tokens behind the edit are reused."""
    base = some_prompt([9, 7, 12, 8], prefix=3, suffix=4)
    chunks = [*base.chunks[:2], Chunk(edited_copy(20)), *base.chunks[2:]]
    prompt = Prompt(base.prefix, tuple(chunks), base.suffix)
    stored = (*(base.chunks[i].ids for i in (0, 1, 3)), DONOR)
    blend = BlendConfig(**{"method": "blend", "ratio": 0.3, "near": True, **options})
    return Case(kind, prompt, stored, prompt.prefix, 20, blend, 0.3)


@EVERY_KIND
@pytest.mark.parametrize(
    "options",
    [
        *({"policy": "deviation[1,2]", "correction": c} for c in CORRECTIONS.names),
        {"policy": "query", "correction": "ridge"},
    ],
)
def test_each_kind_with_several_check_layers_and_a_scoring_pass(kind: str, options: dict[str, Any]) -> None:
    """Rows that are about to be dropped are no sample to correct by; the question scores stored tokens alone."""
    check(example(kind, **options))


@pytest.mark.parametrize(("ratio", "prior"), [(0.0, 0.3), (0.05, 0.3), (0.1, 0.3), (0.3, 0.02)])
def test_a_prior_counts_less_where_few_tokens_are_recomputed_or_they_contradict_it(
    ratio: float, prior: float
) -> None:
    """Recomputed tokens contradict a prior of 0.02 in some heads, and move by a multiple of it in others."""
    check(replace(example(policy="random", ratio=ratio, correction="prior"), prior=prior))


@pytest.mark.parametrize("context", [0, 1, 3])
def test_the_first_chunk_is_exact_only_behind_its_own_prefix(context: int) -> None:
    case = example(policy="none", correction="none")
    check(replace(case, context=case.prompt.prefix[:context]))


# The twin itself


@EVERY_KIND
@pytest.mark.parametrize("found", [0, 2, 4])
def test_the_twin_is_the_models_forward_if_what_is_stored_is_exact(kind: str, found: int) -> None:
    decoder, prompt = tiny_decoder(kind), some_prompt([14, 1, 20, 9])
    pieces = [
        Piece(span, chunk.ids, 0, prompt.ids[: span.start])
        for span, chunk in list(zip(prompt.spans, prompt.chunks, strict=True))[:found]
    ]
    start = start_from(decoder, prompt, pieces)
    twin = naive_prefill(decoder, prompt, start, [(~start.known).nonzero()[:, 0]] * (decoder.n_layers + 1))
    keys, values = model_kv(decoder, prompt.ids)
    assert_near(twin.logits, model_logits(decoder, prompt))
    assert_near(twin.keys, keys)
    assert_near(twin.values, values)
    assert int(start.exact.sum()) == sum(map(len, prompt.chunks[:found]))


def test_the_check_sees_a_rotation_that_is_one_position_off(monkeypatch: pytest.MonkeyPatch) -> None:
    case = example(policy="random", correction="none")
    check(case)
    monkeypatch.setattr(module, "KVLoader", OneOff)
    with pytest.raises(AssertionError):
        check(case)
