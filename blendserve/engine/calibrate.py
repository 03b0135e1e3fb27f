"""Calibration: the loss of every ratio on prompts of an index, against full prefill (quality/calibration.py)."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Literal

from blendserve.core import Passage, Steps, T, run
from blendserve.engine.request import Request
from blendserve.engine.verify import Verifier
from blendserve.errors import InputError
from blendserve.quality.calibration import Calibration, digest
from blendserve.quality.target import RATIOS, Loss
from blendserve.store.base import Progress

if TYPE_CHECKING:
    from blendserve.engine.engine import Engine

PROMPTS = 128
ANSWER_TOKENS = 32  # of an answer, at most: longer ones cost more than they tell
SAVED_EVERY = 8  # prompts
QUOTED_WORDS = 12  # of a passage without a title


def calibrate(
    engine: Engine, prompts: int = PROMPTS, questions: Sequence[str] = (), progress: Progress | None = None
) -> Calibration:
    """Measure prompts of the engine's index, and store their losses; those of an earlier run count.

    questions: users' own; without any, one is made of each of as many passages. Raises InputError, StoreError.
    """
    index = engine.index
    if index is None or not len(index):
        raise InputError("there is nothing to calibrate: open an index that has passages", setting="index")
    where = engine.targets.calibrations(index)
    asked: Literal["made", "given"] = "given" if questions else "made"
    found = where.load()
    most = max(prompts, found.prompts if found else 0)
    chosen = list(islice(questions or made_questions(index.passages), most))
    if found is None or not found.continues(chosen, len(index)):
        found, chosen = Calibration.empty(len(index), asked), chosen[:prompts]
    for n in range(found.prompts, len(chosen)):
        found = found.with_prompt(*losses(engine, chosen[n]), digest(chosen[: n + 1]))
        if found.prompts % SAVED_EVERY == 0:
            where.save(found)
        if progress:
            progress(found.prompts, len(chosen))
    engine.targets.use(index, found)
    return found


def losses(engine: Engine, question: str) -> tuple[dict[float, Loss], dict[str, float]]:
    """Measure one question at every ratio -> losses, and seconds of each prefill. Missing chunks are stored first."""
    blend = engine.config.blend.without_target(method="blend")
    n = min(engine.config.decode.answer_tokens, ANSWER_TOKENS)
    decode = {"temperature": 0.0, "max_new_tokens": n, "stop": ()}
    request = engine.prepare(Request(question, blend={"method": "blend"}, decode=decode))
    engine.blender.writer.precompute([chunk.ids for chunk in request.prompt.chunks])
    verifier = Verifier(engine.model, engine.blender, request.prompt, request.decode)
    found, seconds = dict[float, Loss](), dict[str, float]()

    def timed(name: str, steps: Steps[T]) -> T:
        start = time.perf_counter()
        done = run(steps)
        seconds[name] = time.perf_counter() - start
        return done

    timed("full", verifier.full())
    for ratio in RATIOS:
        done = timed(f"{ratio:g}", verifier.prefill(blend.with_values(ratio=ratio)))
        found[ratio] = run(verifier.verify(done)).loss
    return found, seconds


def made_questions(passages: Sequence[Passage]) -> Iterator[str]:
    """A question about each passage, in random order: of its title or, without one, of words in its middle."""
    order: Iterable[int] = random.Random(0).sample(range(len(passages)), len(passages))
    for passage in (passages[n] for n in order):
        words = passage.text.split()
        start = max(0, (len(words) - QUOTED_WORDS) // 2)
        quoted = " ".join(words[start : start + QUOTED_WORDS])
        yield f"What is said about {passage.title}?" if passage.title else f'Which passage says "{quoted}"?'
