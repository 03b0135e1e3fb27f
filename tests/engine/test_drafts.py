"""Drafts by prompt lookup: found as by brute force, and the same answers with, without and with wrong ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.answer import Answer
from blendserve.config import BlendConfig, DecodeConfig
from blendserve.core import Chunk, Prompt, TokenIds
from blendserve.engine import generate
from blendserve.engine.drafts import LONG, RETRY, SHORT, Drafter
from blendserve.engine.generate import AnswerStream, TokenSequence, prefill
from blendserve.engine.request import AnswerRules, PreparedRequest
from blendserve.kernels.cpu.decoder import MAX_ROWS
from blendserve.models.loader import LoadedModel
from blendserve.models.model import DecoderModel
from blendserve.models.runner import native_decoder
from blendserve.store import MemoryStore
from blendserve.timing import Clock
from tests.support.blending import PREFIX, some_ids, tiny_blender
from tests.support.engines import PASSAGES, QUESTIONS, submit, toy_batch, toy_engine
from tests.support.models import wide_model
from tests.support.tokenizers import bundled_tokenizer

NEW = 80
PROMPT = Prompt(PREFIX, (Chunk(some_ids(60, 5)), Chunk(some_ids(40, 6))), some_ids(8, 7))
TIMES = settings().max_examples // 25  # more seeds at night
SAMPLING: list[dict[str, Any]] = [
    {},
    *({"temperature": 1.0, "top_p": 0.5, "seed": seed} for seed in range(2 * TIMES)),
    *({"temperature": 0.3, "seed": seed} for seed in range(3 * TIMES)),
]


@given(ids=st.lists(st.integers(0, 3), max_size=60), cut=st.integers(0, 60), room=st.integers(1, 9))
def test_a_draft_is_what_followed_the_last_tokens_before(ids: list[int], cut: int, room: int) -> None:
    drafter = Drafter(ids[:cut])
    for token in ids[cut:]:
        drafter.push(token)
    expected: list[int] = []
    for n in (2, 3):  # the longer one counts
        ends = [i for i in range(n, len(ids)) if ids[i - n : i] == ids[-n:]]
        if ends:
            expected = ids[ends[-1] :][: min(room, SHORT)]
    assert drafter.draft(room) == expected


def test_drafts_are_longer_while_they_are_right_and_rare_while_they_are_wrong() -> None:
    drafter = Drafter(range(50))
    drafter.push(0)
    drafter.push(1)
    assert drafter.draft(LONG) == [2, 3, 4]
    for _ in range(9):
        drafter.judge(SHORT, SHORT)
    assert len(drafter.draft(LONG)) == LONG
    for _ in range(30):
        drafter.judge(LONG, 0)
    assert [len(drafter.draft(LONG)) for _ in range(2 * RETRY)] == 2 * [*[0] * (RETRY - 1), SHORT]


@cache
def model(dtype: torch.dtype) -> LoadedModel:
    """A vocabulary of 98 tokens: n-grams come again, and what follows them is mostly another token."""
    model = DecoderModel.of(wide_model("llama-biased", dtype))
    return LoadedModel("wide", model, bundled_tokenizer(), "wide", frozenset({5}))


def answer(dtype: torch.dtype, drafts: bool = True, **options: Any) -> Answer:
    loaded, decode = model(dtype), DecodeConfig(max_new_tokens=NEW, **options)
    rules = AnswerRules(drafts=drafts)
    plan = PreparedRequest(PROMPT, (), BlendConfig(method="full"), decode, Clock(), rules=rules)
    blender = tiny_blender(MemoryStore(2**20), decoder=loaded.decoder)
    sequence = TokenSequence(plan, loaded, partial(prefill, blender=blender))
    return AnswerStream(sequence).answer()


def check_equal(one: Answer, other: Answer) -> None:
    assert one.token_ids == other.token_ids
    assert (one.text, one.finish_reason) == (other.text, other.finish_reason)


Draft = Callable[[list[int], int], list[int]]  # the answer from here on, room -> a draft


def draft_by(monkeypatch: pytest.MonkeyPatch, answers: Mapping[TokenIds, Answer], made: Draft) -> None:
    """Have drafts made from answers that are known in advance, by their prompts."""

    class Oracle:
        def __init__(self, ids: TokenIds) -> None:  # the prompt and the answer's first token
            self.rest = [*answers[ids[:-1]].token_ids[1:], *[0] * NEW]

        def push(self, token: int) -> None:
            self.rest.pop(0)

        def draft(self, room: int) -> list[int]:
            return made(self.rest, room)[:room]

        def judge(self, n_drafted: int, n_right: int) -> None:
            pass

    monkeypatch.setattr(generate, "Drafter", Oracle)


def right(rest: list[int], room: int) -> list[int]:
    return rest


def wrong(rest: list[int], room: int) -> list[int]:
    return [(token + 1) % 90 for token in rest[:room]]


def mixed(rest: list[int], room: int) -> list[int]:
    n = random.Random(repr(rest)).randint(0, room)
    return rest[:n] + wrong(rest[n:], room - n)


@pytest.mark.parametrize("options", SAMPLING, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_answers_are_the_same_without_drafts_and_with_good_and_bad_ones(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if native_decoder(model(dtype).decoder)[0] is None:
        pytest.skip(f"no native step for {dtype}: no drafts")
    whole = answer(dtype, drafts=False, **options)
    assert whole.timings.tokens_per_pass == 1.0
    check_equal(answer(dtype, **options), whole)
    stop = whole.text[9:11]
    stopped = [answer(dtype, stop=(stop,), drafts=drafts, **options) for drafts in (True, False)]
    check_equal(*stopped)
    n = len(whole.token_ids) - (whole.finish_reason == "length")
    for made, tokens_per_pass in ((right, n / -(-n // MAX_ROWS)), (wrong, 1.0), (mixed, None)):
        draft_by(monkeypatch, {PROMPT.ids: whole}, made)
        got = answer(dtype, **options)
        check_equal(got, whole)
        assert tokens_per_pass in (None, got.timings.tokens_per_pass)


def test_threads_get_the_answers_that_each_gets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts of any length, where a native step checks them."""
    engine, n = toy_engine(), 12
    engine.precompute(PASSAGES)
    batch, has_drafts = toy_batch(engine), native_decoder(engine.model.decoder)[0] is not None
    asked = [(QUESTIONS[i % 4], PASSAGES[i % 3 :]) for i in range(n)]
    options: list[dict[str, Any]] = [
        {"method": ("full", "blend")[i // 6], "max_new_tokens": 16 + i, **SAMPLING[i % 6]} for i in range(n)
    ]

    def alone(i: int) -> Answer:
        return engine.answer(*asked[i], **options[i])

    def together(i: int) -> Answer:
        listener = submit(batch, *asked[i], str(i % 3), **options[i])
        check_equal(alone(i), expected[i])
        return listener.answer()

    expected = list(map(alone, range(n)))
    if has_drafts:
        prompts = [engine.prompts.build(*a).ids for a in asked]
        draft_by(monkeypatch, dict(zip(prompts, expected, strict=True)), mixed)
    batch.scheduler.start()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(together, range(n)))
    batch.scheduler.stop()
    for one, other in zip(answers, expected, strict=True):
        check_equal(one, other)
        assert one.report == other.report
        assert one.timings.ttft >= one.timings.prefill > 0
    assert not has_drafts or max(one.timings.tokens_per_pass for one in answers) > 1.0
    assert (batch.scheduler.load, batch.pool.free, batch.scheduler.alive) == ((0, 0), 3, False)
