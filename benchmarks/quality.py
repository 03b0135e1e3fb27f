"""`python -m benchmarks quality`: is a target of quality kept on prompts that nothing was chosen on?

    promise   an index is calibrated on some prompts; others are then answered, and compared with full prefill one by one
    drift     the same with a wrong correction prior: checks until the alarm, and the agreement behind it
    load      requests one after another, with pauses in which a check may run: the time to the first token when every
              answer is checked, and when none is

Questions are made of the titles of passages, each of another passage than calibration's; of a data set with questions,
also its own. The prefill is timed against full prefill of the same prompt, in turns.
"""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal

from pydantic import Field

from blendserve.bench.fixture import scratch
from blendserve.bench.harness import Case, Group, Metrics, SampleLog, count, ms, table
from blendserve.bench.runner import Bench, BenchConfig, open_model
from blendserve.blend.priors import Priors
from blendserve.config import Config, DecodeConfig, Positive, RetrieveConfig, ServeConfig
from blendserve.core import Document, run
from blendserve.engine.batch_engine import BatchEngine
from blendserve.engine.engine import Engine
from blendserve.engine.request import Completed, Failed, Request
from blendserve.evaluate.datasets import load
from blendserve.kv import map_layers
from blendserve.quality.control import QualityControl
from blendserve.quality.controller import RatioController
from blendserve.quality.evidence import MeasuredPrompt, make_questions
from blendserve.quality.fidelity import Verifier
from blendserve.quality.risk import interval
from blendserve.quality.target import Loss

WRONG = 6.0  # times the prior, with the other sign; twice it, the ridge on recomputed tokens made good


class QualityConfig(BenchConfig):
    """A promise and what becomes of it."""

    dataset: str = Field("generated", description="Data set whose passages are the index.")
    documents: Positive = Field(600, description="Maximum number of passages.")
    quality: float = Field(0.9, description="Target: least mean agreement with full prefill.")
    prompts: Positive = Field(128, description="Number of prompts to calibrate on.")
    unseen: Positive = Field(150, description="Number of other prompts.")
    top_k: Positive = Field(6, description="Number of passages in a prompt.")
    new_tokens: Positive = Field(16, description="Length of an answer, in tokens.")
    parts: tuple[Literal["promise", "drift", "load"], ...] = Field(
        ("promise", "drift", "load"), description="Parts to run."
    )
    served: Positive = Field(40, description="Number of requests per round while checks run.")
    pause: float = Field(
        1.5, gt=0, description="Mean pause between requests, as a multiple of the answer time."
    )
    after: Positive = Field(40, description="Number of prompts after the alarm.")


def groups(config: QualityConfig, log: SampleLog) -> Iterator[Group]:
    model, data = open_model(config, log), load(config.dataset)
    settings = Config(
        model=config.model_settings,
        retrieve=RetrieveConfig(top_k=config.top_k),
        decode=DecodeConfig(max_new_tokens=config.new_tokens),
    ).replace("quality.min_agreement", config.quality)
    documents = [Document(p.text, p.title, p.id) for p in data.corpus[: config.documents]]
    with (
        scratch(config.folder) as folder,
        Engine.build(folder / "index", documents, settings, model=model) as engine,
    ):
        engine.precompute()
        evidence = engine.calibrate(config.prompts)
        assert engine.index is not None
        made = make_questions(engine.index.passages)
        n = len(evidence.samples)
        unseen = list(islice(made, n, n + config.unseen))
        asked = [example.question for example in data.examples]
        kinds = {"made": unseen, "of people": asked if config.dataset != "generated" else []}
        for kind, questions in kinds.items():
            if questions and "promise" in config.parts:
                yield _promise(engine, kind, questions)
        if "drift" in config.parts:
            yield _drift(config, engine, unseen)
        if "load" in config.parts:
            yield _load(config, engine, unseen)


class Prompts:
    """Questions one after another: by full prefill and as they are served, in turns."""

    def __init__(self, engine: Engine, questions: Sequence[str]) -> None:
        self._engine, self._questions, self.served = engine, iter(questions), list[Loss]()

    def next(self) -> Metrics:
        request = self._engine.prepare(Request(next(self._questions)))
        verifier = Verifier(self._engine.model, self._engine.blender, request.prompt, request.decode)
        work = {"full_s": verifier.full(), "served_s": verifier.prefill(request.blend)}
        seconds, done = dict[str, float](), dict[str, Any]()
        for name in sorted(work, reverse=len(self.served) % 2 == 1):
            start = time.perf_counter()
            done[name] = run(work[name])
            seconds[name] = time.perf_counter() - start
        loss, answer, _ = run(verifier.verify(done["served_s"]))
        self.served.append(loss)
        is_fulls = answer == run(verifier.greedy(done["full_s"]))
        of_full = seconds["served_s"] / seconds["full_s"]
        return {
            **seconds,
            **loss._asdict(),
            "of_full": of_full,
            "misjudged": is_fulls != (loss.agreement == 1),
        }


def _promise(engine: Engine, kind: str, questions: Sequence[str]) -> Group:
    prompts = Prompts(engine, questions)

    def facts() -> Mapping[str, Any]:
        (_, controller), *_ = engine.quality.controllers()
        return {"ratio": _ratio(controller), **_facts(prompts.served)}

    return Group(
        {"questions": kind}, [Case({"method": "served"}, prompts.next)], facts, len(questions), False
    )


