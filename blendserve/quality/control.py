"""Keeps the target of one engine: chooses the ratio before a prefill, and checks answers while the engine is idle.

One answer at a time is checked: the next one after a rest, so that checks take at most `quality.check_share` of the
time. A check measures all ratios. It holds the prompt's token ids in memory until it has run, and stores none.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from blendserve.blend.blender import Blender
from blendserve.blend.policies import takes
from blendserve.config import BlendConfig, Config
from blendserve.core import Prompt, QualityReport, Steps, run
from blendserve.errors import InputError, StoreError
from blendserve.models.loader import LoadedModel
from blendserve.quality.controller import RatioController
from blendserve.quality.evidence import (
    PROMPTS,
    SHIPPED,
    Evidence,
    MeasuredPrompt,
    hash_of,
    make_questions,
    owner_of,
    read_shipped,
)
from blendserve.quality.fidelity import Verifier
from blendserve.quality.target import LEVELS, RATIOS, Loss, Target
from blendserve.retrieve import VectorIndex
from blendserve.store import ChunkKey
from blendserve.store.base import Progress

MEASURED_TOKENS = 32  # of full prefill's answer, at most; longer ones cost more than they tell
WORK = ("policy", "ratio", "refine", "correction", "near")  # options that say what is recomputed
SAVED_EVERY = 8  # prompts of a calibration
# One prompt is measured per 50 prompts' worth of computed chunks. Measuring takes about 5 times as long as computing the
# prompt's chunks, so it adds about a tenth to the time.
CHUNKS_PER_PROMPT = 50

CheckListener = Callable[[str, Loss | None, float], None]
"""(result, loss, seconds): called after a check with the result done or lost (a chunk had left the store, or there was no
memory), and with the loss if a ratio served the answer."""

log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """How a request to an engine with a target is answered."""

    blend: BlendConfig
    report: QualityReport
    place: Place | None = None  # None: its answer is not checked
    passages: int = 0  # of the index; 0: they are the request's own


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where evidence is gathered: one index, or all passages that come with requests."""

    controller: RatioController
    owner: str  # of the evidence in the store


@dataclass(frozen=True, slots=True, eq=False)
class PendingCheck:
    """An answered prompt that waits for its check."""

    choice: Choice
    place: Place
    verifier: Verifier
    keys: frozenset[ChunkKey]


