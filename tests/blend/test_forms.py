"""Parts of stored passages in prompts of models with sliding windows, and of models with recurrent layers."""

from __future__ import annotations

import pytest

from blendserve.blend import donors as donors_module
from blendserve.blend.cost import CostModel
from blendserve.blend.layout import ALL_SEAM, PART
from blendserve.core import Chunk, Prompt, Span
from blendserve.models.families import FAMILIES
from tests.support.blending import (
    PREFIX,
    TracedCache,
    assert_near,
    check_report,
    model_logits,
    some_ids,
    tiny_blender,
)
from tests.support.models import TINY, tiny_decoder
from tests.support.plain import BLEND, END, TEXT, A, B, D, ask, other, plain
from tests.support.twin import Piece, naive_prefill, start_from

RECURRENT = [name for name in TINY if FAMILIES[name.partition("-")[0]].recurrent]
WINDOWED = [name for name in TINY if name not in RECURRENT and tiny_decoder(name).windows != {None}]
MIXED = RECURRENT[:1]
PREFIX_IS_CHEAP = CostModel(0.0, 1.0, 0.0, 0.0)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even on a busy machine a first request waits for the index."""
    monkeypatch.setattr(donors_module, "FIRST_WAIT_S", 60.0)


@pytest.mark.parametrize("name", WINDOWED)
def test_with_windows_half_a_passage_is_stored_kv_at_its_place(name: str) -> None:
    decoder = tiny_decoder(name)
    by, prompt = tiny_blender(None, B, D, decoder=decoder, context=()), plain(TEXT, D[:50], B[30:], END)
    cache = TracedCache(decoder, len(prompt))
    done = by.run(prompt, BLEND, cache=cache)
    check_report(done.report, prompt)
    pieces = [
        Piece(Span(0, 20), prompt.ids[:20], 0, ()),
        Piece(Span(20, 70), D, 0, ()),
        Piece(Span(78, 110), B, 38, ()),  # behind its margin
    ]
    assert [(s["start"], s["stop"]) for s in done.report.spans] == [
        (p.span.start, p.span.stop) for p in pieces[1:]
    ]
    start = start_from(decoder, prompt, pieces)
    left = [(~start.known).nonzero()[:, 0]] * (1 + decoder.n_layers - decoder.n_kv_layers)
    twin = naive_prefill(decoder, prompt, start, [*cache.rows, *left])
    assert_near(done.result.logits, twin.logits, 3e-4)


@pytest.mark.parametrize("part", [slice(0, 50), slice(50, None)], ids=["first", "second"])
@pytest.mark.parametrize("name", RECURRENT)
def test_with_recurrent_layers_half_a_passage_is_computed_and_the_report_says_why(
    name: str, part: slice
) -> None:
    decoder = tiny_decoder(name)
    by, prompt = tiny_blender(None, B, D, decoder=decoder, context=()), plain(TEXT, D[part], TEXT, B, END)
    half, rest, whole = (span for span in ask(by, prompt).report.layout if span.donor)
    assert [span.donor for span in (half, rest, whole)] == [by.key(ids).hex() for ids in (D, B, B)]
    assert half.state == rest.state == "computed"  # the first tokens of B are computed in every prompt
    assert PART in half.reason
    assert whole.is_moved
    assert PART not in whole.reason
    alone = plain(TEXT, D[part], END)
    done = ask(by, alone)
    assert (done.report.reason, done.report.tokens_reused) == (PART, 0)
    assert_near(done.result.logits, model_logits(decoder, alone), 3e-5)


@pytest.mark.parametrize("name", MIXED)
def test_where_all_that_was_found_is_computed_the_prompt_is_cached_as_a_prefix(name: str) -> None:
    by = tiny_blender(None, D, decoder=tiny_decoder(name), context=(), costs=PREFIX_IS_CHEAP)
    by.prefixes.cap_bytes = 1 << 30
    prompt, auto = plain(TEXT, D[:50], END), BLEND.with_values(method="auto")
    assert ask(by, prompt, auto).report.reason == PART
    assert by.n_cached(prompt, auto) == len(prompt.prefix)


@pytest.mark.parametrize("name", MIXED)
def test_a_near_duplicate_of_a_part_and_a_chunk_that_is_no_longer_than_its_seam_say_so(name: str) -> None:
    decoder = tiny_decoder(name)
    short, edited = some_ids(decoder.seam, 9), (*other(D[:30]), *D[30:])
    by = tiny_blender(None, A, D, short, decoder=decoder)
    prompt = Prompt(PREFIX, tuple(map(Chunk, (A, edited, short))), END)
    report = by.run(prompt, BLEND.with_values(near=True)).report
    check_report(report, prompt)
    reasons = {span.chunk: span.reason for span in report.layout if span.kind == "passage"}
    assert PART in reasons[1]
    assert ALL_SEAM in reasons[2]
    assert not any(words in reasons[0] for words in (PART, ALL_SEAM))


@pytest.mark.parametrize("name", MIXED)
def test_a_whole_chunk_is_preferred_to_a_longer_part_of_another(name: str) -> None:
    longer = (*D, *some_ids(40, 8))
    by = tiny_blender(None, D, longer, decoder=tiny_decoder(name), context=())
    report = ask(by, plain(TEXT, longer[:130], END)).report
    (moved,) = (span for span in report.layout if span.is_moved)
    assert moved.donor == by.key(D).hex()
