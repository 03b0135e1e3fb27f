"""What is learnt from plain prompts: against a naive search, within its budgets, and nothing that must not be stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import filelock
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.answer import Answer
from blendserve.blend.precompute import ChunkWriter, MissingChunk
from blendserve.config import BlendConfig, ServeConfig
from blendserve.core import Prompt, Run, Span, TokenIds, run
from blendserve.engine.batch_engine import BatchEngine
from blendserve.engine.chat import Chat
from blendserve.engine.engine import Engine
from blendserve.engine.learn import BURST_S, LEAST, MOST, TOKENS_PER_S, Learner, LearntChunks
from blendserve.engine.request import Observer, PrefillDone, Request
from blendserve.kv import stacked
from blendserve.store import LMDBStore, MemoryStore
from blendserve.store.view import decode
from tests.support.blending import some_ids, tiny_blender
from tests.support.engines import Listener, toy_engine
from tests.support.plain import PARAGRAPHS
from tests.support.stores import ROOMY
from tests.support.waiting import eventually

TEXTS = [some_ids(n, 70 + n) for n in (64, 80, 130, 300)]
OTHERS = [some_ids(n, 7) for n in (1, 30, 60)]


def whole(ids: TokenIds, runs: tuple[Run, ...] = ()) -> Prompt:
    """A prompt that its client wrote from end to end."""
    return Prompt.plain(ids, runs, (Span(0, len(ids)),))


def repeats(ids: TokenIds, earlier: Sequence[TokenIds]) -> set[TokenIds]:
    """Every longest run of LEAST tokens or more that an earlier prompt has, too, unless all before is equal as well."""
    found = set[TokenIds]()
    for other in earlier:
        for shift in range(-len(other) + 1, len(ids)):
            equal = [0 <= i - shift < len(other) and ids[i] == other[i - shift] for i in range(len(ids))]
            at = 0
            while at < len(ids):
                stop = next((i for i in range(at, len(ids)) if not equal[i]), len(ids))
                if stop - at >= LEAST and not (shift == 0 and at == 0):
                    found.add(ids[at:stop])
                at = max(stop, at) + 1
    return found


@given(
    st.lists(st.lists(st.sampled_from([*TEXTS, *OTHERS]), max_size=4, unique=True), min_size=2, max_size=4)
)
def test_what_is_learnt_is_what_a_naive_search_finds(prompts: list[list[TokenIds]]) -> None:
    learner, earlier = Learner(lambda token: False), list[TokenIds]()
    for parts in prompts:
        ids = tuple(i for part in parts for i in part)
        found = learner.see(whole(ids), 0)
        assert set(found) == repeats(ids, earlier)
        assert [len(each) for each in found] == sorted(len(each) for each in found)
        earlier.append(ids)


def test_a_passage_is_learnt_at_its_second_sight_behind_other_text() -> None:
    learner, (head, a, b, c) = Learner(lambda token: False), TEXTS
    assert learner.see(whole((*head, *a, *b)), 0) == []
    assert learner.see(whole((*head, *a, *c)), 0) == []  # the same beginning is the prefix cache's
    assert learner.see(whole((*head, *OTHERS[1], *a, *c)), 0) == [a, (*a, *c)]
    assert learner.see(whole((*head, *b, *OTHERS[1])), 0) == [b]


def test_what_is_stored_what_the_cache_has_and_what_no_client_wrote_is_left_out() -> None:
    (a, b, c, d), lead = TEXTS, OTHERS[1]
    ids = (*lead, *a, *b, *c, *d)
    starts = [len(lead), len(lead) + len(a), len(lead) + len(a) + len(b)]
    learner = Learner(lambda token: False)
    for part in TEXTS:
        learner.see(whole(part), 0)
    stored = Run(Span(starts[1], starts[2]), b"b", 0, 0)
    texts = (Span(0, starts[2] + len(c)),)  # not d: that is the assistant's
    assert learner.see(Prompt.plain(ids, (stored,), texts), starts[1]) == [c]


def test_a_long_run_is_cut_at_the_end_of_a_line() -> None:
    ids, line = tuple(range(3, 3 + 2 * MOST)), 3 + MOST - 100
    learner = Learner(lambda token: token == line)
    learner.see(whole(ids), 0)
    found = learner.see(whole((*OTHERS[1], *ids)), 0)
    cuts = [0, MOST - 99, MOST - 99 + MOST, 2 * MOST]
    assert sorted(found) == [ids[a:b] for a, b in pairwise(cuts)]


def test_only_recent_prompts_are_remembered() -> None:
    a, b, *_ = TEXTS
    learner = Learner(lambda token: False, recent_tokens=len(a) + len(b))
    for ids in (a, b, some_ids(64, 99)):
        learner.see(whole(ids), 0)
    assert learner.see(whole((*OTHERS[1], *a)), 0) == []
    learner.see(whole(b), 0)
    assert learner.see(whole((*OTHERS[1], *b)), 0) == [b]


def some_writer(store: MemoryStore | None = None) -> ChunkWriter:
    """Of what one scope teaches."""
    made = tiny_blender(store).for_scope("", learns=True).learnt
    assert made
    return made


def test_the_least_recently_found_chunk_makes_room() -> None:
    old, a, b, c, d = (some_ids(100, i) for i in range(5))
    store, clock = MemoryStore(ROOMY), count(0, 1000)
    writer = some_writer(store)

    def learn(ids: TokenIds) -> bool:
        is_admitted = learnt.admits(ids, writer)
        run(writer.write_back([MissingChunk(ids)] if is_admitted else []))
        return is_admitted

    run(writer.write_back([MissingChunk(old)]))  # by an earlier process
    size = writer.expected_bytes(100)
    learnt = LearntChunks(round(3.5 * size), lambda: float(next(clock)))
    assert [learn(ids) for ids in (a, a, b)] == [True, False, True]
    learnt.found([writer.key(a), b"of another"])
    assert [learn(ids) for ids in (c, d, some_ids(400))] == [True, True, False]
    assert set(store.keys()) == {writer.key(ids) for ids in (a, c, d)}
    assert abs(learnt.n_bytes - 3 * size) < size / 2
    store.delete([writer.key(a)])  # as an eviction does
    assert [learn(ids) for ids in (c, a)] == [False, True]


def test_learning_does_not_wait_for_a_store_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process writes, and was stopped. What is not stored is counted; the chunks to make room stay known."""
    monkeypatch.setattr("blendserve.store.lmdb.WRITER_WAIT_S", 1e6)
    a, b, c = (some_ids(100, i) for i in range(3))
    with LMDBStore(tmp_path, ROOMY) as store:
        blender = tiny_blender(store)
        writer = blender.for_scope("", learns=True).learnt
        assert writer
        learnt = LearntChunks(round(1.5 * writer.expected_bytes(100)))
        assert learnt.admits(a, writer)
        run(writer.write_back([MissingChunk(a)]))
        with filelock.FileLock(tmp_path / "writer.lock"):
            assert not learnt.admits(b, writer)
            assert run(writer.write_back([MissingChunk(b), MissingChunk(c)])) == 0
            assert blender.fetcher.failed_writes == 2
        assert set(store.keys()) == {writer.key(a)}
        store.pin([], pinned=True)  # waits for the lock, gets it, and says so
        assert learnt.admits(b, writer)
        assert run(writer.write_back([MissingChunk(b)])) == 1
        assert set(store.keys()) == {writer.key(b)}