class QualityControl:
    """The target of one engine. Call `answered` and run its steps on the model's thread, the rest on any thread."""

    def __init__(
        self,
        config: Config,
        model: LoadedModel,
        blender: Blender,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """clock: gives seconds; decides when the next answer is checked."""
        self._config = config
        self._model = model
        self._blender = blender
        self._clock = clock
        self.target = _target(config, model)
        self.on_check: list[CheckListener] = []
        # By path of the index ("": requests' own passages), and whether the correction has a prior.
        self._places: dict[tuple[str, bool], Place] = {}
        self._pending: PendingCheck | None = None
        self._next_check = 0.0 if config.quality.check_share else math.inf  # not while one is pending
        self._lock = threading.Lock()  # of these three
        blender.fetcher.on_delete.append(self._forget)

    def choose(
        self, blend: BlendConfig, asked: Mapping[str, object], indexes: Sequence[VectorIndex]
    ) -> Choice | None:
        """Choose the ratio of one request; None without a target, or if the request itself says what is recomputed.

        asked: the request's options of BlendConfig; methods auto and blend leave the ratio open. indexes: those that the
        passages come from; none if they are the request's own.
        """
        is_chosen = any(asked.get(name) is not None for name in WORK)
        if self.target is None or is_chosen or asked.get("method") not in (None, "auto", "blend"):
            return None
        places = [self._place(index, self.target) for index in indexes or (None,)]
        chosen = max(places, key=lambda place: LEVELS.index(place.controller.ratio))
        report = chosen.controller.report()
        values = {"method": "prefix"} if report.ratio is None else {"ratio": report.ratio}
        blend = blend.with_values(**values)
        if len(places) > 1:
            return Choice(blend, report)
        return Choice(blend, report, chosen, len(indexes[0]) if indexes else 0)

    def answered(self, choice: Choice, blender: Blender, prompt: Prompt) -> Steps[None] | None:
        """Return the steps of a check of this answer, to be run while the engine is idle; None: it is not checked."""
        if choice.place is None or prompt.is_plain:  # a plain prompt's own KV is kept for its next turn
            return None
        with self._lock:
            if self._clock() < self._next_check:
                return None
            self._next_check = math.inf
            keys = frozenset(blender.key(chunk.ids) for chunk in prompt.chunks)
            self._pending = PendingCheck(choice, choice.place, self._verifier(prompt, blender), keys)
        return self._check()

    def _forget(self, keys: Collection[ChunkKey]) -> None:
        """Drop the check of an answer over chunks that were deleted."""
        with self._lock:
            if self._pending and self._pending.keys & frozenset(keys):
                self._pending = None

    def _check(self) -> Steps[None]:
        """Check the pending answer."""
        with self._lock:
            pending, self._pending = self._pending, None
        start = self._clock()
        try:
            if pending:
                yield from self._checked(pending)
        finally:
            now = self._clock()
            with self._lock:
                self._next_check = now + (now - start) * (1.0 / self._config.quality.check_share - 1.0)

    def _checked(self, pending: PendingCheck) -> Steps[None]:
        start = self._clock()
        choice = pending.choice
        place = pending.place
        try:
            losses = yield from pending.verifier.measure(self._blends(choice.blend))
        except (StoreError, MemoryError, RuntimeError) as error:  # torch has no memory: RuntimeError
            log.info("an answer was not checked: %s", error)
            self._tell("lost", None, self._clock() - start)
            return
        served = choice.report.ratio
        sample = MeasuredPrompt(tuple(losses), choice.passages)
        store = self._blender.store
        stored = None
        with suppress(StoreError):
            stored = Evidence.load(store, place.owner)
        place.controller.add(served, sample, stored)
        try:
            place.controller.evidence.save(store, place.owner)
        except StoreError as error:
            log.warning("a check was not stored: %s", error)
        self._tell("done", None if served is None else sample.at(served), self._clock() - start)

    def _tell(self, result: str, loss: Loss | None, seconds: float) -> None:
        for listener in self.on_check:
            listener(result, loss, seconds)

    def gather(self, chunks: int, calibrate: Callable[..., object]) -> None:
        """Calibrate after so many chunks were computed: one prompt for CHUNKS_PER_PROMPT times `top_k` of them.

        Without a target, nothing is measured. calibrate: the engine's. What it cannot store is logged: the chunks are
        stored.
        """
        prompts = min(PROMPTS, chunks // CHUNKS_PER_PROMPT // self._config.retrieve.top_k)
        if not (prompts and self.target):
            return
        log.info("Comparing answers with full prefill (%d prompts)", prompts)
        try:
            calibrate(limit=prompts)
        except StoreError as error:
            log.warning("no evidence of the quality was gathered: %s", error)

    def calibrate(
        self,
        index: VectorIndex,
        lay_out: Callable[[str], Prompt],
        prompts: int = PROMPTS,
        questions: Sequence[str] = (),
        progress: Progress | None = None,
        limit: int | None = None,
    ) -> Evidence:
        """Measure prompts of an index and store their losses. Prompts of an earlier run count, too.

        lay_out: question -> prompt. questions: users' own; without any, they are generated from passages.
        limit: of prompts to measure now. Raises InputError, StoreError.
        """
        if not len(index):
            raise InputError(
                "there is nothing to calibrate: open an index that has passages", setting="index"
            )
        store = self._blender.store
        owner = self._owner(index)
        found = Evidence.load(store, owner) or Evidence()
        chosen = list(islice(dict.fromkeys(questions or make_questions(index.passages)), prompts))
        measured = {sample.question for sample in found.samples}
        left = [question for question in chosen if hash_of(question) not in measured][:limit]
        for n, question in enumerate(left, 1):
            losses = self.losses(lay_out(question))
            found = found.plus(MeasuredPrompt(tuple(losses), len(index), hash_of(question)))
            if n % SAVED_EVERY == 0:
                found.save(store, owner)
            if progress:
                progress(n, len(left))
        found.save(store, owner)
        with self._lock:
            self._places.pop(self._path(index), None)  # the next request reads the new evidence
        return found

    def losses(self, prompt: Prompt) -> list[Loss]:
        """Measure one prompt at each of RATIOS. Missing chunks are stored first."""
        self._blender.writer.precompute([chunk.ids for chunk in prompt.chunks])
        return run(self._verifier(prompt, self._blender).measure(self._blends(self._config.blend)))

    def _blends(self, blend: BlendConfig) -> list[BlendConfig]:
        return [blend.with_values(method="blend", ratio=ratio) for ratio in RATIOS]

    def _verifier(self, prompt: Prompt, blender: Blender) -> Verifier:
        n = min(self._config.decode.answer_tokens, MEASURED_TOKENS)
        decode = self._config.decode.with_values(temperature=0.0, max_new_tokens=n, stop=())
        return Verifier(self._model, blender, prompt, decode, in_short_steps=True)

    def evidence(self, index: VectorIndex | None) -> Evidence:
        """Return the stored evidence of an index, or of requests' own passages. Raises StoreError.

        An index without evidence starts with the package's evidence of a bundled model, which was measured on a smaller
        index and weighs less accordingly.
        """
        if found := Evidence.load(self._blender.store, self._owner(index)):
            return found
        shipped = {} if index is None else read_shipped(SHIPPED)
        return shipped.get(self.shipped_owner, Evidence())

    @property
    def shipped_owner(self) -> str:
        """Return the owner of the package's evidence of this model with these settings."""
        return owner_of("", self._model.name, *self._settings())

    def controllers(self) -> list[tuple[str, RatioController]]:
        """Return the controllers of all indexes that were asked for, with the index's name; "": own passages."""
        with self._lock:
            return [(path.rpartition("/")[2], place.controller) for (path, _), place in self._places.items()]

    def _place(self, index: VectorIndex | None, target: Target) -> Place:
        """Return where an index's evidence is gathered. The store is read once; if it fails, there is no evidence."""
        path = self._path(index)
        with self._lock:
            if found := self._places.get(path):
                return found
        owner = self._owner(index)
        try:
            evidence = self.evidence(index)  # without the lock: other indexes are asked for meanwhile
        except StoreError:  # asked again next time
            return Place(RatioController(target), owner)
        passages = 0 if index is None else len(index)
        made = Place(RatioController(target, evidence, passages), owner)
        with self._lock:
            return self._places.setdefault(path, made)

    def _path(self, index: VectorIndex | None) -> tuple[str, bool]:
        return "" if index is None else str(index.path), self._blender.priors.current() is not None

    def _owner(self, index: VectorIndex | None) -> str:
        """Return the name of an index's evidence in the store: a hash of whatever changes the answers."""
        name = "" if index is None else index.path.name
        key = self._blender.key
        return owner_of(name, key.fingerprint, key.context, *self._settings())

    def _settings(self) -> tuple[object, ...]:
        """Return the settings that change the answers of a model."""
        config = self._config
        has_prior = self._blender.priors.current() is not None
        blend = config.blend
        work = blend.policy, blend.correction, blend.near, blend.refine, has_prior
        rest = config.store.codec, config.model.decode, config.retrieve.top_k
        return work, rest, config.prompt.model_dump()


def _target(config: Config, model: LoadedModel) -> Target | None:
    """Return the target of the settings; None if they, or the model, leave no ratio to choose."""
    least = config.quality.min_agreement
    blend = config.blend
    is_open = blend.ratio is None and blend.method in ("auto", "blend") and takes(blend.policy, "ratio")
    return Target(1.0 - least) if least is not None and is_open and not model.decoder.recurrent else None
