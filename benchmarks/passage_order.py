"""`python -m benchmarks passage_order`: what passages in the order of kept KV could save, at most; no model runs.

    best_last   by rising score
    cached      the best ones stay last; before them the beginning of a kept prompt, then what was sent most often
    any order   a bound: of those before the best ones, all that are anywhere in one kept prompt

Questions of a Zipf trace are sentences of the demo's passages. The passages that the demo's index finds for each are
sent. TTFT is what the cost model of this machine expects (blend/cost.py). A chunk right behind the engine's prefix is
exact in every order.

All is in favour of `cached`. Beginnings that prompts have in common are kept once. Retrieval and tokenising are left out.
What was blended is not exact, so a full prefill behind the answer must make what is kept: its time is shown beside TTFT.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import count as counter
from itertools import takewhile
from typing import NamedTuple, TypeAlias

import numpy as np
from pydantic import Field

from blendserve.bench.fixture import scratch
from blendserve.bench.harness import Case, Group, Metrics, SampleLog, count, ms, speedup, table
from blendserve.bench.runner import Bench, BenchConfig, open_model
from blendserve.blend.cost import CostModel, calibrated, chunk_work, count_work
from blendserve.blend.layout import suppose
from blendserve.blend.policies import START_RATIO, Policy, make_policy
from blendserve.config import BlendConfig, Positive, PromptConfig, RetrieveConfig
from blendserve.core import Chunk, Passage, Prompt
from blendserve.demo import CHARACTERS
from blendserve.engine.batch_engine import CONVERSATIONS
from blendserve.engine.documents import token_counter
from blendserve.engine.prompt import PromptBuilder, PromptFrame
from blendserve.retrieve import Embedder, VectorIndex, language_reference
from blendserve.retrieve.structure import sentences
from blendserve.simulate.workload import Zipf

BEST_LAST, CACHED, ANY_ORDER = "best_last", "cached", "any order"
UNLIMITED = 10**9  # MB
WORDS = 6  # of a question, at least


class OrderConfig(BenchConfig):
    """A trace of questions over the demo's index."""

    questions: Positive = Field(500, description="Number of questions.")
    zipf: float = Field(1.0, ge=0, description="Zipf exponent of the popularity of passages.")
    top_k: Positive = Field(RetrieveConfig().top_k, description="Number of passages to retrieve.")
    fixed: tuple[Positive, ...] = Field((1, 2), description="Numbers of best passages that stay last.")
    kept_mb: tuple[Positive, ...] = Field(
        (CONVERSATIONS // 10**6, UNLIMITED), description="Memory for the KV of kept prompts, in MB."
    )
    ratio: float = Field(START_RATIO, ge=0, le=1, description="Share of tokens to recompute.")
    characters: Positive = Field(CHARACTERS, description="Length of the demo's corpus, in characters.")


@dataclass(frozen=True)
class Question:
    """A question with the passages that were found for it."""

    frame: PromptFrame
    chunks: tuple[Chunk, ...]  # by rising score
    numbers: tuple[int, ...]  # of their passages


@dataclass(frozen=True)
class Sent:
    """A question's passages as they are sent, by number: those whose exact KV is kept come first."""

    exact: Sequence[int]
    others: Sequence[int]


class Kept:
    """Beginnings of earlier prompts, by their passages' numbers; at the cap the least recently used one is dropped."""

    def __init__(self, cap: float, n_tokens: Callable[[Iterable[int]], int]) -> None:
        """cap: in tokens. n_tokens: of passages."""
        self._cap, self._n_tokens = cap, n_tokens
        # with the tokens of their last passage; a beginning comes behind those that begin with it
        self._begun: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._n_sent = Counter[int]()

    def add(self, numbers: tuple[int, ...]) -> None:
        self._n_sent.update(numbers)
        for n in range(len(numbers), 0, -1):
            self._begun[numbers[:n]] = self._n_tokens(numbers[n - 1 : n])
            self._begun.move_to_end(numbers[:n])
        while sum(self._begun.values()) > self._cap:
            self._begun.popitem(last=False)

    def by_score(self, numbers: Sequence[int], fixed: int) -> Sent:
        """In the order given."""
        n = max((_n_common(kept, numbers) for kept in self._begun), default=0)
        return Sent(numbers[:n], numbers[n:])

    def by_kept(self, numbers: Sequence[int], fixed: int) -> Sent:
        """The last `fixed` ones stay last."""
        free, best = set(numbers[:-fixed]), numbers[-fixed:]
        head = self._largest([*takewhile(free.__contains__, kept)] for kept in self._begun)
        rest = sorted(free.difference(head), key=lambda n: (-self._n_sent[n], n))
        return self.by_score((*head, *rest, *best), fixed)

    def by_any(self, numbers: Sequence[int], fixed: int) -> Sent:
        """At least as many exact tokens as any order of all but the last `fixed` ones has."""
        free = numbers[:-fixed]
        exact = self._largest(_shared(kept, numbers, free) for kept in self._begun)
        return Sent(exact, [n for n in numbers if n not in exact])

    def _largest(self, found: Iterable[list[int]]) -> list[int]:
        return max(found, key=self._n_tokens, default=[])


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))])


def _shared(kept: Collection[int], numbers: Sequence[int], free: Sequence[int]) -> list[int]:
    """The passages that a prompt could have in common with the beginning of a kept one."""
    is_all = set(free) <= set(kept)
    return [n for n in (numbers if is_all else free) if n in kept]


