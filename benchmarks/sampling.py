"""`python -m benchmarks sampling`: seconds of choosing a token from a large vocabulary, by rule and by grammar.

Each rule chooses from the same logits: `sharp` ones, as after a prompt, and `flat` ones, whose nucleus is much of the
vocabulary. `sorted` sorts all of it, as a simple sampler does. A grammar costs a token what it costs beyond greedy
choice; its tokenizer is the model's, with pairs of its tokens as further ones. Then several requests decode at once, with
a grammar and without: both are as long, and their rate is what the third table compares. The last one is the time to
first token of a prompt that comes while another request decodes, with the log probabilities of every token or without.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Sized
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import tokenizers
import torch
from pydantic import Field

from blendserve.bench.harness import Case, Column, Group, Metrics, SampleLog, ms, ratio, table
from blendserve.bench.runner import Bench, BenchConfig, open_model
from blendserve.bench.workload import make_workload
from blendserve.config import BlendConfig, Config, DecodeConfig, Positive, ServeConfig
from blendserve.core import Prompt, TokenIds
from blendserve.engine.batch_engine import BatchEngine
from blendserve.engine.engine import Engine
from blendserve.engine.generate import TokenSequence
from blendserve.engine.grammar import Grammar, Guide
from blendserve.engine.request import AnswerRules, Completed, Event, Failed, PreparedRequest
from blendserve.engine.sampler import Sampler, draw, logprob_of
from blendserve.models.loader import LoadedModel
from blendserve.serve.metrics import Metrics as ServerMetrics
from blendserve.store import MemoryStore
from blendserve.timing import Clock

SHAPES = {"sharp": 4.0, "flat": 0.5}  # standard deviation of the logits
RECORDS: dict[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array"}},
        "required": ["name", "age", "tags"],
    },
}
EXAMPLE = '[{"name":"Ada Lovelace","age":36,"tags":["mathematics","engines"]},{"name":"Alan Turing","age":41,"tags":['
FREE, GUIDED = "none", "JSON schema"
NEIGHBOUR = 512  # tokens of the answer that a request decodes beside another's prompt


class SamplingConfig(BenchConfig):
    """Choosing tokens."""

    vocabulary: Positive = Field(151_936, description="Number of tokens to choose from.")
    tokens: Positive = Field(50, description="Number of tokens that a rule chooses in one measurement.")
    requests: Positive = Field(8, description="Number of requests that decode at once.")
    new_tokens: Positive = Field(64, description="Length of each request's answer, in tokens.")
    prompt: Positive = Field(
        1024, description="Length of the prompt whose first token is awaited, in tokens."
    )


def groups(config: SamplingConfig, log: SampleLog) -> Iterator[Group]:
    model = open_model(config, log)
    generator = torch.Generator().manual_seed(config.seed)
    for name, width in SHAPES.items():
        logits = torch.randn(config.vocabulary, generator=generator) * width
        cases = [
            Case({"rule": rule}, partial(timed, choose, logits, config.tokens))
            for rule, choose in rules(config).items()
        ]
        yield Group({"logits": name, "vocabulary": config.vocabulary}, cases)
    if not isinstance(model.tokenizer, Sized):
        return  # a model of random weights, whose tokens no grammar can read
    wide = replace(model, tokenizer=wide_tokenizer(model.tokenizer, config.vocabulary, config.seed))
    grammar = Grammar.of_json(RECORDS)
    cases = [
        Case({"grammar": name}, partial(write_example, wide, guide, config.vocabulary))
        for name, guide in ((FREE, None), (GUIDED, grammar))
    ]
    yield Group({"tokenizer": len(wide.tokenizer)}, cases)
    yield from serving(config, model, grammar)


def rules(config: SamplingConfig) -> dict[str, Callable[[torch.Tensor], object]]:
    """What chooses a token, by the name of the rule."""
    sampled = DecodeConfig(temperature=1.0, seed=config.seed)
    nucleus = sampled.with_values(top_p=0.95)
    seed = torch.Generator().manual_seed(config.seed)
    penalised = Sampler(DecodeConfig(), AnswerRules(presence_penalty=1.0))

    def by_sorting(logits: torch.Tensor) -> int:
        ranked, order = torch.softmax(logits, dim=-1).sort(descending=True)
        kept = ranked[(ranked.cumsum(0) - ranked) < nucleus.top_p]
        return int(order[draw(kept, seed)])

    return {
        "greedy": Sampler(DecodeConfig()),
        "temperature": Sampler(sampled),
        "top_k 20": Sampler(sampled, AnswerRules(top_k=20)),
        "min_p 0.05": Sampler(sampled, AnswerRules(min_p=0.05)),
        "top_p 0.95": Sampler(nucleus),
        "top_p 0.95, top_k 20": Sampler(nucleus, AnswerRules(top_k=20)),
        "presence_penalty": penalised,
        "20 logprobs": lambda logits: logprob_of(logits, 0, 20),
        "top_p 0.95, sorted": by_sorting,
    }


def timed(choose: Callable[[torch.Tensor], object], logits: torch.Tensor, n: int) -> Metrics:
    """Seconds per token."""
    clock = Clock(logits.device)
    for _ in range(n):
        choose(logits)
    return {"token_s": clock.elapsed() / n}


class WideTokenizer:
    """As much of a tokenizer as grammars read."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend_tokenizer = backend

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()


