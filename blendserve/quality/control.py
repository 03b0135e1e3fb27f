"""Keeps the target of one engine: chooses the ratio before a prefill, and checks answers while the engine is idle.

A share of answers is checked. It is drawn without regard to the question or the answer. A check measures the ratio that
served and its neighbours. It holds token ids in memory until it ran, and keeps none.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from blendserve.blend.blender import Blender
from blendserve.config import BlendConfig, Config, DecodeConfig
from blendserve.core import Answer, Prompt, QualityReport, Steps, T, TokenIds, run
from blendserve.errors import ConfigError, InputError, StoreError
from blendserve.models.loader import LoadedModel
from blendserve.quality.calibration import PROMPTS, Calibration, digest, make_questions, owner_of
from blendserve.quality.controller import LEVELS, RatioController
from blendserve.quality.fidelity import Verifier, with_end
from blendserve.quality.target import RATIOS, Loss, Target
from blendserve.retrieve import VectorIndex
from blendserve.store import ChunkKey
from blendserve.store.base import Progress

MAX_PENDING = 64  # answers; of more, which ones stay is drawn
CALIBRATED_TOKENS = 32  # of a calibration's answer, at most: longer ones cost more than they tell
SAVED_EVERY = 8  # prompts of a calibration
EXACT = "kept: answers are exact"
NO_INDEX = "answered exactly: only questions over the passages of an index are calibrated"
OFF = "off: the request says what is recomputed"

CheckListener = Callable[[str, Loss | None, float], None]
"""(result, loss, seconds): called after a check with the result done, lost (a chunk had left the store) or dropped (too
many were pending), and with the loss if a ratio served the answer."""


class Choice(NamedTuple):
    """How a request to an engine with a target is answered."""

    blend: BlendConfig
    report: QualityReport
    controller: RatioController | None = None  # None: its answer is not checked


@dataclass(frozen=True, slots=True, eq=False)
class PendingCheck:
    """A served answer that waits for its check."""

    choice: Choice
    controller: RatioController
    verifier: Verifier
    tokens: TokenIds  # of the answer, with an end token if it ended with one
    keys: frozenset[ChunkKey]


class QualityControl:
    """The target of one engine. Call `answered` and run its steps on the model's thread, the rest on any thread."""

    def __init__(self, config: Config, model: LoadedModel, blender: Blender) -> None:
        """Raises ConfigError for a target of a model whose chunks are reused whole."""
        self._config, self._model, self._blender = config, model, blender
        self.target = Target.of(config.quality)
        if self.target:
            self._require_ratios()
        self.on_check: list[CheckListener] = []
        self._controllers: dict[str, RatioController] = {}  # by path of the index
        self._pending: list[PendingCheck] = []
        self._n_offered = 0  # since none was pending
        self._lock = threading.Lock()  # of these three
        self._rng = random.Random()
        blender.fetcher.on_delete.append(self._forget)

    def choose(self, blend: BlendConfig, indexes: Sequence[VectorIndex], is_explicit: bool = False) -> Choice:
        """Choose what keeps the target in one request to an engine that has one.

        indexes: that the passages are from; none if they are the request's own. is_explicit: the request says itself what
        is recomputed.
        """
        assert self.target
        report = QualityReport(str(self.target), None, "", OFF)
        if is_explicit:
            return Choice(blend, report)
        if blend.method in ("full", "prefix"):
            return Choice(blend, replace(report, status=EXACT))
        if not indexes:
            return Choice(blend.with_values(method="prefix"), replace(report, status=NO_INDEX))
        controllers = [self._controller(index, self.target) for index in indexes]
        chosen = max(controllers, key=lambda controller: LEVELS.index(controller.ratio))
        report = chosen.report()
        values = {"method": "prefix"} if report.ratio is None else {"ratio": report.ratio}
        is_checked = len(controllers) == 1 and chosen.checked_ratios
        return Choice(blend.with_values(**values), report, chosen if is_checked else None)

    def answered(
        self, choice: Choice, blender: Blender, prompt: Prompt, decode: DecodeConfig, answer: Answer
    ) -> Steps[None] | None:
        """Draw whether to check an answer -> the steps of one more check, to be run while the engine is idle."""
        if choice.controller is None or self._rng.random() >= self._config.quality.check_rate:
            return None
        tokens = answer.token_ids
        if answer.stop_sequence is None:
            tokens = with_end(self._model, tokens, decode)
        if not tokens:
            return None
        keys = frozenset(blender.key(chunk.ids) for chunk in prompt.chunks)
        decode = decode.with_values(max_new_tokens=len(tokens))
        verifier = Verifier(self._model, blender, prompt, decode, in_short_steps=True)
        pending = PendingCheck(choice, choice.controller, verifier, tokens, keys)
        with self._lock:
            self._n_offered = self._n_offered + 1 if self._pending else 1
            if len(self._pending) < MAX_PENDING:
                self._pending.append(pending)
                return self._check()
            if (at := self._rng.randrange(self._n_offered)) < MAX_PENDING:
                self._pending[at] = pending
        self._tell("dropped", None, 0.0)
        return None

    def _forget(self, keys: Collection[ChunkKey]) -> None:
        """Drop the checks of answers over chunks that were deleted."""
        deleted = frozenset(keys)
        with self._lock:
            self._pending = [pending for pending in self._pending if not pending.keys & deleted]

    def _check(self) -> Steps[None]:
        """Check one pending answer."""
        with self._lock:
            pending = self._pending.pop() if self._pending else None
        if pending is None:
            return
        start, choice = time.perf_counter(), pending.choice
        served, method = choice.report.ratio, self._config.blend.method
        losses: dict[float, Loss] = {}
        try:
            for ratio in pending.controller.checked_ratios:
                blend = choice.blend.with_values(method=method, ratio=ratio)
                done = yield from pending.verifier.prefill(blend)
                if done.missing:
                    raise StoreError("a chunk of the prompt has been evicted")
                answer = pending.tokens if ratio == served else None
                losses[ratio] = (yield from pending.verifier.verify(done, answer)).loss
        except StoreError:
            self._tell("lost", None, time.perf_counter() - start)
            return
        pending.controller.add(served, losses)
        loss = None if served is None else losses.get(served)
        self._tell("done", loss, time.perf_counter() - start)

    def _tell(self, result: str, loss: Loss | None, seconds: float) -> None:
        for listener in self.on_check:
            listener(result, loss, seconds)

    def calibrate(
        self,
        index: VectorIndex,
        lay_out: Callable[[str], Prompt],
        prompts: int = PROMPTS,
        questions: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Calibration:
        """Measure prompts of an index and store their losses; those of an earlier run count.

        lay_out: question -> prompt. questions: users' own; without any, one is made of each of as many passages. Raises
        InputError, StoreError, ConfigError.
        """
        self._require_ratios()
        if not len(index):
            raise InputError(
                "there is nothing to calibrate: open an index that has passages", setting="index"
            )
        store, owner = self._blender.store, self._owner(index)
        found = Calibration.load(store, owner)
        most = max(prompts, found.prompts if found else 0)
        chosen = list(islice(questions or make_questions(index.passages), most))
        if found is None or not found.continues(chosen, len(index)):
            found = Calibration.empty(len(index), "given" if questions else "made")
            chosen = chosen[:prompts]
        for n in range(found.prompts, len(chosen)):
            losses, seconds = self.losses(lay_out(chosen[n]))
            found = found.with_prompt(losses, seconds, digest(chosen[: n + 1]))
            if found.prompts % SAVED_EVERY == 0:
                found.save(store, owner)
            if progress:
                progress(found.prompts, len(chosen))
        found.save(store, owner)
        with self._lock:
            self._controllers.pop(str(index.path), None)  # it begins anew
        return found

    def losses(self, prompt: Prompt) -> tuple[dict[float, Loss], dict[str, float]]:
        """Measure one prompt at every ratio -> losses, and seconds of each prefill. Missing chunks are stored first."""
        blend = self._config.blend.with_values(method="blend")
        n = min(self._config.decode.answer_tokens, CALIBRATED_TOKENS)
        decode = self._config.decode.with_values(temperature=0.0, max_new_tokens=n, stop=())
        self._blender.writer.precompute([chunk.ids for chunk in prompt.chunks])
        verifier = Verifier(self._model, self._blender, prompt, decode)
        losses, seconds = dict[float, Loss](), dict[str, float]()

        def timed(name: str, steps: Steps[T]) -> T:
            start = time.perf_counter()
            done = run(steps)
            seconds[name] = time.perf_counter() - start
            return done

        timed("full", verifier.full())
        for ratio in RATIOS:
            done = timed(f"{ratio:g}", verifier.prefill(blend.with_values(ratio=ratio)))
            losses[ratio] = run(verifier.verify(done)).loss
        return losses, seconds

    def calibration(self, index: VectorIndex) -> Calibration | None:
        """Return the stored calibration of an index; None if it has none that fits. Raises StoreError."""
        found = Calibration.load(self._blender.store, self._owner(index))
        return found if found and found.fits(len(index)) else None

    def controllers(self) -> list[tuple[str, RatioController]]:
        """Return the controllers of all indexes that were asked for, with the index's name."""
        with self._lock:
            return [(path.rpartition("/")[2], found) for path, found in self._controllers.items()]

    def _controller(self, index: VectorIndex, target: Target) -> RatioController:
        """Return an index's controller. It reads its calibration once; without the store, it has none."""
        path = str(index.path)
        with self._lock:
            if found := self._controllers.get(path):
                return found
        try:
            calibration = self.calibration(index)  # without the lock: other indexes are asked for meanwhile
        except StoreError:  # answers are exact until it can be read
            return RatioController(target, None)
        with self._lock:
            return self._controllers.setdefault(path, RatioController(target, calibration))

    def _owner(self, index: VectorIndex) -> str:
        """Return the name of an index's calibration in the store: a hash of whatever changes the answers."""
        config, blender = self._config, self._blender
        blend, key = config.blend, blender.key
        work = (blend.policy, blend.correction, blend.near, blend.refine, blender.priors.hash())
        rest = key.dtype, config.store.codec, config.model.decode_weights, config.retrieve.top_k
        prompt = key.context, config.prompt.model_dump()
        return owner_of(index.path.name, key.fingerprint, work, rest, prompt)

    def _require_ratios(self) -> None:
        """Raises ConfigError for a model whose chunks are reused whole."""
        if self._model.decoder.recurrent:
            raise ConfigError(
                f"there is no ratio to choose for {self._model.name}: chunks of recurrent layers are reused whole; leave "
                "out quality.min_agreement and quality.max_kl",
                setting="quality.min_agreement",
            )