def test_a_minutes_worth_of_tokens_is_learnt_at_once_and_then_as_many_as_time_allows() -> None:
    now, n, numbers = [0.0], 1000, count(3)
    learnt, writer = LearntChunks(ROOMY, lambda: now[0]), some_writer()
    admitted = sum(learnt.admits((next(numbers),) * n, writer) for _ in range(200))
    assert abs(admitted - TOKENS_PER_S * BURST_S / n) <= 1
    now[0] = 10.0
    more = sum(learnt.admits((next(numbers),) * n, writer) for _ in range(200))
    assert abs(more - 10 * TOKENS_PER_S / n) <= 1


# Through the engine


def chat(*texts: str, answer: str = "") -> Chat:
    said = [{"role": "user", "content": answer}, {"role": "assistant", "content": answer}] if answer else []
    system = {"role": "system", "content": "Read this.\n" + "\n\n".join(texts)}
    return Chat((system, *said[1:], {"role": "user", "content": "What is kept?"}))


def ask(batch: BatchEngine, plain: Chat, namespace: str = "", **fields: Any) -> Answer:
    return cached_and_answer(batch, plain, namespace, **fields)[1]


def cached_and_answer(
    batch: BatchEngine, plain: Chat, namespace: str = "", **fields: Any
) -> tuple[int, Answer]:
    """Tokens of the prompt whose KV was there, and the answer."""
    request = batch.engine.prepare(Request("", plain=plain, decode={"max_new_tokens": 4}, **fields))
    listener = Listener()
    batch.scheduler.submit(batch.sequence(request, listener, namespace=namespace))
    while batch.scheduler.has_work:
        batch.scheduler.step()
    answer = listener.answer()
    return next(event.cached for event in listener.seen if isinstance(event, PrefillDone)), answer


