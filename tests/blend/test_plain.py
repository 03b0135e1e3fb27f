"""Plain prompts: which stored chunks are reused, what is computed with them, and what is never stored."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.blend import donors as donors_module
from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.cost import CostModel
from blendserve.blend.runs import EDGE, MARGIN, MIN_SPAN
from blendserve.config import BlendConfig, Method
from blendserve.core import PLAIN_SUFFIX, Chunk, Passage, Prompt, Span, TokenIds, run
from blendserve.engine.chat import Chat
from blendserve.engine.request import Request
from blendserve.kv import stacked
from blendserve.models.kv_cache import KVCache
from blendserve.models.runner import append
from blendserve.store import MemoryStore
from tests.support.blending import (
    PREFIX,
    TracedCache,
    assert_near,
    check_report,
    model_logits,
    some_ids,
    tiny_blender,
)
from tests.support.engines import PASSAGES, toy_batch, toy_engine
from tests.support.models import tiny_decoder
from tests.support.plain import BLEND, CHUNKS, END, TEXT, A, B, C, Copy, D, ask, donors_of, other, plain
from tests.support.stores import ROOMY, FaultyStore
from tests.support.twin import Piece, naive_prefill, start_from


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even on a busy machine a first request waits for the index."""
    monkeypatch.setattr(donors_module, "FIRST_WAIT_S", 60.0)


def places(done: Prefilled) -> list[tuple[int, int]]:
    return [(span["start"], span["stop"]) for span in done.report.spans]


@cache
def shared_blender() -> Blender:
    """Has no prefix of its own, and caches none."""
    return tiny_blender(None, *CHUNKS, prefix=())


EDGES = st.integers(0, EDGE + 4)
COPIES = st.builds(Copy, st.sampled_from(CHUNKS), EDGES, EDGES)


@given(st.lists(st.tuples(st.sampled_from([0, 1, 5, 40]), COPIES), max_size=4), st.integers(0, 24))
def test_text_of_chunks_is_reused_up_to_the_last_16_tokens(
    pieces: list[tuple[int, Copy]], n_end: int
) -> None:
    by, parts, expected = shared_blender(), list[TokenIds | Copy](), list[tuple[int, int, str, int, int]]()
    n = sum(gap + len(copy.ids) for gap, copy in pieces) + n_end
    at = 0
    for gap, copy in pieces:
        parts += [some_ids(gap, 50), copy]
        start, stop = at + gap + copy.head, at + gap + len(copy.ids) - copy.tail
        at += gap + len(copy.ids)
        margin = MARGIN if copy.head > EDGE else 0  # a few tokens merge with the text in front of them
        start, stop = start + margin, min(stop, n - PLAIN_SUFFIX)
        if stop - start >= MIN_SPAN:
            expected.append((start, stop, by.key(copy.ids).hex(), copy.head + margin, at - stop))
    prompt = plain(*parts, some_ids(n_end, 51))
    if not len(prompt):
        return
    done = ask(by, prompt)
    names = ("start", "stop", "donor", "missing_head", "missing_tail")
    assert [tuple(span[name] for name in names) for span in done.report.spans] == expected
    assert (done.report.chunks, done.report.chunks_hit) == (len(expected), len(expected))
    n_reused = sum(stop - start for start, stop, *_ in expected)
    assert done.report.tokens_reused + done.report.tokens_first == n_reused
    assert done.n_cached == n_reused
    assert done.missing == ()
    if not expected:
        assert_near(done.result.logits, model_logits(by.model, prompt))


@pytest.mark.parametrize("kind", ["llama", "llama-yarn"])
@pytest.mark.parametrize("context", [(), PREFIX])
def test_reused_spans_are_stored_kv_at_its_place_and_the_rest_is_computed(
    kind: str, context: TokenIds
) -> None:
    decoder, parts = tiny_decoder(kind), (TEXT, Copy(B, 3, 1), TEXT, Copy(A, 0, 8), Copy(D), END)
    by, prompt = tiny_blender(None, *CHUNKS, decoder=decoder, context=context), plain(*parts)
    cache = TracedCache(decoder, len(prompt))
    done = by.run(prompt, BLEND, cache=cache)
    start = len(TEXT) + 3
    pieces = [
        Piece(Span(0, start), prompt.ids[:start], 0, ()),
        Piece(Span(start, start + 66), B, 3, context),
        Piece(Span(110, 166), A, 0, context),
        Piece(Span(174, 274), D, 0, context),
    ]
    twin = naive_prefill(decoder, prompt, start_from(decoder, prompt, pieces), [*cache.rows, cache.rows[-1]])
    assert_near(cache.keys, twin.keys, 3e-4)
    assert_near(done.result.logits, twin.logits, 3e-4)
    assert places(done) == [(piece.span.start, piece.span.stop) for piece in pieces[1:]]