ORDERS = {BEST_LAST: Kept.by_score, CACHED: Kept.by_kept, ANY_ORDER: Kept.by_any}


def groups(config: OrderConfig, log: SampleLog) -> Iterator[Group]:
    model, embedder = open_model(config, log), Embedder.load()
    prompts = PromptBuilder(model.tokenizer, PromptConfig())
    tokens = token_counter(model.name, str(model.decoder.dtype), model.fingerprint, prompts)
    documents = language_reference(limit=config.characters)
    size = RetrieveConfig().chunk_tokens
    with (
        scratch(config.folder) as folder,
        closing(VectorIndex.build(folder, embedder, tokens, documents, chunk_tokens=size)) as index,
    ):
        trace = Trace(config, index, prompts)
        costs = calibrated(model.decoder, model.fingerprint)
        log.note(costs=asdict(costs))
        policy = make_policy(BlendConfig(method="blend", ratio=config.ratio))
        estimate = partial(_estimate, policy, costs, model.decoder.n_layers)
        for kept_mb in config.kept_mb:
            cap = kept_mb * 1e6 / model.decoder.kv_bytes_per_token
            for fixed in config.fixed:
                cases = [
                    Case({"order": order}, partial(_replay, trace, order, fixed, cap, estimate, counter()))
                    for order in ORDERS
                ]
                kept = "all" if kept_mb == UNLIMITED else kept_mb
                yield Group({"kept MB": kept, "best ones last": fixed}, cases, warm_up=False)


class Trace:
    """Draws questions about the passages of an index."""

    def __init__(self, config: OrderConfig, index: VectorIndex, prompts: PromptBuilder) -> None:
        self._config, self._index, self._prompts = config, index, prompts
        self._passages = index.passages
        self._numbers = {passage.id: n for n, passage in enumerate(self._passages)}
        self._asked = [found for passage in self._passages if (found := _sentences(passage))]
        self._ask = cache(self._find)
        self.sizes = [len(prompts.chunk(passage)) for passage in self._passages]

    def draw(self, seed: int) -> list[Question]:
        """The questions of a trace: of a passage by Zipf's law, one of its sentences."""
        drawn = random.Random(seed)
        by_rank = drawn.sample(self._asked, len(self._asked))
        law = Zipf(len(by_rank), self._config.zipf)
        ranks = law.draw(np.random.default_rng(seed), self._config.questions)
        return [self._ask(drawn.choice(by_rank[rank])) for rank in ranks.tolist()]

    def _find(self, text: str) -> Question:
        found = self._index.search(text, self._config.top_k)[::-1]
        chunks = tuple(map(self._prompts.chunk, found))
        return Question(self._prompts.frame(text), chunks, tuple(self._numbers[p.id] for p in found))


def _sentences(passage: Passage) -> list[str]:
    found = [passage.text[start:stop].strip() for start, stop in sentences(passage.text)]
    return [text for text in found if len(text.split()) >= WORDS]


class Times(NamedTuple):
    """What the cost model expects of a question, in seconds."""

    ttft_s: float
    exact_s: float  # of a full prefill of the passages whose exact KV is not kept


Estimate: TypeAlias = Callable[[Question, Sent], Times]


def _estimate(policy: Policy, costs: CostModel, n_layers: int, question: Question, sent: Sent) -> Times:
    chunks = dict(zip(question.numbers, question.chunks, strict=True))
    n_kept = max(1, len(sent.exact))  # the first one is exact, kept or not
    order = [chunks[n] for n in (*sent.exact, *sent.others)]
    prefix = (*question.frame.prefix, *(i for chunk in order[:n_kept] for i in chunk.ids))
    prompt = Prompt(prefix, tuple(order[n_kept:]), question.frame.suffix)
    layout = suppose(prompt, range(len(prompt.chunks)), first_is_exact=False)
    blended = count_work(layout, policy, n_layers)
    exact = chunk_work(sum(map(len, prompt.chunks)), len(prefix))
    return Times(costs.seconds(blended), costs.seconds(exact))


def _replay(
    trace: Trace,
    order: str,
    fixed: int,
    cap: float,
    estimate: Estimate,
    seeds: Iterator[int],
) -> Metrics:
    """The next trace, from an empty memory on."""
    kept = Kept(cap, lambda numbers: sum(trace.sizes[n] for n in numbers))
    n_exact = n_tokens = 0
    ttft_s = exact_s = 0.0
    asked = trace.draw(next(seeds))
    for question in asked:
        sent = ORDERS[order](kept, question.numbers, fixed)
        times = estimate(question, sent)
        ttft_s += times.ttft_s
        exact_s += times.exact_s
        n_exact += sum(trace.sizes[n] for n in sent.exact)
        n_tokens += len(question.frame) + sum(map(len, question.chunks))
        kept.add((*sent.exact, *sent.others))
    n = len(asked)
    return {"exact": n_exact / n_tokens, "ttft_s": ttft_s / n, "exact_s": exact_s / n, "tokens": n_tokens / n}


TABLES = (
    table(
        "Orders of retrieved passages, estimated",
        count("tokens", "tokens"),
        count("share in a kept prefix", "exact", digits=3),
        ms("mean TTFT ms", "ttft_s"),
        speedup("times sooner than best_last", "ttft_s", order=BEST_LAST),
        ms("ms to make the others exact", "exact_s", spread=False),
    ),
)
TINY = {"questions": 6, "top_k": 2, "kept_mb": (1,), "fixed": (1,), "characters": 6000, "repeats": 1}
BENCH = Bench(OrderConfig, groups, TABLES, tiny=TINY)
