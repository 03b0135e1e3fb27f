"""Questions through the whole engine: an answer does not depend on where KV lies or on what else is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from blendserve.blend import precompute, priors
from blendserve.core import Passage, PassageFilter
from blendserve.engine.engine import Engine
from blendserve.engine.request import Request
from blendserve.errors import ConfigError, InputError, PromptTooLong
from blendserve.fetch import TieredStore
from blendserve.store import KVStore, LMDBStore, MemoryStore, share_of
from tests.support.engines import (
    CONFIG,
    EMPTY_PASSAGES,
    PASSAGES,
    QUESTIONS,
    generated,
    submit,
    toy_batch,
    toy_engine,
    toy_model,
)
from tests.support.stores import ROOMY
from tests.support.valkey import needs_server, store_at

QUESTION = QUESTIONS[0]
CORPUS = [Passage(f"Passage {n} says {n * n}, and nothing else.") for n in range(12)]
SOME = [*PASSAGES[:3], *EMPTY_PASSAGES]  # the last one has no tokens


@pytest.fixture
def warm() -> Iterator[Engine]:
    with toy_engine() as made:
        made.precompute(SOME)
        yield made


@pytest.mark.parametrize("order", [(), (4,), (0, 4, 3, 0, 2, 1)])
@pytest.mark.parametrize(
    ("method", "ratio"), [("full", 0.15), ("prefix", 0.15), ("blend", 0.15), ("blend", 1.0), ("reuse", 0.15)]
)
def test_any_passages_in_any_order_get_an_answer(order: tuple[int, ...], method: str, ratio: float) -> None:
    """With the first two stored. Exact methods give what the model itself generates."""
    passages, n_filled = tuple(SOME[i] for i in order), sum(i < 4 for i in order)
    with toy_engine() as made:
        made.precompute(SOME[:2])
        answer = made.answer(QUESTION, passages, method=method, ratio=ratio, max_new_tokens=3)
        assert answer.report.tokens_prompt == len(made.prompts.build(QUESTION, passages))
    assert answer.passages == passages
    n_looked_up = {"full": 0, "prefix": min(1, n_filled)}.get(method, n_filled)
    assert answer.report.chunks_hit + answer.report.chunks_missing == n_looked_up
    if method in ("full", "prefix") or ratio == 1.0:
        assert answer.token_ids == generated(passages, 3)


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


@pytest.mark.parametrize("write_back", ["auto", "none"])
def test_what_a_request_misses_is_stored_after_its_answer(write_back: str) -> None:
    """At the latest before the scheduler stops."""
    n, store = len(PASSAGES), {"write_back": write_back}
    with toy_engine(store=store) as alone, toy_engine(store=store) as together:
        stream = alone.stream(QUESTION, PASSAGES)
        assert stream.report.chunks_missing == alone.missing(PASSAGES) == n
        stream.answer()
        batch = toy_batch(together)
        batch.scheduler.start()
        answers = [submit(batch, question, PASSAGES, max_new_tokens=1) for question in QUESTIONS[:2]]
        assert [answer.answer().report.chunks_missing for answer in answers] == [n] * 2
        batch.scheduler.stop(finish_s=60)
        for engine in (alone, together):
            assert engine.store.stats().chunks == (0 if write_back == "none" else n)


def test_a_prompt_that_fits_to_the_token_and_one_that_does_not(
    warm: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = len(warm.prompts.build(QUESTION, SOME))
    monkeypatch.setattr(warm.model.decoder, "context_limit", n + 20)
    answer = warm.answer(QUESTION, SOME, max_new_tokens=20, temperature=1.0)
    assert answer.report.tokens_prompt == n
    assert warm.answer(QUESTION, SOME, max_new_tokens=21, temperature=1.0).token_ids == answer.token_ids
    monkeypatch.setattr(warm.model.decoder, "context_limit", n)
    with pytest.raises(PromptTooLong) as error:
        warm.answer(QUESTION, SOME, max_new_tokens=20)
    assert error.value.over == 1


@pytest.mark.parametrize("n_fit", [3, 2, 1, 0])
def test_of_retrieved_passages_the_nearest_that_fit_are_used(n_fit: int, warm: Engine) -> None:
    """Unless a client asks for their number. At least one is needed."""

    def search(question: str, top_k: int, selection: PassageFilter) -> list[Passage]:
        return list(PASSAGES[:top_k])

    n = len(warm.prompts.build(QUESTION, PASSAGES[:n_fit])) + 12
    by_default, asked = Request(QUESTION), Request(QUESTION, top_k=n_fit + 1)
    if n_fit:
        assert set(warm.prepare(by_default, search, room=n).passages) == set(PASSAGES[:n_fit])
    for request in (asked, *(() if n_fit else (by_default,))):
        with pytest.raises(PromptTooLong):
            warm.prepare(request, search, room=n)


@pytest.mark.parametrize(("order", "step"), [("best_first", 1), ("best_last", -1)])
def test_retrieved_passages_alone_are_ordered(order: str, step: int) -> None:
    """The nearest that fit are used in either order, and a request's own passages stay as they are."""

    def search(question: str, top_k: int, selection: PassageFilter) -> list[Passage]:
        return list(PASSAGES[:top_k])

    with toy_engine(prompt={"order": order}) as engine:
        n = len(engine.prompts.build(QUESTION, PASSAGES[:2])) + 12
        prepared = engine.prepare(Request(QUESTION), search, room=n)
        expected = engine.prompts.build(QUESTION, PASSAGES[:2][::step])
        own = engine.prepare(Request(QUESTION, passages=PASSAGES[:2]), search, room=n)
    assert prepared.passages == PASSAGES[:2][::step]
    assert prepared.prompt == expected
    assert own.passages == PASSAGES[:2]


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


