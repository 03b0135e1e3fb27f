"""Targets of quality: calibrated, served, and checked while the server is idle."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from blendserve.blend.blender import Blender
from blendserve.blend.policies import START_RATIO, make_policy
from blendserve.config import BlendConfig, ServeConfig
from blendserve.core import Passage, Prompt, run
from blendserve.engine.batch_engine import BatchEngine
from blendserve.engine.engine import Engine
from blendserve.engine.request import Completed, Observer, Request
from blendserve.errors import InputError, StoreUnavailable
from blendserve.models import forward
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import LoadedModel
from blendserve.models.reference import OwnDecoding
from blendserve.models.runner import append
from blendserve.quality.control import CHUNKS_PER_PROMPT, QualityControl
from blendserve.quality.controller import RatioController
from blendserve.quality.evidence import Evidence, MeasuredPrompt, make_questions
from blendserve.quality.fidelity import Verifier, kl
from blendserve.quality.target import NO_WORSE, RATIOS, Loss
from blendserve.store import MemoryStore
from tests.support.blending import assert_near, model_kv, model_says, some_ids
from tests.support.engines import CONFIG, PASSAGES, QUESTIONS, toy_engine, toy_model
from tests.support.http import DOCUMENTS, index
from tests.support.models import BLEND_KINDS, HYBRIDS, tiny_decoder

TARGET = {"min_agreement": 0.6, "check_share": 1.0}
GOOD, BAD, WORSE = Loss(0.99, 0.01), Loss(0.2, 1.0), Loss(0.99, 0.2, is_worse=True)
MEASURED = 140


def engine(folder: Path, **sections: Any) -> Engine:
    """Over an index of DOCUMENTS, with a target."""
    made = toy_engine(**{"quality": TARGET, "retrieve": {"top_k": 3}, **sections})
    made.index = index(folder / "docs", made.prompts, DOCUMENTS)
    return made


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[float, Loss]], Engine]:
    """An engine whose calibration measured these losses on every prompt."""

    def make(found: dict[float, Loss], **sections: Any) -> Engine:
        made = engine(tmp_path, **sections)
        with monkeypatch.context() as measuring:
            measuring.setattr(QualityControl, "losses", lambda *_: [found[ratio] for ratio in RATIOS])
            made.calibrate(MEASURED, [f"Question {n}?" for n in range(MEASURED)])
        return made

    return make


def test_losses_are_those_along_the_answer_of_full_prefill(tmp_path: Path) -> None:
    for refined in (0.0, 0.5):
        made = engine(tmp_path, blend={"refine": refined, "method": "blend"})
        blends = {r: {"method": "blend", "ratio": r} for r in RATIOS} | {"reuse": {"method": "reuse"}}
        for question in QUESTIONS[:2]:
            prompt = made.prepare(Request(question)).prompt
            found = dict(zip(RATIOS, made.quality.losses(prompt), strict=True))
            answer = made.answer(question, method="full")
            end = min(made.model.end_tokens)
            tokens = [*answer.token_ids, *([end] if answer.finish_reason == "stop" else [])]
            own = OwnDecoding(made.model.decoder)
            full = torch.stack([own.feed(prompt.ids), *(own.feed((token,)) for token in tokens[:-1])])
            kls = dict[Any, float]()
            for name, changes in blends.items():
                given = given_logits(made, prompt, made.config.blend.with_values(**changes), tokens)
                kls[name] = sum(kl(full, given)) / len(tokens)
                if isinstance(name, float):
                    assert found[name].agreement == pytest.approx(
                        float((full.argmax(-1) == given.argmax(-1)).double().mean())
                    )
                    assert found[name].kl == pytest.approx(kls[name], abs=1e-4)
            assert all(found[r].is_worse == (kls[r] > kls["reuse"] + NO_WORSE) for r in RATIOS)


def given_logits(made: Engine, prompt: Prompt, blend: BlendConfig, tokens: list[int]) -> torch.Tensor:
    """Decode these tokens, one by one, over the cache of a method -> logits [n, V]."""
    cache, decoder = KVCache(made.model.decoder, len(prompt) + len(tokens)), made.model.decoder
    done = made.blender.run(prompt, blend, cache)
    rows = [done.result.logits]
    if len(done.to_refine):
        run(done.refine(decoder, prompt.ids))
    rows += [append(decoder, cache, len(prompt) + i, [token])[0] for i, token in enumerate(tokens[:-1])]
    return torch.stack(rows)


@pytest.mark.parametrize("name", BLEND_KINDS)
def test_full_prefill_in_short_steps_is_full_prefill(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "ROWS_PER_STEP", 32)
    decoder, ids = tiny_decoder(name), some_ids(100)
    cache = KVCache(decoder, 120)
    cache.fill(float("nan"))
    assert_near(run(forward.feed(decoder, cache, ids)), model_says(decoder, ids).logits[0, -1])
    kept = cache.beginning(decoder, len(ids))
    for ours, own in zip((kept.keys, kept.values), model_kv(decoder, ids), strict=True):
        assert_near(ours, own)


@pytest.mark.parametrize("in_short_steps", [False, True])
@pytest.mark.parametrize("method", ["full", "prefix"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_exact_methods_verify_clean(
    tmp_path: Path, method: Any, temperature: float, in_short_steps: bool
) -> None:
    made = engine(tmp_path)
    request = made.prepare(
        Request(QUESTIONS[1], blend={"method": method}, decode={"temperature": temperature})
    )
    verifier = Verifier(made.model, made.blender, request.prompt, request.decode, in_short_steps)
    done = run(verifier.prefill(request.blend))
    found = run(verifier.verify(done))
    assert found.loss.agreement == pytest.approx(1.0, abs=1e-6)
    assert found.loss.kl < 1e-9
    assert found.full == found.tokens


def test_sampled_answers_agree_by_the_probability_that_is_common(tmp_path: Path) -> None:
    made = engine(tmp_path)
    request = made.prepare(
        Request(QUESTIONS[0], blend={"method": "blend", "ratio": 0.0}, decode={"temperature": 0.7})
    )
    verifier = Verifier(made.model, made.blender, request.prompt, request.decode)
    made.blender.writer.precompute([chunk.ids for chunk in request.prompt.chunks])
    done = run(verifier.prefill(request.blend))
    token = 17
    found = run(verifier.verify(done, (token,)))
    p, q = (
        torch.softmax(logits.double() / 0.7, -1)
        for logits in (OwnDecoding(made.model.decoder).feed(request.prompt.ids), done.result.logits)
    )
    assert found.loss.agreement == pytest.approx(1 - float((p - q).abs().sum()) / 2, abs=1e-6)


def test_without_evidence_answers_start_at_the_safe_ratio_and_say_so(tmp_path: Path) -> None:
    made = engine(tmp_path)
    made.precompute()
    for passages in (None, PASSAGES):
        report = made.answer(QUESTIONS[0], passages).report
        assert (report.method, report.ratio) == ("blend", START_RATIO)
        assert report.quality
        assert (report.quality.ratio, report.quality.prompts, report.quality.agreement) == (
            START_RATIO,
            0,
            None,
        )
        assert report.to_dict()["quality"]["summary"] == report.quality.summary


@pytest.mark.parametrize(
    "sections",
    [
        {"quality": {"min_agreement": None}},
        {"blend": {"ratio": 0.05}},
        {"blend": {"ratio": START_RATIO}},
        {"blend": {"method": "reuse"}},
        {"blend": {"method": "prefix"}},
        {"blend": {"policy": "all"}},
    ],
)
def test_settings_that_say_what_is_recomputed_leave_no_target(tmp_path: Path, sections: Any) -> None:
    made = engine(tmp_path, **{"quality": {"min_agreement": 0.6}, **sections})
    assert made.answer(QUESTIONS[0]).report.quality is None
    assert made.answer(QUESTIONS[0], method="auto").report.quality is None


@pytest.mark.parametrize(
    "options",
    [{"ratio": 0.3}, {"method": "full"}, {"correction": "none"}, {"policy": "random"}, {"refine": 0.2}],
)
def test_requests_that_say_what_is_recomputed_have_no_promise(calibrated: Any, options: Any) -> None:
    made = calibrated(dict.fromkeys(RATIOS, GOOD))
    asked = made.answer(QUESTIONS[0], **options).report
    assert asked.quality is None
    assert asked.ratio == options.get("ratio", asked.ratio)
    for method in ("auto", "blend"):
        assert made.answer(QUESTIONS[0], method=method).report.quality.ratio == 0.0


def test_evidence_of_an_index_serves_questions_over_it_alone(calibrated: Any) -> None:
    made = calibrated({r: GOOD if r >= 0.05 else BAD for r in RATIOS})
    made.precompute()
    report = made.answer(QUESTIONS[0]).report
    assert (report.method, report.ratio, report.quality.ratio) == ("blend", 0.05, 0.05)
    assert made.answer(QUESTIONS[0], PASSAGES).report.quality.ratio == START_RATIO  # not measured
    config = made.config.replace("quality.min_agreement", 0.95)
    stricter = Engine(config, made.model, made.store, made.index).answer(QUESTIONS[0]).report
    assert (stricter.method, stricter.ratio) == ("blend", 0.05)  # the same evidence serves every target
    assert stricter.quality
    assert stricter.quality.min_agreement == pytest.approx(0.95)


def test_where_no_ratio_is_kept_answers_are_exact(calibrated: Any) -> None:
    for bad in (BAD, WORSE):
        made = calibrated(dict.fromkeys(RATIOS, bad))
        made.precompute()
        report = made.answer(QUESTIONS[0]).report
        assert (report.method, report.exact, report.quality.ratio) == ("prefix", True, None)


def test_evidence_of_other_answers_is_not_used(calibrated: Any) -> None:
    made = calibrated(dict.fromkeys(RATIOS, GOOD))
    for changes in ({"correction": "none"}, {"policy": "random"}, {"near": True}, {"refine": 0.2}):
        config = made.config.model_copy(update={"blend": made.config.blend.with_values(**changes)})
        other = Engine(config, made.model, made.store, made.index)
        quality = other.answer(QUESTIONS[0]).report.quality
        assert quality
        assert quality.prompts == 0
    again = Engine(made.config, made.model, made.store, made.index)
    assert again.answer(QUESTIONS[0]).report.ratio == 0.0


def test_an_index_begins_with_the_evidence_that_ships_for_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(tmp_path)
    made.precompute()
    n = len(made.index or ())
    shipped = Evidence(tuple(MeasuredPrompt((GOOD,) * len(RATIOS), n // 2) for _ in range(100)))
    name = made.quality.shipped_owner
    monkeypatch.setattr("blendserve.quality.control.read_shipped", lambda file: {name: shipped})
    report = made.answer(QUESTIONS[0]).report.quality
    assert report
    assert report.prompts == round(100 * (n // 2) / n)
    own = made.answer(QUESTIONS[0], PASSAGES).report.quality
    assert own
    assert own.prompts == 0
    other = Engine(made.config.replace("retrieve.top_k", 2), made.model, made.store, made.index)
    assert not other.quality.evidence(made.index).samples


def test_evidence_fades_as_the_index_grows(calibrated: Any) -> None:
    made = calibrated(dict.fromkeys(RATIOS, GOOD))
    n = len(made.index)
    made.add([{"text": f"More text about number {i}.", "title": f"T{i}"} for i in range(n)])
    grown = Engine(made.config, made.model, made.store, made.index)
    report = grown.answer(QUESTIONS[0]).report
    assert report.quality
    assert report.quality.prompts == pytest.approx(MEASURED * n / len(made.index), abs=1)
    assert report.ratio == START_RATIO


def test_evidence_is_read_once_the_store_can_be_reached(
    calibrated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = calibrated(dict.fromkeys(RATIOS, GOOD))
    again = Engine(made.config, made.model, made.store, made.index)
    with monkeypatch.context() as broken:
        broken.setattr(again.store.blobs, "current", Mock(side_effect=StoreUnavailable("gone")))
        assert again.answer(QUESTIONS[0]).report.ratio == START_RATIO
    assert again.answer(QUESTIONS[0]).report.ratio == 0.0


def test_precompute_gathers_evidence_by_what_it_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QualityControl, "losses", lambda *_: [GOOD] * len(RATIOS))
    made = engine(tmp_path, retrieve={"top_k": 1})
    made.precompute()
    assert not made.quality.evidence(made.index).samples  # too few chunks
    text = "Words about number {0}, which is {0}. " * 9
    made.add([{"text": text.format(n), "title": f"T{n}"} for n in range(150)])
    n_computed = made.precompute().computed
    n_measured = len(made.quality.evidence(made.index).samples)
    assert 0 < n_measured == n_computed // CHUNKS_PER_PROMPT
    made.precompute()
    assert len(made.quality.evidence(made.index).samples) == n_measured


def test_a_stopped_calibration_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = engine(tmp_path), list[str]()
    monkeypatch.setattr(QualityControl, "losses", lambda *_: [GOOD] * len(RATIOS))

    def lay_out(question: str) -> Prompt:
        if len(asked) == 11:
            raise KeyboardInterrupt
        asked.append(question)
        return Prompt((), (), ())

    assert made.index
    calibrate = partial(made.quality.calibrate, made.index, lay_out)
    questions = [f"Question {n}?" for n in range(16)]
    with pytest.raises(KeyboardInterrupt):
        calibrate(16, questions)
    done = list(asked)
    asked.clear()
    assert len(calibrate(16, questions).samples) == 16
    assert asked == questions[8:]  # every eighth prompt is a save
    assert done[:8] == questions[:8]
    assert len(calibrate(16, questions).samples) == 16
    assert asked == questions[8:]
    assert len(calibrate(5, questions).samples) == 16  # nothing is lost
    asked.clear()
    assert len(calibrate(4, [*questions[:3], "Another question?"]).samples) == 17
    assert asked == ["Another question?"]
    asked.clear()
    assert len(calibrate(16, [f"New {n}?" for n in range(16)], limit=2).samples) == 19
    assert asked == ["New 0?", "New 1?"]


def test_questions_are_made_of_titles_or_of_words_in_rounds_over_all_passages() -> None:
    numbers = list(map(str, range(40)))
    passages = [*PASSAGES, Passage("one two three"), Passage(" ".join(numbers))]
    made = list(make_questions(passages))
    n = len(passages)
    for start in range(0, len(made), n):
        assert len(set(made[start : start + n])) == n
        assert any("one two three" in question for question in made[start : start + n])
    assert sum("Cats" in question for question in made[:n]) == 1
    assert any("14 15 16 17 18 19 20 21 22 23 24 25" in question for question in made[:n])
    quotes = {
        question for question in made if f" {numbers[30]} " in question or f" {numbers[10]} " in question
    }
    assert len(quotes) > 1  # of the same passage


def test_there_is_nothing_to_calibrate_without_an_index() -> None:
    with pytest.raises(InputError):
        toy_engine().calibrate()


def served(made: Engine) -> BatchEngine:
    return BatchEngine(made, Mock(Observer), ServeConfig(slots=2))


def listener(made: Engine) -> Mock:
    """What is told of checks."""
    made.quality.on_check.append(told := Mock())
    return told


def ask(batch: BatchEngine, question: str, **decode: Any) -> Any:
    """Run a request to its end -> its answer. Idle tasks stay."""
    events = list[Any]()
    request = batch.engine.prepare(Request(question, decode=decode))
    batch.scheduler.submit(batch.sequence(request, events.append))
    while batch.scheduler.in_flight:
        batch.scheduler.step()
    (*_, last) = events
    assert isinstance(last, Completed)
    return last.answer


def idle(batch: BatchEngine) -> int:
    """Run what is left -> number of steps."""
    n = 0
    while batch.scheduler.has_work:
        batch.scheduler.step()
        n += 1
    return n


def controller(made: Engine) -> RatioController:
    ((_, found),) = made.quality.controllers()
    return found


def test_a_served_answer_is_checked_while_nothing_else_runs(calibrated: Any) -> None:
    made = calibrated({r: GOOD if r >= 0.05 else BAD for r in RATIOS})
    made.precompute()
    told, batch = listener(made), served(made)
    answer = ask(batch, QUESTIONS[0])
    assert controller(made).checks == 0
    assert idle(batch) > len(RATIOS) * made.model.decoder.n_layers  # passes at all ratios, by layers
    assert controller(made).checks == 1
    ((result, loss, seconds),) = [call.args for call in told.call_args_list]
    assert (result, seconds > 0) == ("done", True)
    expected = made.quality.losses(made.prepare(Request(QUESTIONS[0])).prompt)
    assert loss == expected[RATIOS.index(0.05)]
    assert answer.report.quality.ratio == 0.05
    again = Engine(made.config, made.model, made.store, made.index)
    assert again.quality.evidence(made.index).samples[-1].losses == tuple(expected)


def test_checks_of_requests_with_passages_of_their_own_are_evidence_for_them(tmp_path: Path) -> None:
    made = engine(tmp_path)
    batch = served(made)
    request = made.prepare(Request(QUESTIONS[0], PASSAGES))
    made.answer(QUESTIONS[0], PASSAGES)
    check = made.quality.answered(request.quality, made.blender, request.prompt) if request.quality else None
    assert check
    batch.scheduler.submit_idle(check)
    idle(batch)
    assert len(made.quality.evidence(None).samples) == 1
    assert not made.quality.evidence(made.index).samples
    plain = made.prepare(Request("", plain="A plain prompt, which is not short."))
    assert plain.quality
    assert made.quality.answered(plain.quality, made.blender, plain.prompt) is None


def test_evidence_that_another_process_gathered_meanwhile_is_kept(
    calibrated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = calibrated(dict.fromkeys(RATIOS, BAD))
    made.precompute()
    batch = served(made)
    ask(batch, QUESTIONS[0])
    monkeypatch.setattr(QualityControl, "losses", lambda *_: [GOOD] * len(RATIOS))
    other = Engine(made.config, made.model, made.store, made.index)
    other.calibrate(9, [f"Another question {n}?" for n in range(9)])
    idle(batch)
    stored = made.quality.evidence(made.index)
    assert len(stored.samples) == MEASURED + 9 + 1
    assert controller(made).evidence == stored


def test_a_check_without_memory_is_lost(calibrated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = calibrated(dict.fromkeys(RATIOS, GOOD))
    made.precompute()
    told, batch = listener(made), served(made)
    ask(batch, QUESTIONS[0])
    monkeypatch.setattr(Verifier, "full", Mock(side_effect=RuntimeError("not enough memory")))
    idle(batch)
    assert [call.args[0] for call in told.call_args_list] == ["lost"]
    assert controller(made).checks == 0


def test_a_request_interrupts_a_check(calibrated: Any) -> None:
    made = calibrated(dict.fromkeys(RATIOS, GOOD))
    made.precompute()
    batch = served(made)
    ask(batch, QUESTIONS[0])
    for _ in range(5):
        batch.scheduler.step()
    expected = made.answer(QUESTIONS[1]).token_ids
    assert ask(batch, QUESTIONS[1]).token_ids == expected
    assert controller(made).checks == 0
    idle(batch)
    assert controller(made).checks == 1


def test_losses_above_the_limit_raise_the_ratio_of_later_requests(
    calibrated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = calibrated(dict.fromkeys(RATIOS, GOOD))
    made.precompute()
    request = made.prepare(Request(QUESTIONS[0]))

    def measure(self: Verifier, blends: Sequence[BlendConfig]) -> Any:
        yield
        return [BAD if make_policy(blend).ratio < 0.15 else GOOD for blend in blends]

    monkeypatch.setattr(Verifier, "measure", measure)
    for _ in range(100):
        assert request.quality
        check = made.quality.answered(request.quality, made.blender, request.prompt)
        assert check
        run(check)
        request = made.prepare(Request(QUESTIONS[0]))
    assert controller(made).alarms == 1
    assert (controller(made).ratio, request.blend.ratio) == (0.15, 0.15)


def test_a_deleted_document_takes_the_check_that_quotes_it_along(calibrated: Any) -> None:
    made = calibrated(dict.fromkeys(RATIOS, GOOD))
    made.precompute()
    told, batch = listener(made), served(made)
    made.delete(ask(batch, QUESTIONS[0]).passages[0].doc_id)
    idle(batch)
    assert controller(made).checks == 0
    assert not told.called
    ask(batch, QUESTIONS[1])
    idle(batch)
    assert controller(made).checks == 1


def test_a_chunk_that_was_evicted_makes_a_check_lost(calibrated: Any) -> None:
    made = calibrated(dict.fromkeys(RATIOS, GOOD))
    made.precompute()
    told, batch = listener(made), served(made)
    ask(batch, QUESTIONS[0])
    made.store.delete(made.store.keys())
    made.fetcher.forget(made.store.keys())
    idle(batch)
    assert [call.args[0] for call in told.call_args_list] == ["lost"]
    assert controller(made).checks == 0


def reachable(*roots: Any) -> list[Any]:
    """What these objects refer to, apart from the model, the blender and code."""
    seen, frontier = dict[int, Any](), list(roots)
    while frontier:
        frontier = [x for x in gc.get_referents(*frontier) if id(x) not in seen]
        frontier = [
            x
            for x in frontier
            if not isinstance(x, (type, ModuleType, FunctionType, LoadedModel, Blender, Mock))
        ]
        seen |= {id(x): x for x in frontier}
    return [*seen.values()]


def test_no_token_of_a_checked_request_is_kept(calibrated: Any) -> None:
    made = calibrated(dict.fromkeys(RATIOS, GOOD))
    made.precompute()
    batch = served(made)
    ask(batch, QUESTIONS[2])
    suffix = made.prepare(Request(QUESTIONS[2])).prompt.suffix

    def has_prompt() -> bool:
        return any(
            isinstance(x, tuple) and x[-len(suffix) :] == suffix
            for x in reachable(controller(made), made.quality)
        )

    assert has_prompt()
    idle(batch)
    assert controller(made).checks == 1
    assert not has_prompt()


@pytest.mark.parametrize(("share", "rest"), [(0.0, None), (0.05, 19.0), (1.0, 0.0)])
def test_checks_take_a_share_of_the_time(tmp_path: Path, share: float, rest: float | None) -> None:
    now = [0.0]
    made = engine(tmp_path, quality={**TARGET, "check_share": share})
    made.precompute()
    made.quality = QualityControl(made.config, made.model, made.blender, clock=lambda: now[0])
    request = made.prepare(Request(QUESTIONS[0]))
    assert request.quality
    answered = partial(made.quality.answered, request.quality, made.blender, request.prompt)
    first = answered()
    if rest is None or first is None:
        assert (rest, first) == (None, None)
        return
    assert answered() is None  # one at a time
    next(first)
    now[0] += 2.0
    run(first)
    if rest:
        now[0] += 2.0 * rest - 0.1
        assert answered() is None
        now[0] += 0.2
    assert answered()


def test_passages_of_a_separator_are_the_requests_own(calibrated: Any) -> None:
    made = calibrated(dict.fromkeys(RATIOS, GOOD), prompt={"separator": " # # "})
    made.precompute()
    assert made.answer(QUESTIONS[0]).report.quality.ratio == 0.0
    report = made.answer(f"{PASSAGES[0].text} # # {QUESTIONS[0]}").report
    assert report.quality.ratio == START_RATIO


def test_a_model_whose_chunks_are_reused_whole_has_no_target() -> None:
    model = replace(toy_model(), decoder=tiny_decoder(HYBRIDS[0]))
    with Engine(CONFIG, model, MemoryStore(2**20)) as made:
        assert made.quality.target is None
        assert made.config.blend.ratio == 0.0
