"""Ask hundreds of novel queries over a corpus ten times larger than the store may hold, and see that reuse lasts.

Chunks come into the store on demand, through the engine (write-back, LRU, TinyLFU). A query has six chunks, Zipf-
distributed, in shuffled order; no two queries have the same list, and all blocks have the same mix.

The warm-up ends with the block in which the store first evicted or refused a chunk. After it, neither hit rate nor gain
(row-layers of full prefill / row-layers run) falls by more than 5% below the best block so far.

    python -m tests.endurance.soak                  the bundled model: 5 to 8 minutes on two quiet cores
    python -m tests.endurance.soak --model tiny     a small random Llama that always blends: under a minute
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from blendserve.config import BlendConfig, Config, ModelConfig, StoreConfig
from blendserve.core import Passage
from blendserve.engine.engine import Engine
from blendserve.engine.prompt import PromptBuilder
from blendserve.fetch import open_store
from blendserve.models.loader import LoadedModel, load_model
from blendserve.retrieve import language_reference, split
from tests.endurance.driver import Figures, Promises, Workload, main
from tests.support.toy import toy_model

CHUNKS, CHUNK_TOKENS = 400, 128  # of the corpus; a chunk has 3/4 of these tokens at least
PER_QUERY = 6
LARGER = 10  # corpus / cap, in bytes of KV
FALL = 0.05
GOLDEN = (5**0.5 - 1) / 2  # steps of it cover a circle evenly
Query = tuple[int, ...]  # different chunks, 0 is the most popular


def corpus(model: LoadedModel, seed: int) -> tuple[list[Passage], int]:
    """Passages of real text that every Python has, in an order without meaning, and their tokens in all."""
    from pydoc_data.topics import topics

    prompts = PromptBuilder(model.tokenizer, Config().prompt)

    def tokens(passage: Passage) -> int:
        return len(prompts.chunk(passage))

    documents = language_reference(sorted(topics), limit=sum(map(len, topics.values())))
    passages = [passage for document in documents for passage in split(document, CHUNK_TOKENS, tokens)]
    filled = {prompts.chunk(p).ids: p for p in passages if tokens(p) >= 0.75 * CHUNK_TOKENS}
    drawn = random.Random(seed).sample(list(filled.values()), CHUNKS)
    return drawn, sum(map(tokens, drawn))


def zipf_blocks(chunks: int, blocks: int, queries: int, seed: int) -> Iterator[list[Query]]:
    """Blocks of one mix that can be compared. A chunk expected x times stands floor(x) or ceil(x) times in each.

    Systematic resampling: which chunks are rounded up changes from block to block.
    """
    dice, asked = random.Random(seed), set[Query]()
    sums, total = list(accumulate(1 / n for n in range(1, chunks + 1))), queries * PER_QUERY
    for n in range(blocks):
        ends = [int(n * GOLDEN % 1 + total * x / sums[-1]) for x in sums[:-1]]
        counts = [end - begin for begin, end in pairwise([0, *ends, total])]
        assert max(counts) <= queries, "too few queries in a block for its most popular chunk"
        cards = [chunk for chunk in dice.sample(range(chunks), chunks) for _ in range(counts[chunk])]
        hands = [cards[i::queries] for i in range(queries)]  # equal cards lie together: none twice in a hand
        for hand in hands:
            dice.shuffle(hand)
            while tuple(hand) in asked:
                dice.shuffle(hand)
            asked.add(tuple(hand))
        yield [tuple(hand) for hand in hands]


def reuse(model: LoadedModel, blocks: int, queries: int, method: str, seed: int) -> Workload:
    """Each part is a block of queries."""
    passages, tokens = corpus(model, seed)
    cap_bytes, found = tokens * model.decoder.kv_bytes_per_token // LARGER, list[Figures]()
    with tempfile.TemporaryDirectory() as folder:
        store = StoreConfig.model_validate({"codec": "raw", "cap_gb": cap_bytes / 1e9})
        config = Config(store=store, blend=BlendConfig.model_validate({"method": method}))
        with Engine(config, model, open_store(store, Path(folder) / "kv")) as engine:
            for n, block in enumerate(zipf_blocks(CHUNKS, blocks, queries, seed)):
                if (yield n, blocks):
                    break
                prompts = [[passages[chunk] for chunk in query] for query in block]
                found.append(ask_block(engine, prompts, n * len(block)))
            damaged = len(engine.store.verify().bad)
    return {"cap_bytes": cap_bytes, "damaged": damaged, "blocks": found}


def ask_block(engine: Engine, prompts: Sequence[Sequence[Passage]], first: int) -> Figures:
    """first: number of the first query."""
    before, reports, most = engine.store.stats(), [], 0
    for n, given in enumerate(prompts, start=first):
        question = f"Which rules do these passages state, and for what? (Query {n})"
        reports.append(engine.answer(question, given, max_new_tokens=1).report)
        most = max(most, engine.store.stats().bytes)
    tokens = sum(report.tokens_prompt for report in reports)
    return {
        "warm_up": not (before.evictions or before.admissions_refused),
        "hit_rate": round(sum(r.chunks_hit for r in reports) / sum(r.chunks for r in reports), 4),
        "gain": round(tokens / sum(r.cost * r.tokens_prompt for r in reports), 4),
        "reused": round(sum(r.tokens_reused for r in reports) / tokens, 4),
        "bytes_most": most,
    }


def judged(found: Figures) -> list[Figures]:
    """The blocks after the warm-up."""
    return [block for block in found["blocks"] if not block["warm_up"]]


def lasts(found: Figures, figure: str) -> bool:
    """Whether no block falls too far below the best one so far."""
    values = [block[figure] for block in judged(found)]
    return all(v >= (1 - FALL) * best for v, best in zip(values, accumulate(values, max), strict=True))


PROMISES: Promises = {
    "the store keeps its cap": lambda found: (
        max(b["bytes_most"] for b in found["blocks"]) <= found["cap_bytes"]
    ),
    "every chunk verifies": lambda found: not found["damaged"],
    "the hit rate lasts": lambda found: lasts(found, "hit_rate"),
    "the gain lasts": lambda found: lasts(found, "gain"),
    "every block reuses something": lambda found: all(block["reused"] for block in judged(found)),
    "two blocks after the warm-up": lambda found: len(judged(found)) > 1,
}


def make(model: str, queries: int, block: int, seed: int) -> Workload:
    is_tiny = model == "tiny"
    loaded = toy_model() if is_tiny else load_model(ModelConfig(name=model))
    return reuse(loaded, queries // block, block, "blend" if is_tiny else "auto", seed)


if __name__ == "__main__":
    sys.exit(main(make, PROMISES, model=ModelConfig().name, queries=500, block=50, seed=0))