@pytest.mark.parametrize("correction", ["prior", "ridge"])
def test_precompute_fits_a_prior_for_the_correction_that_uses_one(
    correction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(priors, "MIN_TOKENS", 1)
    steps = list[tuple[int, int]]()
    with toy_engine(blend={"correction": correction}) as made:
        made.precompute(SOME, learning=lambda done, total: steps.append((done, total)))
        assert bool(made.answer(QUESTION, SOME).report.prior) == bool(steps) == (correction == "prior")


def test_shares_are_about_equal_never_move_and_cover_everything() -> None:
    shares = [share_of((n, n + 1, 7), 4) for n in range(4000)]
    assert all(900 < shares.count(i) < 1100 for i in range(4))
    assert "".join(map(str, shares[:8])) == "02212122"  # a later version goes on with the same shares
    with toy_engine() as made:
        mine = [p for p in CORPUS if share_of(made.prompts.chunk(p).ids, 3) == 1]
        made.precompute(mine[:1])
        assert made.missing(CORPUS[::-1], (1, 3)) == len(mine) - 1
        assert made.precompute([*CORPUS[::-1], *CORPUS], (1, 3)).computed == len(mine) - 1
        others = [made.precompute(CORPUS, (i, 3)).computed for i in (0, 2)]
        assert sum(others) + len(mine) == len(CORPUS)


def test_a_store_that_refuses_writes_serves_requests(tmp_path: Path) -> None:
    with toy_engine(LMDBStore(tmp_path, ROOMY)) as writer:
        writer.precompute(SOME)
    with toy_engine(LMDBStore(tmp_path, ROOMY, read_only=True)) as reading:
        for _ in range(2):
            report = reading.answer(QUESTION, [*SOME, Passage("Item 99 lies under the stairs.")]).report
            assert (report.blended, report.chunks_hit, report.chunks_missing) == (True, 4, 1)


@pytest.mark.parametrize(("location", "pins"), [("", 1), ("shared", 4)])
def test_an_index_that_is_built_anew_unpins_what_the_old_one_had_in_a_store_of_its_own(
    location: str, pins: int, tmp_path: Path
) -> None:
    documents = [{"id": f"d{n}", "text": p.text} for n, p in enumerate(PASSAGES[:4])]
    location = location and str(tmp_path / location)  # other engines may have pinned chunks there
    config = CONFIG.model_copy(update={"store": CONFIG.store.model_copy(update={"location": location})})
    with Engine.build(tmp_path / "index", documents, config, model=toy_model()) as made:
        made.precompute()
        assert (made.store.stats().chunks, made.store.stats().pins) == (4, 4)
    with Engine.build(tmp_path / "index", documents[1:2], config, model=toy_model()) as made:
        assert made.missing() == 0
        assert (made.store.stats().chunks, made.store.stats().pins) == (4, pins)


STEPS = [
    "KVFetcher",
    "Blender",
    "QualityControl",
    "check_model",
    "writing_codec",
    "warm_up",
]


@pytest.mark.parametrize("step", STEPS)
def test_an_engine_that_cannot_be_opened_leaves_nothing_open(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever step fails: each is made to fail in turn."""

    def open_files() -> list[str]:
        return [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]

    if not Path("/proc/self/fd").exists():
        pytest.skip("the open files of a process are listed under /proc")
    store = CONFIG.store.model_copy(update={"location": str(tmp_path / "kv")})
    config = CONFIG.model_copy(update={"store": store})
    module = "blendserve.fetch" if step == "KVFetcher" else "blendserve.engine.engine"
    with monkeypatch.context() as broken:
        broken.setattr(f"{module}.{step}", Mock(side_effect=ConfigError("it is broken on purpose")))
        with pytest.raises(ConfigError):
            Engine.open(config, model=toy_model())
    assert not [name for name in open_files() if name.startswith(str(tmp_path))]
    with Engine.open(config, model=toy_model()):
        assert [name for name in open_files() if name.startswith(str(tmp_path))]


# Chunks that several engines on one store miss


@pytest.mark.parametrize(
    "open_store", [LMDBStore, pytest.param(store_at, marks=needs_server)], ids=["lmdb", "valkey"]
)
def test_workers_on_one_store_compute_each_chunk_once(
    open_store: Callable[[Path, int], KVStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some use it directly, some with an own store in front, whose writes come in the background."""
    monkeypatch.setattr(precompute, "MIN_WAIT_S", 100.0)  # however slow a worker is
    with ExitStack() as stack:
        stores = [open_store(tmp_path, ROOMY) for _ in range(4)]
        stores[2:] = [TieredStore(MemoryStore(ROOMY), far) for far in stores[2:]]
        made = [stack.enter_context(toy_engine(store)) for store in stores]
        with ThreadPoolExecutor(4) as pool:
            reports = list(pool.map(lambda one: one.precompute(CORPUS), made))
        assert sum(report.computed for report in reports) == len(CORPUS)
        assert {(report.left, report.computed + report.skipped) for report in reports} == {(0, 12)}
        assert (made[0].missing(CORPUS), made[0].store.stats().pins) == (0, len(CORPUS))
        answers = [one.answer(QUESTION, CORPUS[:6]) for one in made]
        alone = stack.enter_context(toy_engine())
        alone.precompute(CORPUS)
        assert {answer.token_ids for answer in answers} == {alone.answer(QUESTION, CORPUS[:6]).token_ids}
        assert [sum(answer.report.tiers.values()) for answer in answers] == [6] * 4


def test_no_request_and_no_job_waits_for_what_another_machine_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a while `precompute` computes what a machine that has died holds leases of."""
    far = MemoryStore(ROOMY)
    dead, made = (toy_engine(TieredStore(MemoryStore(ROOMY), far)) for _ in range(2))
    with dead, made:
        chunks, n = made.prompts.chunk_ids(PASSAGES), len(PASSAGES)
        keys = [dead.blender.key(ids) for ids in chunks]
        assert dead.store.lease(keys[1:], 3600.0) == set(keys[1:])
        assert made.answer(QUESTION, PASSAGES).report.chunks_missing == n
        assert made.missing(PASSAGES) == n - 1
        assert made.blender.writer.precompute(chunks[:3], on_leased="skip").left == 2
        assert made.blender.writer.precompute(chunks[:3], on_leased="compute").left == 0
        monkeypatch.setattr(precompute, "MIN_WAIT_S", 0.0)
        report = made.precompute(PASSAGES)
        assert (report.computed, report.left, made.missing(PASSAGES)) == (n - 3, 0, 0)