@pytest.mark.parametrize("policy", ["none", "deviation", "query"])
def test_a_prompt_of_whole_chunks_is_computed_as_one_that_names_them(policy: str) -> None:
    by, blend = shared_blender(), BlendConfig(method="blend", policy=policy, ratio=0.3)
    found = ask(by, plain(TEXT, A, B, C, END), blend)
    named = by.run(Prompt(TEXT, tuple(map(Chunk, (A, B, C))), END), blend)
    assert torch.equal(found.result.logits, named.result.logits)
    assert found.result.recomputed.tolist() == named.result.recomputed.tolist()
    for name in ("exact", "reused", "recomputed", "computed", "suffix"):
        assert getattr(found.report, f"tokens_{name}") == getattr(named.report, f"tokens_{name}")
    assert found.report.bytes_loaded == named.report.bytes_loaded


def test_the_end_of_a_chunk_does_not_choose_what_is_recomputed() -> None:
    """Where the last chunk reaches into the last tokens, these stand in no chunk's middle: the text behind it scores."""
    ends, blend = (D, (*D[:-11], *other(D[-11:]))), BLEND.with_values(policy="query", ratio=0.3)
    one, two = (ask(tiny_blender(None, A, end), plain(TEXT, A, end, END[:5]), blend) for end in ends)
    assert one.report.spans[-1]["missing_tail"] == 11
    assert one.result.scores is not None
    assert two.result.scores is not None
    assert one.report.tokens_recomputed == round(0.3 * (len(A) + len(D) - 11))
    assert one.result.recomputed.tolist() == two.result.recomputed.tolist()
    reusable = ~one.result.scores.isnan()
    assert torch.equal(one.result.scores[reusable], two.result.scores[reusable])
    with_question = ask(tiny_blender(None, A, D), plain(TEXT, A, D, some_ids(16, 60)), blend)
    assert with_question.report.cost > one.report.cost


def test_a_chunk_right_behind_its_own_context_is_exact() -> None:
    by, prompt = tiny_blender(None, A), plain(PREFIX, A, END)
    done = ask(by, prompt)
    assert places(done) == [(len(PREFIX), len(PREFIX) + len(A))]
    assert (done.report.tokens_first, done.report.tokens_reused) == (len(A), 0)
    assert_near(done.result.logits, model_logits(by.model, prompt))


def test_the_explanation_names_each_chunk_and_the_text_between() -> None:
    by = shared_blender()
    report = ask(by, plain(TEXT, Copy(A, 2, 0), B, TEXT, C, END)).report
    parts = report.explain()["parts"]
    kinds = [(part["kind"], part["passage"]) for part in parts]
    chunks = [("passage", 0), ("passage", 1), ("text", None), ("passage", 2)]
    assert kinds == [("prefix", None), *chunks, ("suffix", None)]
    keys = [by.key(ids).hex() for ids in (A, B)]
    donors = [
        {"start": part["start"], "stop": part["stop"], "key": key}
        for part, key in zip(parts[1:3], keys, strict=True)
    ]
    assert [part["donors"] for part in parts[1:4]] == [donors[:1], donors[1:], []]
    assert [span.is_moved for span in report.layout[1:5]] == [True, True, False, True]


