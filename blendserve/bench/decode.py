"""`blendserve bench decode`: seconds per token after a long context, against transformers' `generate`.

Both decode greedily and the same number of tokens. The clock runs from the first token, which prefill gives, to the last.
--graphs: also without a CUDA graph, each step launched kernel by kernel. --drafts: the same answer with and without
prompt-lookup drafts, once for a prompt that ends in the context's first tokens, which the answer quotes, and once sampled
at temperature 1, which quotes little.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from typing import Any, cast

import torch
from pydantic import Field
from torch import Tensor

from blendserve.answer import Answer
from blendserve.bench.harness import Case, Column, Group, Metrics, SampleLog, ms, speedup, table
from blendserve.bench.runner import Bench, BenchConfig, open_model
from blendserve.bench.workload import check_room, make_workload
from blendserve.blend.blender import Prefilled
from blendserve.blend.layout import lay_out
from blendserve.blend.planner import plan_full_prefill
from blendserve.blend.prefill import PassResult, PrefillPlan, blend_prefill
from blendserve.config import BlendConfig, DecodeConfig, Positive
from blendserve.core import Prompt, Steps, TokenIds, run
from blendserve.engine.generate import AnswerStream, TokenSequence
from blendserve.engine.request import AnswerRules, PreparedRequest
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import LoadedModel
from blendserve.models.model import DecoderModel
from blendserve.models.runner import DecodeRunner
from blendserve.timing import Clock

TRANSFORMERS, OURS, LAUNCHED = "transformers", "blendserve", "blendserve, launched"
PLAIN, DRAFTS = "one token a pass", "drafts"
QUOTED = 64  # tokens of a quoting prompt's end that are its beginning, too
Timed = tuple[tuple[int, ...], tuple[float, ...]]  # tokens, and the seconds at which each was there


class DecodeBenchConfig(BenchConfig):
    """Tokens after a long context."""

    contexts: tuple[Positive, ...] = Field((3072,), description="Context lengths, in tokens.")
    new_tokens: int = Field(
        64, ge=2, description="Number of tokens to decode; the time from the first to the last is measured."
    )
    graphs: bool = Field(False, description="Measure decoding without a CUDA graph, too.")
    drafts: bool = Field(
        False,
        description="Compare decoding with prompt-lookup drafts, too, for answers that quote and others.",
    )


def groups(config: DecodeBenchConfig, log: SampleLog) -> Iterator[Group]:
    model = open_model(config, log)
    decoder = model.decoder
    n = config.new_tokens
    most = max(config.contexts)
    check_room(model, most + n, f"a context of {most:,} and {n:,} new tokens")
    for context in config.contexts:
        labels = {"context": context, "new_tokens": n}
        ids = make_workload(model, 1, context, None, config.seed).chunks[0]
        done = prefilled(decoder, ids, n)
        engines = {
            TRANSFORMERS: partial(run_generate, decoder, ids, n),
            OURS: partial(run_ours, decoder, done, context, n),
            LAUNCHED: partial(run_ours, decoder, done, context, n, launched=True),
        }
        shown = [name for name in engines if config.graphs or name != LAUNCHED]
        yield Group(
            labels,
            [Case({"engine": name}, partial(_metrics, engines[name])) for name in shown],
            lambda e=engines: {"tokens_agreeing": agree(e[TRANSFORMERS]()[0], e[OURS]()[0])},  # type: ignore[misc]
        )
        for quotes in (False, True) if config.drafts else ():
            yield _drafts(model, ids, n, quotes, labels)


def run_ours(decoder: DecoderModel, done: PassResult, length: int, n: int, launched: bool = False) -> Timed:
    """Our loop over a prefilled cache; the KV after `length` is overwritten each time. launched: without a graph."""
    clock = Clock(decoder.device)
    runner = DecodeRunner.over(decoder, done.cache, length, 0 if launched else n)
    tokens: list[int] = []
    seconds: list[float] = []
    logits = done.logits
    for at in range(length, length + n):
        if tokens:
            logits = runner.step(at - 1, tokens[-1:])[0]
        tokens.append(int(logits.argmax()))
        seconds.append(clock.elapsed())
    return tuple(tokens), tuple(seconds)


def run_generate(decoder: DecoderModel, ids: TokenIds, n: int) -> Timed:
    """transformers' generate, prompt included."""
    clock = Clock(decoder.device)
    seconds: list[float] = []

    def stamp(tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        """Called after each token; never stops."""
        seconds.append(clock.elapsed())
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

    inputs = torch.tensor([ids], device=decoder.device)
    options = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "stopping_criteria": [stamp]}
    lengths = {"max_new_tokens": n, "min_new_tokens": n, "attention_mask": torch.ones_like(inputs)}
    tokens = cast(Any, decoder.reference).generate(inputs, **lengths, **options)[0, len(ids) :]
    return tuple(tokens.tolist()), tuple(seconds)