def batch_of(engine: Engine, **settings: Any) -> BatchEngine:
    return BatchEngine(engine, Mock(Observer), ServeConfig(slots=2, **settings))


def learnt_texts(engine: Engine) -> list[str]:
    """The texts of what is stored."""
    infos = engine.store.describe(engine.store.keys())
    return [engine.model.tokenizer.decode(info.token_ids) for info in infos.values()]


def test_passages_of_two_orders_are_stored_and_found_in_a_third() -> None:
    a, b, c, d = PARAGRAPHS
    with toy_engine() as engine:
        batch = batch_of(engine)
        first = ask(batch, chat(a, b, c))
        assert learnt_texts(engine) == []
        ask(batch, chat(b, a, d))
        assert len(texts := learnt_texts(engine)) >= 2
        assert all(text in "\n\n".join((b, a, d)) for text in map(str.strip, texts))
        third = ask(batch, chat(d, b, c, a))
        assert (len(first.report.spans), len(third.report.spans)) == (0, 2)
        assert all(span["learnt"] for span in third.report.spans)
        assert batch.learnt_bytes > 0


def test_a_learnt_record_is_the_chunk_computed_alone() -> None:
    a, b, c, _ = PARAGRAPHS
    with toy_engine() as engine:
        batch = batch_of(engine)
        for texts in ((a, b), (b, c)):
            ask(batch, chat(*texts))
        keys = list(engine.store.keys())
        assert keys
        with engine.store.snapshot() as snapshot:
            for key in keys:
                record = snapshot.get(key)
                assert record
                alone = engine.blender.writer.chunks.compute([record.token_ids])[0]
                found = decode(record)
                assert torch.equal(stacked(found.keys), stacked(alone.keys))
                assert torch.equal(stacked(found.values), stacked(alone.values))


def test_neither_answers_nor_beginnings_nor_what_was_seen_once_is_learnt() -> None:
    a, b, c, d = PARAGRAPHS
    with toy_engine() as engine:
        batch = batch_of(engine)
        for texts in ((a, b), (a, c), (a, d)):  # a: a common beginning
            ask(batch, chat(*texts))
        for text in (b, c):
            ask(batch, chat(text, answer="The answer. " + d))
        assert not any(a[20:60] in text or d[20:60] in text for text in learnt_texts(engine))