@pytest.mark.parametrize(
    ("parts", "runs"),
    [
        ((TEXT, A[:55]), [(20, A, 0, 40)]),
        ((TEXT, A[:50], TEXT, A[50:], END), [(20, A, 0, 50)]),
        (
            (TEXT, (*D[:40], *other(D[40:41]), *D[41:]), END),
            [(20, D, 0, 40), (20 + 41 + MARGIN, D, 41 + MARGIN, 51)],
        ),
        ((TEXT, D[20:], END), [(20 + MARGIN, D, 20 + MARGIN, 72)]),
        ((D[50:], C[:50], B[10:], END), [(8, D, 58, 42), (50, C, 0, 50), (108, B, 18, 52)]),
        ((TEXT, A[: MIN_SPAN - 1], TEXT, D[69 - MARGIN :], END), []),
        ((), []),
    ],
)
def test_parts_of_chunks_and_edited_ones_are_found_and_the_rest_is_computed(
    parts: tuple[TokenIds, ...], runs: list[tuple[int, TokenIds, int, int]]
) -> None:
    """runs: where, of which chunk, from where in it, tokens."""
    by, prompt = shared_blender(), plain(*parts, (5,))
    cache = TracedCache(by.model, max(1, len(prompt)))
    done = by.run(prompt, BLEND, cache=cache)
    check_report(done.report, prompt)
    expected = [(at, at + n, by.key(ids).hex(), offset) for at, ids, offset, n in runs]
    names = ("start", "stop", "donor", "missing_head")
    assert [tuple(span[name] for name in names) for span in done.report.spans] == expected
    assert done.report.blended == bool(runs)
    if not runs:
        assert_near(done.result.logits, model_logits(by.model, prompt))
        return
    first = runs[0][0]
    pieces = [Piece(Span(0, first), prompt.ids[:first], 0, ())] if first else []
    pieces += [Piece(Span(at, at + n), ids, offset, ()) for at, ids, offset, n in runs]
    start = start_from(by.model, prompt, pieces)
    twin = naive_prefill(by.model, prompt, start, [*cache.rows, cache.rows[-1]])
    assert_near(done.result.logits, twin.logits, 3e-4)


@pytest.mark.parametrize("method", ["full", "prefix"])
def test_exact_methods_search_for_nothing(method: Method) -> None:
    by, prompt = shared_blender(), plain(TEXT, A, END)
    assert by.match(prompt, BLEND.with_values(method=method)) == prompt
    done = ask(by, prompt, BLEND.with_values(method=method))
    assert (done.report.spans, done.report.tokens_reused) == ([], 0)
    assert_near(done.result.logits, model_logits(by.model, prompt))


def test_donors_are_of_the_same_model_context_and_namespace() -> None:
    store, contexts = MemoryStore(ROOMY), (PREFIX, TEXT)
    of = {
        case: tiny_blender(store, fingerprint=case[0], context=case[1], namespace=case[2])
        for case in product("ab", contexts, ("", "other"))
    }
    mine, *_ = of.values()
    mine.writer.precompute([A])
    for by in of.values():
        by.finder.refresh()
        found = donors_of(ask(by, plain(TEXT, A, END)))
        assert found == ([mine.key(A).hex()] if by is mine else [])
    assert donors_of(ask(mine.over(store, ""), plain(TEXT, A, END)))
    assert not donors_of(ask(mine.over(store, "other"), plain(TEXT, A, END)))


def test_nothing_of_a_plain_prompt_is_stored() -> None:
    by = tiny_blender(None, A, B)
    before, prompt = set(by.store.keys()), plain(TEXT, A, some_ids(90, 8), B, END)
    done = ask(by, prompt)
    assert run(by.writer.write_back(done.missing)) == 0
    assert set(by.store.keys()) == before
    assert run(by.writer.write_back(by.run(prompt, BLEND.with_values(near=True)).missing)) == 0
    assert set(by.store.keys()) == before


@pytest.mark.parametrize("layer", [None, 2])
def test_a_damaged_chunk_is_computed_and_reported(layer: int | None) -> None:
    store = FaultyStore(MemoryStore(ROOMY))
    by, prompt = tiny_blender(store, A, B), plain(TEXT, A, B, END)
    without = tiny_blender(None, B).run(prompt, BLEND)
    store.damaged, store.damaged_layer = {by.key(A)}, layer
    done = ask(by, prompt)
    report = done.report
    assert (report.chunks, report.chunks_hit, report.chunks_corrupt) == (2, 1, 1)
    assert [(unusable["chunk"], unusable["kind"]) for unusable in report.unusable] == [(0, "corrupt")]
    assert donors_of(done) == [by.key(B).hex()]
    assert report.layout[1].lookup == "corrupt"
    assert_near(done.result.logits, without.result.logits)
    assert done.missing == ()


