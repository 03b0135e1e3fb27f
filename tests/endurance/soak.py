"""Ask hundreds of novel queries over a corpus ten times larger than the store may hold, and see that reuse lasts.

Only the prefix is precomputed: chunks come into the store on demand, through the engine (write-back, LRU, TinyLFU). A
query has six chunks, Zipf-distributed, in shuffled order; no two queries have the same list, and all blocks have the
same mix (blendserve/evaluate/workload.py). The same queries are asked again without admission, for contrast.

The warm-up ends with the block in which the store first evicted or refused a chunk. After it, with admission, neither hit
rate nor gain (row-layers of full prefill / row-layers run) falls by more than 5% below the best block so far.

    python -m tests.endurance.soak                  the bundled reader: 10 to 15 minutes on two quiet cores
    python -m tests.endurance.soak --model tiny     a small random Llama that always blends: under a minute
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from blendserve.config import BlendConfig, Config, ReaderConfig, StoreConfig
from blendserve.core import Passage
from blendserve.engine.engine import Engine
from blendserve.engine.prompt import PromptBuilder
from blendserve.evaluate.workload import Query, zipf_blocks
from blendserve.models.loader import Reader, load_reader
from blendserve.models.toy import toy_reader
from blendserve.retrieve import language_reference, split
from blendserve.store import KVStore, open_store
from tests.endurance.driver import Figures, Promises, main

CHUNKS, CHUNK_TOKENS = 400, 128  # of the corpus; a chunk has 3/4 of these tokens at least
PER_QUERY = 6
LARGER = 10  # corpus / cap, in bytes of KV
FALL = 0.05


@dataclass(frozen=True)
class Corpus:
    """The passages, the most popular first, and the queries as lists of their numbers."""

    passages: tuple[Passage, ...]
    sizes: tuple[int, ...]  # bytes of KV of each
    blocks: list[list[Query]]

    @property
    def cap_bytes(self) -> int:
        return sum(self.sizes) // LARGER

    @classmethod
    def make(cls, reader: Reader, blocks: int, queries: int, seed: int) -> Corpus:
        """Blocks of queries over real text that every Python has, in an order without meaning."""
        from pydoc_data.topics import topics

        prompts = PromptBuilder(reader.tokenizer, Config().prompt)

        def tokens(passage: Passage) -> int:
            return len(prompts.chunk(passage))

        documents = language_reference(sorted(topics), limit=sum(map(len, topics.values())))
        passages = [passage for document in documents for passage in split(document, CHUNK_TOKENS, tokens)]
        filled = {prompts.chunk(p).ids: p for p in passages if tokens(p) >= 0.75 * CHUNK_TOKENS}
        drawn = tuple(random.Random(seed).sample(list(filled.values()), CHUNKS))
        sizes = tuple(tokens(p) * reader.adapter.kv_bytes_per_token for p in drawn)
        return cls(drawn, sizes, zipf_blocks(CHUNKS, blocks, queries, PER_QUERY, seed))


class Reuse:
    """Each step is a block of queries; after the last block, they begin again on a fresh store without admission."""

    def __init__(self, reader: Reader, corpus: Corpus, method: str) -> None:
        self.reader, self.corpus, self.method = reader, corpus, method
        self.runs: dict[str, list[Figures]] = {"tinylfu": [], "always": []}
        self.damaged, self._steps = 0, self._blocks()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._steps.close()

    def step(self) -> tuple[int, int]:
        return next(self._steps)

    def figures(self) -> Figures:
        self._steps.close()
        return {"cap_bytes": self.corpus.cap_bytes, "damaged": self.damaged, "runs": self.runs}

    def _blocks(self) -> Generator[tuple[int, int], None, None]:
        done, total = 0, len(self.runs) * len(self.corpus.blocks)
        for admission, blocks in self.runs.items():
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "kv"
                config = StoreConfig.model_validate(
                    {"admission": admission, "codec": "raw", "cap_gb": self.corpus.cap_bytes / 1e9}
                )
                blend = BlendConfig.model_validate({"method": self.method})
                engine = Engine(Config(store=config, blend=blend), self.reader, open_store(config, folder))
                stack.enter_context(engine)
                engine.precompute([])  # the prefix alone
                view = stack.enter_context(open_store(config, folder, read_only=True))
                try:
                    for queries in self.corpus.blocks:
                        blocks.append(self._block(engine, view, queries, done * len(queries)))
                        done += 1
                        yield done, total
                finally:
                    self.damaged += len(engine.store.verify().bad)

    def _block(self, engine: Engine, view: KVStore, queries: Sequence[Query], first: int) -> Figures:
        before, reports, sizes = engine.store.stats(), [], []
        for n, query in enumerate(queries, start=first):
            question = f"Which rules do these passages state, and for what? (Query {n})"
            given = [self.corpus.passages[chunk] for chunk in query]
            reports.append(engine.answer(question, given, max_new_tokens=1).report)
            sizes.append((bytes_in(view), engine.store.stats().bytes))
        after, cap = engine.store.stats(), self.corpus.cap_bytes
        tokens = sum(report.tokens_prompt for report in reports)
        return {
            "warm_up": not (before.evictions or before.admissions_refused),
            "hit_rate": round(sum(r.chunks_hit for r in reports) / sum(r.chunks for r in reports), 4),
            "gain": round(tokens / sum(r.cost * r.tokens_prompt for r in reports), 4),
            "reused": round(sum(r.tokens_reused for r in reports) / tokens, 4),
            "refused": (after.admissions_refused or 0) - (before.admissions_refused or 0),
            "bytes_most": max(max(both) for both in sizes),
            "bytes_least": min(held for held, _ in sizes),
            "above_cap": sum(max(both) > cap for both in sizes),
            "below_cap": sum(cap - held >= max(self.corpus.sizes) for held, _ in sizes),  # room for any chunk
            "wrong_books": sum(held != booked for held, booked in sizes),
        }


def bytes_in(store: KVStore) -> int:
    """Counted from the chunks themselves."""
    keys = list(store.keys())
    with store.reading() as snapshot:
        return sum(view.n_bytes for key in keys if (view := snapshot.get(key)))


def every(found: Figures) -> Iterator[Figures]:
    for blocks in found["runs"].values():
        yield from blocks


def judged(found: Figures, admission: str = "tinylfu") -> list[Figures]:
    """The blocks after the warm-up."""
    return [block for block in found["runs"][admission] if not block["warm_up"]]


def lasts(found: Figures, figure: str) -> bool:
    """Whether no block falls too far below the best one so far."""
    values = [block[figure] for block in judged(found)]
    return all(v >= (1 - FALL) * best for v, best in zip(values, accumulate(values, max), strict=True))


PROMISES: Promises = {
    "the store keeps its cap": lambda found: not any(block["above_cap"] for block in every(found)),
    "a full store stays full": lambda found: (
        not any(block["below_cap"] for admission in found["runs"] for block in judged(found, admission))
    ),
    "books and records agree": lambda found: not any(block["wrong_books"] for block in every(found)),
    "every chunk verifies": lambda found: not found["damaged"],
    "the hit rate lasts": lambda found: lasts(found, "hit_rate"),
    "the gain lasts": lambda found: lasts(found, "gain"),
    "every block reuses something": lambda found: all(block["reused"] for block in judged(found)),
    "two blocks after the warm-up": lambda found: len(judged(found)) > 1,
}


def make(model: str, queries: int, block: int, seed: int) -> Reuse:
    is_tiny = model == "tiny"
    reader = toy_reader() if is_tiny else load_reader(ReaderConfig(model=model))
    return Reuse(reader, Corpus.make(reader, queries // block, block, seed), "blend" if is_tiny else "auto")


if __name__ == "__main__":
    sys.exit(main(make, PROMISES, model=ReaderConfig().model, queries=500, block=50, seed=0))