def wide_tokenizer(tokenizer: Any, n: int, seed: int) -> WideTokenizer:
    """The tokenizer with pairs of its tokens as further ones, up to n tokens."""
    made = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary, merges = made["model"]["vocab"], made["model"]["merges"]
    known, numbers, rng = sorted(vocabulary), count(max(vocabulary.values()) + 1), random.Random(seed)
    while len(vocabulary) < n:
        pair = [rng.choice(known), rng.choice(known)]
        if "".join(pair) not in vocabulary:
            vocabulary["".join(pair)] = next(numbers)
            merges.append(pair)
    return WideTokenizer(tokenizers.Tokenizer.from_str(json.dumps(made)))


def write_example(model: LoadedModel, grammar: Grammar | None, n_vocabulary: int) -> Metrics:
    """Seconds per token of EXAMPLE, whose next token is the likeliest one; `mask_s` where it would not be allowed."""
    ids = model.tokenizer.backend_tokenizer.encode(EXAMPLE).ids
    logits = torch.zeros(max(n_vocabulary, len(model.tokenizer)))
    guide = None if grammar is None else Guide(grammar, model)
    sampler, chosen, mask_s, n = Sampler(DecodeConfig(), guide=guide), list[int](), 0.0, len(ids)
    clock = Clock(logits.device)
    for token in ids:
        logits[token] = 1
        chosen.append(sampler(logits))
        logits[token] = 0
    token_s = clock.elapsed() / n
    assert chosen == ids
    if grammar is not None:
        guide, clock = Guide(grammar, model), Clock(logits.device)
        for token in ids:
            guide.restrict(logits)
            guide.push(token)
        mask_s = clock.elapsed() / n
    return {"guided_s": token_s, **({"mask_s": mask_s} if mask_s else {})}


def serving(config: SamplingConfig, model: LoadedModel, grammar: Grammar) -> Iterator[Group]:
    """Requests that decode at once, all with a grammar or none."""
    short, long = (make_workload(model, 1, n, None, config.seed).chunks[0] for n in (64, config.prompt))
    slot_tokens = max(len(short) + 2 * config.new_tokens, len(long) + 1, len(short) + NEIGHBOUR)
    engine = Engine(Config(), model, MemoryStore(1 << 28))
    batch = BatchEngine(engine, ServerMetrics(), ServeConfig(slots=config.requests, slot_tokens=slot_tokens))
    rules = AnswerRules(ignores_end=True, drafts=False)
    batch.scheduler.start()
    try:
        cases = [
            Case({"grammar": name}, partial(rate, batch, short, config, replace(rules, grammar=guide)))
            for name, guide in ((FREE, None), (GUIDED, grammar))
        ]
        yield Group({"requests": config.requests, "new_tokens": config.new_tokens}, cases)
        cases = [
            Case({"neighbour": name}, partial(beside, batch, long, short, logprobs))
            for name, logprobs in ((FREE, None), ("20 logprobs", 20))
        ]
        yield Group({"prompt": config.prompt}, cases)
    finally:
        batch.scheduler.stop()


