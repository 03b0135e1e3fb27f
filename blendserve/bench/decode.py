"""`blendserve bench decode`: seconds a token after a long context, against transformers' `generate`.

Both decode greedily and the same number of tokens. The clock runs from the first token, which prefill gives, to the last.
On a GPU also: steps launched one kernel after another against steps replayed from a CUDA graph. With --drafts also: the
same answer with and without prompt-lookup drafts. One answer quotes the context, as its prompt ends in
the context's first tokens; the other one is sampled at temperature 1 and quotes little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from typing import Any, cast

import torch
from pydantic import Field
from torch import Tensor

from blendserve.bench.harness import Case, Column, Group, Metrics, SampleLog, count, ms, speedup, table
from blendserve.bench.runner import Bench, BenchConfig, open_reader
from blendserve.bench.workload import check_room, make_workload
from blendserve.blend.blender import Prefilled
from blendserve.blend.layout import lay_out
from blendserve.blend.planner import plan_full_prefill
from blendserve.blend.prefill import PassResult, blend_prefill
from blendserve.blend.report import explain, make_report
from blendserve.config import BlendConfig, DecodeConfig, Positive
from blendserve.core import Answer, Prompt, Steps, TokenIds, run
from blendserve.engine.generate import AnswerStream, Sequence, generate
from blendserve.engine.request import Plan
from blendserve.kernels.cuda.graphs import Capture, CudaGraph, Replayed
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import LoadedModel
from blendserve.models.model import DecoderModel
from blendserve.models.runner import EAGER_STEPS, Runner
from blendserve.timing import Clock

TRANSFORMERS, OURS, LAUNCHED, GRAPH = "transformers", "blendserve", "launched", "graph"
PLAIN, DRAFTS = "one token a pass", "drafts"
QUOTED_AFTER = 64  # tokens of a quoting prompt's end that are its beginning, too
Timed = tuple[tuple[int, ...], tuple[float, ...]]  # tokens, and the seconds at which each was there


class DecodeBenchConfig(BenchConfig):
    """Tokens after a long context."""

    contexts: tuple[Positive, ...] = Field((3072,), description="Context lengths, in tokens.")
    new_tokens: int = Field(
        64, ge=2, description="Number of tokens to decode; the time from the first to the last is measured."
    )
    graphs: bool = Field(False, description="Compare launched steps with CUDA graphs, too.")
    drafts: bool = Field(
        False,
        description="Compare decoding with prompt-lookup drafts, too, for answers that quote and others.",
    )
    repeats: Positive = Field(3, description="Number of measured rounds.")


def groups(config: DecodeBenchConfig, log: SampleLog) -> Iterator[Group]:
    reader = open_reader(config, log)
    adapter, n = reader.adapter, config.new_tokens
    most = max(config.contexts)
    check_room(reader, most + n, f"a context of {most:,} and {n:,} new tokens")
    for context in config.contexts:
        labels = {"context": context, "new_tokens": n}
        if not log.done(labels):
            ids = make_workload(reader, 1, context, None, config.seed).chunks[0]
            done = prefilled(adapter, ids, n)
            agreeing = agree(run_generate(adapter, ids, n)[0], run_ours(adapter, done, context, n)[0])
            cases = [
                Case({"engine": TRANSFORMERS}, lambda ids=ids: _seconds(run_generate(adapter, ids, n))),  # type: ignore[misc]
                Case({"engine": OURS}, lambda done=done, c=context: _seconds(run_ours(adapter, done, c, n))),  # type: ignore[misc]
            ]
            yield Group(labels, cases, {"tokens_agreeing": agreeing})
        if config.graphs and not log.done({**labels, "steps": "random KV"}):
            yield _steps(adapter, context, n, {**labels, "steps": "random KV"})
        for quotes in (False, True) if config.drafts else ():
            if not log.done({**labels, "answer": _KINDS[quotes]}):
                ids = make_workload(reader, 1, context, None, config.seed).chunks[0]
                yield _drafts(reader, ids, n, quotes, {**labels, "answer": _KINDS[quotes]})


def run_ours(adapter: DecoderModel, done: PassResult, length: int, n: int) -> Timed:
    """Our loop over a prefilled cache; what it holds after `length` is overwritten each time."""
    clock = Clock(adapter.device)
    tokens = generate(adapter, done.cache, length, done.logits, DecodeConfig(max_new_tokens=n), frozenset())
    ids, at = zip(*((token, clock.elapsed()) for token in tokens), strict=True)
    return ids, at


def run_generate(adapter: DecoderModel, ids: TokenIds, n: int) -> Timed:
    """transformers' generate, prompt included."""
    stamps = _Stamps(Clock(adapter.device))
    inputs = torch.tensor([ids], device=adapter.device)
    cast(Any, adapter.reference).generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=n,
        min_new_tokens=n,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        streamer=stamps,
    )
    return tuple(stamps.tokens), tuple(stamps.seconds)