def prefilled(decoder: DecoderModel, ids: TokenIds, n: int) -> PassResult:
    """A full prefill whose cache has room for n new tokens."""
    cache = KVCache(decoder, len(ids) + n)
    return run(blend_prefill(decoder, PrefillPlan.of(lay_out(Prompt((), (), ids)), BlendConfig()), cache))


def agree(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Tokens that are equal before the first that differs: in bf16 two correct answers may part."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True))))


def token_s(at: tuple[float, ...]) -> float:
    """Mean seconds per token after the first."""
    return (at[-1] - at[0]) / (len(at) - 1)


def _metrics(decode: partial[Timed]) -> Metrics:
    at = decode()[1]
    return {"token_s": token_s(at), "first_s": at[0]}


def _drafts(model: LoadedModel, ids: TokenIds, n: int, quotes: bool, labels: dict[str, int]) -> Group:
    """One answer, with and without drafts. Facts: its tokens, and how many of both are equal."""
    if quotes:
        ids = (*ids[:-QUOTED], *ids[:QUOTED])
    done = prefilled(model.decoder, ids, n)
    answers: dict[str, Answer] = {}

    def decode(name: str) -> Metrics:
        options = DecodeConfig(max_new_tokens=n, temperature=0.0 if quotes else 1.0)
        rules = AnswerRules(drafts=name == DRAFTS)
        answers[name] = answer = answer_of(model, ids, done, options, rules)
        seconds = answer.timings.decode / max(1, len(answer.token_ids) - 1)
        return {"token_s": seconds, "tokens_per_pass": answer.timings.tokens_per_pass}

    def facts() -> dict[str, int]:
        one, other = (answers[name].token_ids for name in (PLAIN, DRAFTS))
        return {"tokens": len(one), "tokens_equal": agree(one, other)}

    cases = [Case({"steps": name}, partial(decode, name)) for name in (PLAIN, DRAFTS)]
    return Group({**labels, "answer": "quotes" if quotes else "sampled"}, cases, facts)


def answer_of(
    model: LoadedModel, ids: TokenIds, done: PassResult, decode: DecodeConfig, rules: AnswerRules
) -> Answer:
    """The answer of a request whose prompt is prefilled; the KV after the prompt is overwritten."""
    prompt = Prompt((), (), ids)
    clock = Clock(model.decoder.device)
    request = PreparedRequest(prompt, (), BlendConfig(), decode, clock, rules=rules)
    prefill = Prefilled.of(plan_full_prefill(prompt, request.blend), done)

    def steps(_: TokenSequence) -> Steps[Prefilled]:
        yield from ()
        return prefill

    return AnswerStream(TokenSequence(request, model, steps)).answer()


TABLE = table(
    "Decode",
    ms("ms per token", "token_s"),
    speedup("x transformers", "token_s", engine=TRANSFORMERS),
    speedup("x launched", "token_s", engine=LAUNCHED),
    speedup("x one token a pass", "token_s", steps=PLAIN),
    Column("tokens per pass", "tokens_per_pass", spread=False),
)
TINY = {"contexts": (60,), "new_tokens": 6, "graphs": True, "drafts": True}
BENCH = Bench(DecodeBenchConfig, groups, (TABLE,), tiny=TINY)