def test_a_chunk_that_is_deleted_between_match_and_load_is_computed_and_then_forgotten() -> None:
    by, prompt = tiny_blender(None, A, B), plain(TEXT, A, END)
    matched = by.match(prompt, BLEND)
    assert [run.donor for run in matched.runs] == [by.key(A)]
    by.writer.delete([A])
    for method in ("blend", "reuse"):
        done = by.run(matched, BLEND.with_values(method=method))
        check_report(done.report, prompt)
        assert (done.report.chunks, done.report.chunks_missing, done.report.spans) == (1, 1, [])
        assert_near(done.result.logits, model_logits(by.model, prompt))
    assert by.match(prompt, BLEND) == prompt
    by.writer.precompute([A])
    assert by.match(prompt, BLEND) == matched


# What the prefix cache has


def test_what_is_cached_is_left_to_the_prefix_cache() -> None:
    by, turn = tiny_blender(prefix=()), plain(TEXT, A, TEXT, END)
    by.prefixes.cap_bytes = ROOMY
    assert ask(by, turn).n_cached == 0
    ask(by, plain(TEXT, C[:40], END))
    by.writer.precompute([A, B, C])
    done = ask(by, plain(turn.ids, B, END))
    assert places(done) == [(len(turn), len(turn) + len(B))]
    assert done.n_cached == len(turn) - PLAIN_SUFFIX + len(B)
    begun = ask(by, plain(TEXT, C, B, END))  # C begins in what is cached
    assert donors_of(begun) == [by.key(C).hex(), by.key(B).hex()]
    assert begun.n_cached == len(TEXT) + len(C) - MARGIN + len(B)


def test_what_is_in_front_of_the_first_chunk_is_cached_and_nothing_behind_it() -> None:
    by, prompt = tiny_blender(None, A, prefix=()), plain(TEXT, A, TEXT, END)
    by.prefixes.cap_bytes = ROOMY
    ask(by, prompt)
    again = ask(by, prompt)
    assert again.n_cached == len(TEXT) + len(A)
    assert by.prefixes.n_cached("", prompt.ids) == len(TEXT)


@pytest.mark.parametrize("kind", ["llama", "llama-yarn"])
def test_a_turn_goes_on_from_the_kv_that_the_last_answer_was_made_of(kind: str) -> None:
    """As decoding goes on from it; a method that is exact computes it again."""
    decoder, answer = tiny_decoder(kind), some_ids(5, 9)
    by, turn = tiny_blender(None, A, C, decoder=decoder, prefix=()), plain(TEXT, A, TEXT, END)
    by.prefixes.cap_bytes = ROOMY
    cache = KVCache(decoder, 400)
    done = by.run(turn, BLEND, cache=cache)
    append(decoder, cache, len(turn), list(answer))
    by.keep(turn, done.report, answer, cache)
    n, following = len(turn) + len(answer), plain(turn.ids, answer, TEXT, B, END)
    new = KVCache(decoder, len(following))
    next_turn = by.run(following, BLEND, cache=new)
    check_report(next_turn.report, following)
    assert (next_turn.report.tokens_exact, next_turn.n_cached) == (len(TEXT), n)
    assert (next_turn.n_blended, next_turn.report.spans) == (n - len(TEXT), [])
    assert_near(stacked(new.keys)[:, :, :n], stacked(cache.keys)[:, :, :n])
    assert_near(stacked(new.values)[:, :, :n], stacked(cache.values)[:, :, :n])
    logits = append(decoder, cache, n, list(following.ids[n:]))
    assert_near(next_turn.result.logits, logits[-1])
    kinds = [(span.kind, len(span), span.state) for span in next_turn.report.layout]
    assert kinds[:2] == [
        ("prefix", len(TEXT), "exact"),
        ("kept", len(following) - len(TEXT) - PLAIN_SUFFIX, "kept"),
    ]
    exact = by.run(following, BLEND.with_values(method="prefix"))
    assert (exact.report.tokens_kept, exact.n_blended, exact.n_cached) == (0, 0, len(TEXT))
    assert_near(exact.result.logits, model_logits(decoder, following))