def beside(batch: BatchEngine, prompt: TokenIds, neighbour: TokenIds, logprobs: int | None) -> Metrics:
    """Seconds to the first token of `prompt` while `neighbour` decodes with so many log probabilities a token."""
    decodes, done = threading.Event(), threading.Event()
    rules = AnswerRules(ignores_end=True, logprobs=logprobs)
    other = asked(batch, neighbour, DecodeConfig(max_new_tokens=NEIGHBOUR), rules, lambda _: decodes.set())
    batch.scheduler.submit(other)
    decodes.wait()
    one = asked(
        batch,
        prompt,
        DecodeConfig(max_new_tokens=1),
        AnswerRules(),
        lambda event: done.set() if isinstance(event, Completed | Failed) else None,
    )
    clock = Clock()
    batch.scheduler.submit(one)
    done.wait()
    elapsed_s = clock.elapsed()
    assert one.answer is not None
    assert other.answer is None  # the neighbour decoded all the while
    batch.scheduler.cancel(other)
    return {"beside_ttft_s": elapsed_s}


def asked(
    batch: BatchEngine,
    ids: TokenIds,
    options: DecodeConfig,
    rules: AnswerRules,
    emit: Callable[[Event], None],
) -> TokenSequence:
    """A request for an answer to a plain prompt; `emit` is called with its events."""
    request = PreparedRequest(Prompt((), (), ids), (), BlendConfig(), options, Clock(), rules=rules)
    return batch.sequence(request, emit)


def rate(batch: BatchEngine, ids: TokenIds, config: SamplingConfig, answer: AnswerRules) -> Metrics:
    """Seconds per token of all answers together, from the first token of the last request on."""
    decode = DecodeConfig(max_new_tokens=config.new_tokens, temperature=1.0)
    left, ended, failures = [config.requests], threading.Event(), list[Exception]()

    def emit(event: Event) -> None:
        if isinstance(event, Failed):
            failures.append(event.error)
        if isinstance(event, Completed | Failed):
            left[0] -= 1
            if not left[0]:
                ended.set()

    options = [decode.with_values(seed=config.seed + i) for i in range(config.requests)]
    sequences = [asked(batch, ids, option, answer, emit) for option in options]
    clock = Clock()
    for sequence in sequences:
        batch.scheduler.submit(sequence)
    ended.wait()
    if failures:
        raise failures[0]
    elapsed_s = clock.elapsed()
    n_tokens = sum(len(sequence.answer.token_ids) for sequence in sequences if sequence.answer)
    return {"answers_token_s": elapsed_s / n_tokens}


TABLES = (
    table("Choosing a token", Column("us", "token_s", 1e6, 0), ratio("/ greedy", "token_s", rule="greedy")),
    table("Following a grammar", Column("us", "guided_s", 1e6, 0), Column("us by mask", "mask_s", 1e6, 0)),
    table(
        "Requests at once",
        ms("ms per token", "answers_token_s"),
        Column("throughput / none", "answers_token_s", baseline={"grammar": FREE}),
    ),
    table(
        "Beside another request",
        ms("TTFT ms", "beside_ttft_s"),
        ratio("/ none", "beside_ttft_s", neighbour=FREE),
    ),
)
TINY = {"vocabulary": 50_000, "tokens": 2, "requests": 2, "new_tokens": 3, "prompt": 64}
BENCH = Bench(SamplingConfig, groups, TABLES, tiny=TINY)
