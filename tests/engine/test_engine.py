"""Questions through the whole engine: an answer does not depend on where KV lies or on what else is asked."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.blend import priors
from blendserve.core import Passage
from blendserve.engine.engine import Engine
from blendserve.errors import ConfigError, InputError, PromptTooLong, ShuttingDown
from blendserve.store import LMDBStore, MemoryStore, share_of
from tests.support.engines import (
    CONFIG,
    EMPTY_PASSAGES,
    PASSAGES,
    QUESTIONS,
    generated,
    seen,
    submit,
    toy_batch,
    toy_engine,
    toy_reader,
)

QUESTION = QUESTIONS[0]
SOME = [*PASSAGES[:3], *EMPTY_PASSAGES]  # the last one has no tokens


@pytest.fixture
def warm() -> Iterator[Engine]:
    with toy_engine() as made:
        made.precompute(SOME)
        yield made


@given(
    order=st.lists(st.integers(0, 4), max_size=6),
    stored=st.sets(st.integers(0, 4)),
    method=st.sampled_from(["blend", "full", "prefix", "reuse"]),
    ratio=st.sampled_from([0.0, 0.15, 1.0]),
    policy=st.sampled_from(["query", "deviation", "chunk_head"]),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_any_passages_in_any_order_get_an_answer(
    order: list[int], stored: set[int], method: str, ratio: float, policy: str, temperature: float
) -> None:
    passages, chunks = [SOME[i] for i in order], sum(i < 4 for i in order)
    with toy_engine() as made:
        made.precompute([SOME[i] for i in stored])
        options: dict[str, Any] = {"method": method, "ratio": ratio, "policy": policy}
        answer = made.answer(QUESTION, passages, **options, temperature=temperature, max_new_tokens=3)
        n_tokens = len(made.prompts.build(QUESTION, passages))
    report = answer.report
    assert answer.passages == tuple(passages)
    assert 1 <= len(answer.token_ids) <= 3
    assert report.tokens_prompt == n_tokens
    looked_for = {"full": 0, "prefix": min(1, chunks)}.get(method, chunks)
    assert report.chunks_hit + report.chunks_missing == looked_for
    if temperature == 0.0 and (method in {"full", "prefix"} or (ratio == 1.0 and method == "blend")):
        assert answer.token_ids == generated(tuple(passages), 3)


def test_a_stream_is_the_answer_in_pieces(warm: Engine) -> None:
    stream = warm.stream(QUESTION, SOME)
    pieces = list(stream)
    answer = stream.answer()
    assert "".join(pieces) == answer.text == warm.answer(QUESTION, SOME).text
    assert list(stream) == []
    assert answer.finish_reason == "length"
    timings = answer.timings
    assert min(timings.load, timings.select, timings.correct) > 0
    assert timings.load + timings.select + timings.correct < timings.prefill < timings.ttft
    stop = answer.text[len(answer.text) // 2 :][:3]
    cut = warm.answer(QUESTION, SOME, stop=(stop,))
    assert (cut.text, cut.finish_reason) == (answer.text[: answer.text.index(stop)], "stop")


def test_streams_of_one_thread_and_of_many_do_not_disturb_each_other(warm: Engine) -> None:
    orders = [SOME, SOME[::-1], SOME[1:], SOME[:1]]

    def ask(order: list[Any]) -> tuple[int, ...]:
        next(iter(warm.stream(QUESTION, order)), None)  # dropped after its first piece
        gc.collect(0)
        return warm.answer(QUESTION, order, max_new_tokens=6).token_ids

    alone = [warm.answer(QUESTION, order, max_new_tokens=6).token_ids for order in orders]
    assert len(set(alone)) == len(alone)
    streams = [warm.stream(QUESTION, order, max_new_tokens=6) for order in orders]
    sources = [iter(stream) for stream in streams]
    for _ in range(8):
        for source in sources:
            next(source, None)
    assert [stream.answer().token_ids for stream in streams] == alone
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, orders)) == alone


def test_what_answered_requests_computed_is_stored_before_the_scheduler_stops() -> None:
    with toy_engine() as engine:
        batch = toy_batch(engine)
        batch.scheduler.start()
        answers = [submit(batch, question, PASSAGES, max_new_tokens=1) for question in QUESTIONS[:2]]
        assert [answer.answer().report.chunks_missing for answer in answers] == [len(PASSAGES)] * 2
        batch.scheduler.stop(finish_s=60)
        assert engine.store.stats().chunks == len(PASSAGES)


def test_threads_get_the_answers_that_each_gets_alone() -> None:
    with toy_engine() as engine:
        engine.precompute(PASSAGES)
        batch = toy_batch(engine)
        batch.scheduler.start()

        def ask(n: int) -> None:
            options: dict[str, Any] = {"max_new_tokens": 2 + n // 3, "seed": n, "temperature": n % 2}
            question, passages = QUESTIONS[n % 4], PASSAGES[n % 3 :]
            answer = submit(batch, question, passages, str(n % 3), **options).answer()
            assert seen(answer) == seen(engine.answer(question, passages, **options))
            assert answer.timings.ttft >= answer.timings.prefill > 0

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(12)))
        listeners = [submit(batch, QUESTIONS[0], PASSAGES, max_new_tokens=600) for _ in range(3)]
        listeners[0].next()
        batch.scheduler.stop()
        for listener in listeners:
            with pytest.raises(ShuttingDown):
                listener.answer()
        assert (batch.scheduler.load, batch.pool.free, batch.scheduler.alive) == ((0, 0), 3, False)


@pytest.mark.parametrize("write_back", [True, False])
def test_what_a_request_misses_is_stored_after_its_answer(write_back: bool) -> None:
    with toy_engine(store={"write_back": write_back}) as made:
        stream = made.stream(QUESTION, SOME)
        assert stream.report.chunks_missing == made.missing(SOME) == 4
        stream.answer()
        assert made.missing(SOME) == (0 if write_back else 4)


def test_a_prompt_that_fits_to_the_token_and_one_that_does_not(
    warm: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = len(warm.prompts.build(QUESTION, SOME))
    monkeypatch.setattr(warm.reader.adapter, "context_limit", n + 20)
    answer = warm.answer(QUESTION, SOME, max_new_tokens=20, temperature=1.0)
    assert answer.report.tokens_prompt == n
    with pytest.raises(PromptTooLong) as error:
        warm.answer(QUESTION, SOME, max_new_tokens=21)
    assert error.value.over == 1


@pytest.mark.parametrize(
    ("options", "error", "setting"),
    [
        ({"ratoi": 0.5}, ConfigError, "ratoi"),
        ({"passages": None}, InputError, "passages"),
        ({"near": True}, ConfigError, "blend.near"),
    ],
)
def test_bad_input_is_refused_by_name(
    options: dict[str, Any], error: Any, setting: str, warm: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm.store, "cap_bytes", 0)  # such a store never finds near-duplicates
    with pytest.raises(error) as raised:
        warm.stream(**{"question": QUESTION, "passages": SOME, **options})
    assert raised.value.setting == setting


def test_equal_seeds_draw_equal_answers(warm: Engine) -> None:
    options: dict[str, Any] = {"policy": "random", "temperature": 1.0, "max_new_tokens": 10}
    ids = [warm.answer(QUESTION, SOME, seed=s, **options).token_ids for s in (1, 1, 2)]
    assert ids[0] == ids[1] != ids[2]


def test_precompute_fits_the_prior_once_and_the_next_engine_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priors, "MIN_TOKENS", 1)
    steps, store = list[tuple[int, int]](), MemoryStore(2**30)

    def fail(done: int, total: int) -> None:
        pytest.fail("a prior was fitted")

    with toy_engine(store) as first:
        assert not first.answer(QUESTION, SOME).report.prior
        first.blender.priors.use(None)
        first.precompute(SOME, learning=lambda done, total: steps.append((done, total)))
        assert steps[-1][0] == steps[-1][1] > 0
        answer = seen(first.answer(QUESTION, SOME))
        assert answer["report"]["prior"]
    with toy_engine(store) as second:
        second.precompute(SOME, learning=fail)
        assert seen(second.answer(QUESTION, SOME)) == answer
    with toy_engine(blend={"correction": "ridge"}) as without:
        without.precompute(SOME, learning=fail)


# Shards


def test_shares_are_about_equal_and_never_move() -> None:
    shares = [share_of((n, n + 1, 7), 4) for n in range(4000)]
    assert all(900 < shares.count(i) < 1100 for i in range(4))
    assert "".join(map(str, shares[:8])) == "02212122"  # a later version goes on with the same shares
    assert share_of([3, 4, 7], 4) == shares[3]


def test_a_shard_that_was_begun_goes_on_and_shards_cover_everything() -> None:
    passages = [Passage(f"Passage {n} says {n * n}, and nothing else.") for n in range(12)]
    with toy_engine() as made:
        mine = [p for p in passages if share_of(made.prompts.chunk(p).ids, 3) == 1]
        made.precompute(mine[:1])
        assert made.missing(passages[::-1], (1, 3)) == len(mine) - 1
        assert made.precompute([*passages[::-1], *passages], (1, 3)).computed == len(mine) - 1
        others = [made.precompute(passages, (i, 3)).computed for i in (0, 2)]
        assert sum(others) + len(mine) == len(passages)
        assert made.missing(passages) == 0


# Stores that fail, and tenants


def test_a_store_that_refuses_writes_serves_requests(tmp_path: Path) -> None:
    with toy_engine(LMDBStore(tmp_path, 2**30)) as writer:
        writer.precompute(SOME)
    with toy_engine(LMDBStore(tmp_path, 2**30, read_only=True)) as reader:
        for _ in range(2):
            report = reader.answer(QUESTION, [*SOME, Passage("Item 99 lies under the stairs.")]).report
            assert (report.blended, report.chunks_hit, report.chunks_missing) == (True, 4, 1)


def test_a_tenant_neither_hits_nor_lists_nor_counts_what_another_stored(warm: Engine) -> None:
    other, n = warm.tenant("other"), 4
    before = warm.store.stats("")
    first = other.answer(QUESTION, SOME)
    assert (first.report.chunks_hit, first.report.tokens_reused, first.report.bytes_loaded) == (0, 0, 0)
    assert first.token_ids == warm.answer(QUESTION, SOME, method="full").token_ids
    assert other.answer(QUESTION, SOME).report.chunks_hit == n  # under its own keys
    keys = [set(warm.store.keys(namespace)) for namespace in ("", "other")]
    assert keys[0].isdisjoint(keys[1])
    assert list(map(len, keys)) == [n, n]
    after = warm.store.stats("")
    assert (after.chunks, after.bytes, after.misses) == (before.chunks, before.bytes, before.misses)
    assert other.blender.writer.delete(ids for ids in other.prompts.chunk_ids(SOME) if ids) == n
    assert (other.missing(SOME), warm.missing(SOME)) == (n, 0)


@pytest.mark.parametrize(("location", "pins"), [("", 1), ("shared", 4)])
def test_an_index_that_is_built_anew_unpins_what_the_old_one_had_in_a_store_of_its_own(
    location: str, pins: int, tmp_path: Path
) -> None:
    documents = [{"id": f"d{n}", "text": p.text} for n, p in enumerate(PASSAGES[:4])]
    location = location and str(tmp_path / location)  # other engines may have pinned chunks there
    config = CONFIG.model_copy(update={"store": CONFIG.store.model_copy(update={"location": location})})
    with Engine.build(tmp_path / "index", documents, config, reader=toy_reader()) as made:
        made.precompute()
        assert (made.store.stats().chunks, made.store.stats().pins) == (4, 4)
    with Engine.build(tmp_path / "index", documents[1:2], config, reader=toy_reader()) as made:
        assert made.missing() == 0
        assert (made.store.stats().chunks, made.store.stats().pins) == (4, pins)