def test_chunks_are_found_behind_what_is_kept() -> None:
    by, turn = tiny_blender(None, A, B, C, prefix=()), plain(TEXT, A, TEXT, END)
    by.prefixes.cap_bytes = ROOMY
    cache = KVCache(by.model, len(turn))
    by.keep(turn, by.run(turn, BLEND, cache=cache).report, (), cache)
    done = ask(by, plain(turn.ids, B, A, END))
    assert donors_of(done) == [by.key(B).hex(), by.key(A).hex()]
    assert (done.report.tokens_kept, done.n_cached) == (len(turn) - len(TEXT), len(turn) + len(A) + len(B))
    assert done.n_blended == len(turn) - len(TEXT) + len(A) + len(B)


@pytest.mark.parametrize(
    ("cap", "prompt", "n"),
    [(ROOMY, plain(TEXT, END), len(TEXT) + len(END) - PLAIN_SUFFIX), (10, plain(TEXT, A, END), 0)],
)
def test_only_a_blended_prompt_is_kept_and_only_below_the_cap(cap: int, prompt: Prompt, n: int) -> None:
    by = tiny_blender(None, A, prefix=())
    cache, by.prefixes.cap_bytes = KVCache(by.model, len(prompt)), cap
    by.keep(prompt, by.run(prompt, BLEND, cache=cache).report, (), cache)
    assert by.prefixes.n_cached("", prompt.ids, exact=False) == n


def test_auto_computes_and_caches_a_prompt_that_is_not_worth_blending() -> None:
    dear = CostModel(1e-6, 1e-6, 0.0, 1.0)  # loading
    by, prompt = tiny_blender(None, A, prefix=(), costs=dear), plain(TEXT, A, END)
    by.prefixes.cap_bytes = ROOMY
    auto = BLEND.with_values(method="auto")
    done = ask(by, prompt, auto)
    assert (done.report.method, done.report.spans, done.n_cached) == ("prefix", [], 0)
    assert_near(done.result.logits, model_logits(by.model, prompt))
    assert ask(by, prompt, auto).n_cached == len(prompt) - PLAIN_SUFFIX
    cheap = tiny_blender(None, A, costs=CostModel(1e-6, 1.0, 0.0, 1e-6))
    assert ask(cheap, prompt, auto).report.method == "blend"


# Engines


def layout_of(name: str, texts: Sequence[str]) -> str:
    """Passages in a message, as this client pastes them."""
    if name == "Open WebUI":
        return "".join(f'<source id="{n}" name="notes.pdf">{text}</source>\n' for n, text in enumerate(texts))
    if name == "AnythingLLM":
        each = "[CONTEXT {}]:\n{}\n[END CONTEXT {}]\n\n"
        return "".join(each.format(n, text, n) for n, text in enumerate(texts))
    return {"Haystack": "\n        ", "LangChain": "\n\n"}[name].join(["", *texts])


@pytest.mark.parametrize("name", ["LangChain", "Haystack", "Open WebUI", "AnythingLLM"])
def test_passages_of_a_clients_message_are_found_and_weigh_less_in_the_queue(name: str) -> None:
    texts = [" ".join(passage.text for passage in PASSAGES[n : n + 4]) for n in range(3)]
    engine = toy_engine()
    engine.precompute([Passage(text) for text in texts])
    said = f"Use this context.\n{layout_of(name, texts[::-1])}\nQuestion: what is bread made of?"
    chat = Chat(({"role": "system", "content": "Be brief."}, {"role": "user", "content": said}))
    blend = {"policy": "none", "correction": "none"}
    prepared = engine.prepare(Request("", plain=chat, blend=blend))
    batch = toy_batch(engine)
    sequence = batch.sequence(prepared, lambda event: None)
    keys = [engine.blender.key(ids) for ids in engine.prompts.chunk_ids(map(Passage, texts[::-1]))]
    assert [run.donor for run in sequence.request.prompt.runs] == keys
    assert sequence.request.prompt.ids == prepared.prompt.ids
    n_found = sum(len(run.span) for run in sequence.request.prompt.runs)
    assert sequence.cost <= len(prepared.prompt) - 0.9 * n_found
    stream = engine.run(prepared)
    assert [span["donor"] for span in stream.report.spans] == [key.hex() for key in keys]
