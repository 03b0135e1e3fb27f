"""One pipeline: Python callers and the scheduler get one answer out of the same code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import blendserve
from blendserve.config import changed
from blendserve.engine.batching import BatchEngine
from blendserve.engine.engine import Engine
from blendserve.engine.request import Request
from blendserve.errors import ConfigError, InputError, PromptTooLong
from blendserve.serve.metrics import Metrics
from tests.engine.helpers import CONFIG, CONTEXT, PASSAGES, QUESTIONS, Listener, engine

PACKAGE = Path(blendserve.__file__).parent


@pytest.mark.parametrize(
    ("code", "module"),
    [
        ("_tokenizer.apply_chat_template(", "engine/prompt.py"),
        ("TextStream(tokenizer, plan.decode.stop)", "engine/generation.py"),
        (" Timings(", "engine/generation.py"),
        (" Answer(", "engine/generation.py"),
        ("PromptTooLong(tokens, self.room", "engine/request.py"),
        ("blender.forget(", "engine/library.py"),
        ("index.delete(", "engine/library.py"),
        ("blender.run(plan.prompt", "engine/prefill.py"),
    ],
)
def test_each_stage_is_written_once(code: str, module: str) -> None:
    files = [f for f in PACKAGE.rglob("*.py") if code in f.read_text("utf-8")]
    assert [f.relative_to(PACKAGE).as_posix() for f in files] == [module]


def test_the_engine_knows_nothing_of_http() -> None:
    for file in (PACKAGE / "engine").glob("*.py"):
        assert "blendserve.serve" not in file.read_text("utf-8"), file
        assert "fastapi" not in file.read_text("utf-8"), file


class Both:
    """One engine, asked directly and through its scheduler."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        engine.precompute(PASSAGES[:-1])
        self.batch = BatchEngine(
            engine,
            Metrics(),
            slots=3,
            slot_tokens=None,
            queue=100,
            gap_s=0.0,
            prefill_share=0.0,
            share_bytes=2**20,
            prefix_bytes=2**20,
            job_share=0.5,
        )
        self.batch.scheduler.start()

    def submit(self, request: Request) -> Listener:
        listener = Listener()
        self.batch.scheduler.submit(self.batch.queued(self.engine.plan(request), listener))
        return listener


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    made = Both(engine(changed(CONFIG, store={**CONFIG.store.model_dump(), "write_back": False})))
    yield made
    made.batch.scheduler.stop()


def test_one_answer_whoever_asks(both: Both) -> None:
    """In fp32: tokens, text, reason to end, passages and report are equal; both have all timings."""
    free = both.engine.answer(QUESTIONS[0], PASSAGES, max_new_tokens=12)
    options: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"method": "full"}, {}),
        ({"method": "blend", "ratio": 0.0}, {"max_new_tokens": 1}),
        ({"method": "blend", "policy": "random", "seed": 3}, {"temperature": 1.0, "seed": 3}),
        ({"method": "prefix"}, {"temperature": 0.7, "top_p": 0.8, "max_new_tokens": 20}),
        ({"method": "blend"}, {"stop": (free.text[4:7], "never said")}),
        ({"method": "reuse"}, {"stop": (free.text[-2:] + "and more",)}),  # held back to the end
    ]
    requests = [
        Request(QUESTIONS[i % 4], PASSAGES[i:] + PASSAGES[:i] if i % 3 else PASSAGES, blend=b, decode=d)
        for i, (b, d) in enumerate(options)
    ]
    requests.append(Request(QUESTIONS[1], ()))
    listeners = [both.submit(request) for request in requests]
    for listener, request in zip(listeners, requests, strict=True):
        pushed, pulled = listener.answer(), both.engine.run(both.engine.plan(request)).answer()
        ours, theirs = ({**a.to_dict(), "ids": a.token_ids} for a in (pushed, pulled))
        assert {*ours.pop("timings")} == {*theirs.pop("timings")}
        assert ours == theirs
        for timings in (pushed.timings, pulled.timings):
            assert timings.ttft >= timings.prefill > 0


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (Request(" ", PASSAGES), InputError, "question is empty"),
        (Request("Why?", PASSAGES, blend={"ratio": 7}), ConfigError, "'blend.ratio' cannot be 7"),
        (Request("Why?"), InputError, "has no index"),
    ],
)
def test_what_cannot_be_answered_is_no_plan(
    request_: Request, error: type[Exception], message: str, both: Both
) -> None:
    with pytest.raises(error, match=message):
        both.engine.plan(request_)


def test_what_has_no_room_is_refused_before_anything_runs(both: Both) -> None:
    request = Request("Why?", PASSAGES, decode={"max_new_tokens": CONTEXT})
    with pytest.raises(PromptTooLong, match="too many for a context"):
        both.engine.plan(request)