@pytest.mark.parametrize(
    ("settings", "store", "fields"),
    [
        ({"api_key": "sk-a"}, {}, {}),
        ({}, {"write_back": "missing"}, {}),
        ({}, {"write_back": "none"}, {}),
        ({}, {}, {"learns": False}),
        ({}, {}, {"blend": {"method": "full"}}),
        ({}, {}, {"blend": {"method": "prefix"}}),
    ],
)
def test_nothing_is_learnt_where_that_is_off(
    settings: dict[str, Any], store: dict[str, Any], fields: dict[str, Any]
) -> None:
    a, b, c, _ = PARAGRAPHS
    with toy_engine(store=store) as engine:
        batch = batch_of(engine, **settings)
        for texts in ((a, b), (b, c), (c, a)):
            ask(batch, chat(*texts), **fields)
        assert learnt_texts(engine) == []


@pytest.mark.parametrize("one", [("", "kim"), ("ns", "")])
def test_scopes_and_namespaces_find_nothing_of_each_other(one: tuple[str, str]) -> None:
    """Neither chunks nor prefixes; what is precomputed is for every scope of its namespace."""
    a, b, c, _ = PARAGRAPHS
    with toy_engine() as engine:
        batch = batch_of(engine)
        for texts in ((a, b), (b, c), (c, a), (b, a)):
            ask(batch, chat(*texts))
        namespace, scope = one
        n_cached, other = cached_and_answer(batch, chat(b, a), namespace, scope=scope)
        assert (other.report.spans, other.report.tokens_kept) == ([], 0)
        assert n_cached == engine.blender.prefixes.n_cached("other", engine.prompts.plain(chat(b, a)).ids)
        n_kept, own = cached_and_answer(batch, chat(b, a))
        assert n_kept > n_cached
        assert own.report.tokens_kept > 0
        engine.blender.writer.precompute([engine.prompts.text_ids(b)])
        found = ask(batch, chat(c, b), scope="lee").report.spans
        assert [span["learnt"] for span in found] == [False]


def test_a_new_scope_reads_no_tokens_of_other_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many chunks those have learnt."""
    store, asked = MemoryStore(ROOMY), list[bytes]()
    by = tiny_blender(store)
    for n in range(20):
        learnt = by.for_scope(f"user{n}", learns=True).learnt
        assert learnt
        learnt.precompute([TEXTS[n % 4]])
    describe = store.describe

    def counted(keys: Iterable[bytes]) -> Any:
        keys = list(keys)
        asked.extend(keys)
        return describe(keys)

    monkeypatch.setattr(store, "describe", counted)
    prompt = whole((*OTHERS[2], *TEXTS[3], *OTHERS[2]))
    blend = BlendConfig(method="blend")
    assert by.for_scope("new", learns=True).match(prompt, blend).runs == ()
    assert asked == []
    own = by.for_scope("user3", learns=True)
    assert [run.is_learnt for run in own.match(prompt, blend).runs] == [True]
    assert own.learnt
    assert set(asked) == {own.learnt.key(TEXTS[3])}


def test_a_user_learns_however_many_others_there_are() -> None:
    """More than 100, of the same namespace or of another one."""
    a, b, c, _ = PARAGRAPHS
    with toy_engine() as engine:
        batch = batch_of(engine)
        ask(batch, chat(a, b), scope="kim")
        request = engine.prepare(Request("", plain=chat(c)))
        for n in range(150):
            crowd = replace(request, scope=f"user{n}")
            batch.sequence(crowd, lambda event: None, namespace="other" if n % 2 else "").release()
        ask(batch, chat(b, a), scope="kim")
        assert learnt_texts(engine) != []


def test_learning_goes_on_after_a_restart() -> None:
    a, b, c, d = PARAGRAPHS
    with toy_engine() as engine:
        for texts in ((a, b), (b, c)):
            ask(first := batch_of(engine), chat(*texts))
            first.scheduler.stop()
        batch = batch_of(engine)
        for texts in ((a, b), (b, c), (d, b)):
            ask(batch, chat(*texts))
        again = batch_of(engine)
        eventually(lambda: bool(ask(again, chat(c, b)).report.spans))
