"""Targets of quality: calibrated, served, checked while the server is idle, and exact where nothing is known."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from blendserve.blend.blender import Blender
from blendserve.blend.policies import make_policy
from blendserve.config import BlendConfig, ServeConfig
from blendserve.core import Passage, Prompt, run
from blendserve.engine.batch_engine import BatchEngine
from blendserve.engine.engine import Engine
from blendserve.engine.request import Completed, Observer, Request
from blendserve.errors import ConfigError, InputError, StoreUnavailable
from blendserve.kv import stacked
from blendserve.models import forward
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import LoadedModel
from blendserve.models.reference import OwnDecoding
from blendserve.quality.calibration import make_questions
from blendserve.quality.control import QualityControl
from blendserve.quality.controller import RatioController
from blendserve.quality.fidelity import Verifier
from blendserve.quality.target import RATIOS, Loss
from blendserve.store import MemoryStore
from tests.support.blending import assert_near, model_kv, model_says, some_ids
from tests.support.engines import CONFIG, PASSAGES, QUESTIONS, toy_engine, toy_model
from tests.support.http import DOCUMENTS, index
from tests.support.models import BLEND_KINDS, HYBRIDS, tiny_decoder

TARGET = {"min_agreement": 0.6, "check_rate": 1.0}
GOOD, BAD = Loss(0.99, 0.01), Loss(0.2, 1.0)


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
        times = dict.fromkeys(["full", *(f"{ratio:g}" for ratio in RATIOS)], 1.0)
        with monkeypatch.context() as measuring:
            measuring.setattr(QualityControl, "losses", lambda *_: (found, times))
            made.calibrate(100, [f"Question {n}?" for n in range(100)])
        return made

    return make


def test_losses_are_those_of_asking_full_prefill_token_by_token(tmp_path: Path) -> None:
    made = engine(tmp_path)
    for question, refined in zip(QUESTIONS, (0.0, 0.0, 0.5, 0.5), strict=True):
        made = engine(tmp_path, blend={"refine": refined})
        prompt = made.prepare(Request(question, blend={"method": "blend"})).prompt
        found, seconds = made.quality.losses(prompt)
        assert set(found) == set(RATIOS)
        assert min(seconds.values()) > 0
        for ratio in (0.0, 0.3):
            answer = made.answer(question, method="blend", ratio=ratio)
            end = min(made.model.end_tokens)
            tokens = [*answer.token_ids, *([end] if answer.finish_reason == "stop" else [])]
            own = OwnDecoding(made.model.decoder)
            logits = [own.feed(prompt.ids), *(own.feed((token,)) for token in tokens[:-1])]
            chosen = [int(row.argmax()) for row in logits]
            agreed = [
                a == b or {a, b} <= set(made.model.end_tokens) for a, b in zip(chosen, tokens, strict=True)
            ]
            assert found[ratio].agreement == pytest.approx(sum(agreed) / len(agreed))
            if all(agreed):
                assert answer.token_ids == made.answer(question, method="full").token_ids


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


def test_without_a_calibration_answers_are_exact_and_say_so(tmp_path: Path) -> None:
    made = engine(tmp_path)
    made.precompute()
    answer = made.answer(QUESTIONS[0])
    assert (answer.report.method, answer.report.blended) == ("prefix", False)
    assert answer.report.quality
    assert answer.report.quality.ratio is None
    assert answer.report.to_dict()["quality"]["target"] == answer.report.quality.target
    assert answer.token_ids == made.answer(QUESTIONS[0], method="full").token_ids
    choice = made.prepare(Request(QUESTIONS[0])).quality
    assert choice
    assert choice.controller is None  # nothing to check
    assert toy_engine().answer(QUESTIONS[0], PASSAGES).report.quality is None


def test_a_calibrated_ratio_serves_questions_over_the_index_alone(calibrated: Any) -> None:
    made = calibrated({r: GOOD if r >= 0.05 else BAD for r in RATIOS})
    made.precompute()
    report = made.answer(QUESTIONS[0]).report
    assert (report.method, report.ratio, report.quality.ratio) == ("blend", 0.05, 0.05)
    own = made.answer(QUESTIONS[0], PASSAGES).report  # not measured
    assert (own.method, own.quality.ratio) == ("prefix", None)
    asked = made.answer(QUESTIONS[0], ratio=0.3).report  # explicit options win
    assert (asked.ratio, asked.quality.ratio, asked.quality.estimate) == (0.3, None, None)
    config = made.config.replace("quality.min_agreement", 0.95)
    stricter = Engine(config, made.model, made.store, made.index).answer(QUESTIONS[0]).report
    assert (stricter.method, stricter.blended) == ("blend", True)  # one calibration serves every target
    assert stricter.quality
    assert stricter.quality.target != report.quality.target


def test_a_calibration_is_void_where_answers_are_made_otherwise(calibrated: Any) -> None:
    made = calibrated(dict.fromkeys(RATIOS, GOOD))
    for changes in ({"correction": "none"}, {"policy": "random"}, {"near": True}, {"refine": 0.2}):
        config = made.config.model_copy(update={"blend": made.config.blend.with_values(**changes)})
        other = Engine(config, made.model, made.store, made.index)
        assert other.answer(QUESTIONS[0]).report.method == "prefix"
    again = Engine(made.config, made.model, made.store, made.index)
    assert again.answer(QUESTIONS[0]).report.ratio == 0.0
    made.add([{"text": f"More text about number {n}.", "title": f"T{n}"} for n in range(8)])
    grown = Engine(made.config, made.model, made.store, made.index)
    assert grown.answer(QUESTIONS[0]).report.method == "prefix"


def test_answers_are_exact_while_the_store_of_calibrations_is_out_of_reach(
    calibrated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = calibrated(dict.fromkeys(RATIOS, GOOD))
    again = Engine(made.config, made.model, made.store, made.index)
    with monkeypatch.context() as broken:
        broken.setattr(again.store.blobs, "current", Mock(side_effect=StoreUnavailable("gone")))
        assert again.answer(QUESTIONS[0]).report.method == "prefix"
    assert again.answer(QUESTIONS[0]).report.ratio == 0.0


def test_a_stopped_calibration_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = engine(tmp_path), list[str]()
    monkeypatch.setattr(QualityControl, "losses", lambda *_: (dict.fromkeys(RATIOS, GOOD), {"full": 1.0}))

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
    assert calibrate(16, questions).prompts == 16
    assert asked == questions[8:]  # every eighth prompt is a save
    assert done[:8] == questions[:8]
    assert calibrate(16, questions).prompts == 16
    assert asked == questions[8:]
    assert calibrate(5, questions).prompts == 16  # nothing is lost
    asked.clear()
    others = [*questions[:3], "Another question?"]
    assert calibrate(4, others).prompts == 4  # losses of other questions are not mixed with these
    assert asked == others


def test_questions_are_made_of_titles_or_of_words_each_passage_once() -> None:
    passages = [*PASSAGES, Passage("one two three"), Passage(" ".join(map(str, range(40))))]
    made = list(make_questions(passages))
    assert len(set(made)) == len(passages)
    assert sum("Cats" in question for question in made) == 1
    assert any("one two three" in question for question in made)
    assert any("14 15 16 17 18 19 20 21 22 23 24 25" in question for question in made)


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
    assert idle(batch) > 3 * made.model.decoder.n_layers  # passes at three ratios and full prefill, by layers
    assert controller(made).checks == 1
    ((result, loss, seconds),) = [call.args for call in told.call_args_list]
    assert (result, seconds > 0) == ("done", True)
    expected, _ = made.quality.losses(made.prepare(Request(QUESTIONS[0])).prompt)
    assert loss.agreement == pytest.approx(expected[0.05].agreement)
    assert loss.kl == pytest.approx(expected[0.05].kl, abs=1e-3)
    assert answer.report.quality.ratio == 0.05


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
    assert controller(made).checks == 2


def test_losses_above_the_limit_raise_the_ratio_of_later_requests(
    calibrated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = calibrated(dict.fromkeys(RATIOS, GOOD))
    made.precompute()
    batch = served(made)
    real, lossy = Blender.prefill, [True]

    def broken(self: Blender, prompt: Any, blend: BlendConfig, cache: Any = None, *rest: Any) -> Any:
        """Blended answers come from a cache of zeros."""
        done = yield from real(self, prompt, blend, cache, *rest)
        if lossy and blend.method == "blend" and make_policy(blend).ratio < 0.15:
            stacked(done.result.cache.values)[:, :, : len(prompt) - 8].zero_()
        return done

    monkeypatch.setattr(Blender, "prefill", broken)
    for n in range(100):
        ask(batch, QUESTIONS[n % 4])
        idle(batch)
    assert controller(made).ratio == 0.15
    assert made.prepare(Request(QUESTIONS[0])).blend.ratio == 0.15


def test_a_deleted_document_takes_the_checks_that_quote_it_along(calibrated: Any) -> None:
    made = calibrated(dict.fromkeys(RATIOS, GOOD))
    made.precompute()
    told, batch = listener(made), served(made)
    answers = [ask(batch, question) for question in QUESTIONS]
    quoted = answers[0].passages[0]
    left = [a for a in answers if quoted.text not in {p.text for p in a.passages}]
    made.delete(quoted.doc_id)
    idle(batch)
    assert controller(made).checks == len(left) < len(answers)
    assert {call.args[0] for call in told.call_args_list} <= {"done"}  # at once, not when it runs


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


def checks(made: Engine, n: int, **blend: Any) -> int:
    """Answer a question, and tell of the answer n times -> number of checks that are pending."""
    request, answer = made.prepare(Request(QUESTIONS[0], blend=blend)), made.answer(QUESTIONS[0], **blend)
    assert request.quality
    about = request.quality, made.blender, request.prompt, request.decode, answer
    return sum(made.quality.answered(*about) is not None for _ in range(n))


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_share_of_answers_is_checked(calibrated: Any, share: float) -> None:
    made = calibrated(dict.fromkeys(RATIOS, GOOD), quality={**TARGET, "check_rate": share})
    told = listener(made)
    drawn = checks(made, 2_000) + told.call_count
    assert drawn == pytest.approx(2_000 * share, abs=100 * (share > 0))
    assert checks(made, 2_000, ratio=0.1) == 0  # no target
    assert checks(made, 2_000, method="prefix") == 0  # exact


def test_more_answers_than_may_wait_are_drawn_from(calibrated: Any) -> None:
    made = calibrated(dict.fromkeys(RATIOS, GOOD))
    told = listener(made)
    assert checks(made, 200) == 64
    assert [call.args[0] for call in told.call_args_list] == ["dropped"] * 136


def test_passages_of_a_separator_have_no_promise(calibrated: Any) -> None:
    made = calibrated(dict.fromkeys(RATIOS, GOOD), prompt={"separator": " # # "})
    made.precompute()
    assert made.answer(QUESTIONS[0]).report.quality.ratio == 0.0
    report = made.answer(f"{PASSAGES[0].text} # # {QUESTIONS[0]}").report
    assert (report.method, report.quality.ratio) == ("prefix", None)


@pytest.mark.parametrize("target", [{"min_agreement": 0.9}, {"max_kl": 0.1}])
def test_a_model_whose_chunks_are_reused_whole_has_no_target(target: Any) -> None:
    model = replace(toy_model(), decoder=tiny_decoder(HYBRIDS[0]))
    config = CONFIG.with_values(quality=target)
    with pytest.raises(ConfigError) as error:
        Engine(config, model, MemoryStore(2**20))
    assert error.value.setting == "quality.min_agreement"
    with Engine(CONFIG, model, MemoryStore(2**20)) as other:
        assert other.config.blend.ratio == 0.0