class _Stamps:
    """A streamer for `generate`: notes when each token comes."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._prompt_seen = clock, False
        self.tokens: list[int] = []
        self.seconds: list[float] = []

    def put(self, tokens: Tensor) -> None:
        if self._prompt_seen:
            self.tokens.append(int(tokens))
            self.seconds.append(self._clock.elapsed())
        self._prompt_seen = True  # the prompt is streamed first

    def end(self) -> None:
        return


def prefilled(adapter: DecoderModel, ids: TokenIds, n: int) -> PassResult:
    """A full prefill whose cache has room for n new tokens."""
    prompt = Prompt((), (), ids)
    layout = lay_out(prompt)
    return run(blend_prefill(adapter, layout, BlendConfig(), n))


def agree(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Tokens that are equal before the first that differs: in bf16 two correct answers may part."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True))))


def _seconds(run: Timed) -> Metrics:
    at = run[1]
    return {"token_s": (at[-1] - at[0]) / (len(at) - 1), "first_s": at[0]}


def _steps(adapter: DecoderModel, context: int, n: int, labels: dict[str, Any]) -> Group:
    """After a context of random KV. On a CPU, where nothing is captured, the captured step itself runs."""
    cache = KVCache(adapter, context + EAGER_STEPS + 1 + n)
    with torch.inference_mode():
        for part in (cache.keys, cache.values):
            part.normal_(generator=torch.Generator(adapter.device).manual_seed(0))
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(adapter.vocab_size, (EAGER_STEPS + 1 + n,), generator=draw).tolist()
    capture: Capture = CudaGraph if adapter.device.type == "cuda" else _immediately
    logits: dict[str, Tensor] = {}
    caches = adapter, cache.keys[None], cache.values[None]
    makers = {
        LAUNCHED: lambda: Runner(*caches, context, 0),
        GRAPH: lambda: Runner(*caches, context, capture=capture),
    }

    def decode(name: str) -> Metrics:
        metrics, logits[name] = _run_steps(adapter, makers[name](), context, tokens)
        difference = (logits[name] - logits.get(LAUNCHED, logits[name])).abs().max() / logits[
            name
        ].abs().max()
        return {**metrics, "logit_difference": float(difference)}

    return Group(labels, [Case({"engine": name}, partial(decode, name)) for name in makers])


def _run_steps(
    adapter: DecoderModel, runner: Runner, context: int, tokens: list[int]
) -> tuple[dict[str, float], Tensor]:
    """All tokens after the context; the clock starts after the eager ones and the capture."""
    for i in range(EAGER_STEPS):
        runner.step(context + i, [tokens[i]])
    clock = Clock(adapter.device)
    began = clock.elapsed()
    runner.step(context + EAGER_STEPS, [tokens[EAGER_STEPS]])
    captured = clock.elapsed()
    for i in range(EAGER_STEPS + 1, len(tokens)):
        (logits,) = runner.step(context + i, [tokens[i]])
        int(logits.argmax())  # as a sampler waits for it
    token_s = (clock.elapsed() - captured) / (len(tokens) - EAGER_STEPS - 1)
    return {"token_s": token_s, "capture_s": captured - began}, logits.float().cpu()


_KINDS = {False: "sampled", True: "quotes"}


def _drafts(reader: LoadedModel, ids: TokenIds, n: int, quotes: bool, labels: dict[str, Any]) -> Group:
    """One answer, with and without drafts. Facts: its tokens, and how many of both are equal."""
    if quotes:
        ids = (*ids[:-QUOTED_AFTER], *ids[:QUOTED_AFTER])
    done = prefilled(reader.adapter, ids, n)
    answers: dict[str, Answer] = {}

    def decode(name: str) -> Metrics:
        options = DecodeConfig(max_new_tokens=n, drafts=name == DRAFTS, temperature=0.0 if quotes else 1.0)
        answers[name] = found = answer_of(reader, ids, done, options)
        timings = found.timings
        return {
            "token_s": timings.decode / max(1, len(found.token_ids) - 1),
            "tokens_per_pass": timings.tokens_per_pass,
        }

    def facts() -> dict[str, Any]:
        one, other = (answers[name].token_ids for name in (PLAIN, DRAFTS))
        return {"tokens": len(one), "tokens_equal": agree(one, other)}

    return Group(labels, [Case({"steps": name}, partial(decode, name)) for name in (PLAIN, DRAFTS)], facts)


def answer_of(reader: LoadedModel, ids: TokenIds, done: PassResult, decode: DecodeConfig) -> Answer:
    """The answer of a request whose prompt is prefilled; what its cache holds after that is overwritten."""
    prompt = Prompt((), (), ids)
    plan = Plan(prompt, (), BlendConfig(), decode, Clock(reader.adapter.device))
    full = plan_full_prefill(prompt, plan.blend)
    prefill = Prefilled(done, make_report(full, done), explain(full, done))
    sequence = Sequence(plan, reader, lambda _: _no_steps(prefill))
    runner = Runner.over(reader.adapter, done.cache, len(ids), decode.max_new_tokens)
    return AnswerStream(sequence, prefill, runner.step, runner.draft_room(1)).answer()


def _no_steps(done: Prefilled) -> Steps[Prefilled]:
    """A prefill that ran already."""
    yield from ()
    return done


def _immediately(work: Callable[[], Tensor], device: torch.device) -> Replayed:
    """In place of a capture where there is none."""
    return work


TABLE = table(
    "Decode",
    ms("ms per token", "token_s"),
    speedup("x transformers", "token_s", engine=TRANSFORMERS),
    speedup("x launched", "token_s", engine=LAUNCHED),
    speedup("x one token a pass", "token_s", steps=PLAIN),
    Column("tokens per pass", "tokens_per_pass", spread=False),
    ms("capture ms", "capture_s"),
    count("logits differ by", "logit_difference", digits=6),
)
TINY = {"contexts": (60,), "new_tokens": 6, "graphs": True, "drafts": True}
BENCH = Bench(DecodeBenchConfig, groups, (TABLE,), tiny=TINY)