def _facts(served: Sequence[Loss]) -> dict[str, Any]:
    given, kls = [1 - loss.agreement for loss in served], sorted(loss.kl for loss in served)
    low, high = interval(given, 0.05)
    return {
        "prompts": len(given),
        "agreement": 1 - statistics.fmean(given),
        "agreement_low": 1 - high,
        "agreement_high": 1 - low,
        "worst_agreement": 1 - max(given),
        "mean_kl": statistics.fmean(kls),
        "p95_kl": kls[int(0.95 * (len(kls) - 1))],
        "worst_kl": kls[-1],
    }


def _ratio(controller: RatioController) -> float | str:
    return "exact" if controller.ratio is None else controller.ratio


def _drift(config: QualityConfig, engine: Engine, questions: Sequence[str]) -> Group:
    """Every answer is checked, while the prior says the opposite of what it learnt."""

    def watch() -> Metrics:
        target = engine.quality.target
        assert target
        assert engine.index is not None
        controller = RatioController(target, engine.quality.evidence(engine.index), len(engine.index))
        good = engine.blender.priors.current() or Priors.of_nothing(engine.model.decoder)
        found: dict[str, list[Loss]] = {"before": [], "behind": []}
        first, until_alarm = controller.ratio, 0
        wrong = (map_layers(lambda x: -WRONG * x, part) for part in (good.weights, good.constants))
        engine.blender.priors.use(Priors(*wrong))
        try:
            for question in questions:
                served = controller.ratio
                prompt = engine.prepare(Request(question, blend={"method": "blend"})).prompt
                assert engine.index is not None
                sample = MeasuredPrompt(tuple(engine.quality.losses(prompt)), len(engine.index))
                loss = Loss(1.0, 0.0) if served is None else sample.at(served)
                found["before" if served == first else "behind"].append(loss)
                controller.add(served, sample)
                until_alarm += served == first
                if len(found["behind"]) == config.after:
                    break
        finally:
            engine.blender.priors.use(good)
        means = {name: statistics.fmean(loss.agreement for loss in of) for name, of in found.items() if of}
        last = 1.0 if controller.ratio is None else controller.ratio
        return {"checks_to_alarm": until_alarm, "alarms": controller.alarms, "last_ratio": last, **means}

    return Group({"questions": "drift"}, [Case({"method": "wrong prior"}, watch)], repeats=1, warm_up=False)


class FirstTokens:
    """An observer of a server: the time of each answer's first token, and the checks that ran."""

    def __init__(self) -> None:
        self.seconds, self.checks = list[float](), 0

    def token(self, method: str, seconds: float, first: bool) -> None:
        if first:
            self.seconds.append(seconds)

    def checked(self, result: str, loss: Loss | None, seconds: float) -> None:
        self.checks += result == "done"

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _load(config: QualityConfig, engine: Engine, questions: Sequence[str]) -> Group:
    start = time.perf_counter()
    for question in questions[:3]:
        engine.answer(question)
    pause_s, n = (time.perf_counter() - start) / 3 * config.pause, itertools.count()

    def serve(share: float) -> Metrics:
        seen, draw, done = FirstTokens(), random.Random(next(n) // 2), threading.Semaphore(0)
        settings = engine.config.replace("quality.check_share", share)
        engine.quality = QualityControl(settings, engine.model, engine.blender)
        engine.quality.on_check.append(seen.checked)
        batch = BatchEngine(engine, seen, ServeConfig(slots=2))

        def emit(event: object) -> None:
            if isinstance(event, (Completed, Failed)):
                done.release()

        batch.scheduler.start()
        try:
            for question in draw.choices(questions, k=config.served):
                time.sleep(draw.expovariate(1 / pause_s))
                batch.scheduler.submit(batch.sequence(engine.prepare(Request(question)), emit))
                done.acquire()
        finally:
            batch.scheduler.stop()
        low, *_, high = statistics.quantiles(seen.seconds, n=100, method="inclusive")
        return {
            "median_s": statistics.median(seen.seconds),
            "p99_s": high,
            "least_s": low,
            "checks": seen.checks,
        }

    cases = [Case({"method": f"{share:.0%} checked"}, partial(serve, share)) for share in (0.0, 1.0)]
    return Group({"questions": "load"}, cases, warm_up=False)


BENCH = Bench(
    QualityConfig,
    groups,
    (
        table(
            "Served with a target, against full prefill",
            *(ms("full ms", "full_s"), ms("served ms", "served_s"), count("of full", "of_full", digits=2)),
            *(count("agreement", "agreement", digits=3), count("KL", "kl", digits=3)),
            count("misjudged", "misjudged", digits=2),
            method="served",
        ),
        table(
            "A correction that went wrong",
            *(count("checks to the alarm", "checks_to_alarm"), count("last ratio", "last_ratio", digits=2)),
            *(count("agreement before", "before", digits=3), count("behind", "behind", digits=3)),
            method="wrong prior",
        ),
        table(
            "First tokens beside checks",
            *(ms("median ms", "median_s"), ms("p99 ms", "p99_s"), count("checks", "checks")),
            questions="load",
        ),
    ),
    tiny={"documents": 12, "prompts": 6, "unseen": 4, "top_k": 3, "new_tokens": 4, "after": 2, "served": 3},
)
