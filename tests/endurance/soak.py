"""Ask hundreds of novel queries over a corpus ten times larger than the store may hold, and see that reuse lasts.

Nothing is precomputed but the prefix: chunks come into the store on demand, through the engine, as a user would have it
(write-back, LRU eviction, TinyLFU admission). A query has six chunks, Zipf-distributed, in shuffled order; no two queries
have the same list, and all blocks have the same mix (blendserve/evaluate/workload.py). Then the same queries are asked
again with admission off (store.admission=always), for contrast.

What must hold after warm-up, with admission on: no block's hit rate falls more than 5% below the best so far, nor its
gain, which is the TTFT ratio without a machine's noise (row-layers of full prefill / row-layers run); every block reuses
something. What must hold after every query, with admission on and off: the store is not above its cap, once full not
below it by a whole chunk, and its books say what its records say. At the end it verifies. Warm-up are the blocks up to
the one in which the store first evicted or refused a chunk; a run without two blocks after it has shown nothing, and
fails.

Measured TTFT stands beside it: on every tenth query, other methods prefill the same prompt just before, through a
read-only view of the store that leaves no trace in it. "full" is our own full prefill.

    python -m tests.endurance.soak                  the bundled reader: 10 to 15 minutes on two quiet cores
    python -m tests.endurance.soak --model tiny     a small random Llama that always blends: under a minute

Blocks go to stderr as they come. The last line of stdout is JSON; the exit code is 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from blendserve import console
from blendserve.config import BlendConfig, Config, ReaderConfig, StoreConfig, changed
from blendserve.core import BlendReport, Passage
from blendserve.engine.calibration import fit
from blendserve.engine.engine import Engine
from blendserve.engine.own_words import own_words
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import BlendserveError
from blendserve.evaluate.workload import Query, zipf_blocks
from blendserve.models.loader import Reader, load_reader
from blendserve.models.toy import toy_reader
from blendserve.registry import CODECS, parse_codec
from blendserve.retrieve import language_reference, split
from blendserve.store import StoreStats, open_store
from blendserve.store.codecs.base import Codec, known_codec

CHUNKS, CHUNK_TOKENS = 400, 128  # of the corpus; a chunk has at most so many tokens, and at least 3/4 of them
PER_QUERY = 6
FIT_TOKENS = 4_000  # that a codec's tables are fitted on, where it needs some
LARGER = 10  # corpus / cap, in bytes of KV
SAMPLE = 10  # one query in so many is also prefilled by the methods that it is compared with
FALL = 0.05
FIGURES = ("hit_rate", "gain")  # what may not fall


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked, and of how small a store."""

    passages: tuple[Passage, ...]  # most popular first
    sizes: tuple[int, ...]  # bytes of KV of each
    blocks: list[list[Query]]

    @property
    def cap_bytes(self) -> int:
        return sum(self.sizes) // LARGER

    def to_dict(self) -> dict[str, Any]:
        """Its figures; `hit_rate_of_the_best` is of a store that holds the most popular chunks from the start."""
        draws = Counter(chunk for block in self.blocks for query in block for chunk in query)
        fit = sum(reached <= self.cap_bytes for reached in accumulate(self.sizes))
        return {
            "chunks": len(self.passages),
            "chunks_asked_for": len(draws),
            "corpus_bytes": sum(self.sizes),
            "cap_bytes": self.cap_bytes,
            "hit_rate_of_the_best": round(sum(draws[chunk] for chunk in range(fit)) / draws.total(), 4),
        }


def workload(reader: Reader, blocks: int, queries: int, seed: int) -> Workload:
    """So many blocks of so many queries over real text that every Python carries, in an order that means nothing."""
    from pydoc_data.topics import topics

    prompts = PromptBuilder(reader.tokenizer, Config().prompt)

    def tokens(passage: Passage) -> int:
        return len(prompts.chunk(passage))

    documents = language_reference(sorted(topics), limit=sum(map(len, topics.values())))
    passages = [passage for document in documents for passage in split(document, CHUNK_TOKENS, tokens)]
    filled = {prompts.chunk(p).ids: p for p in passages if tokens(p) >= 0.75 * CHUNK_TOKENS}
    drawn = tuple(random.Random(seed).sample(list(filled.values()), CHUNKS))
    sizes = tuple(tokens(p) * reader.adapter.kv_bytes_per_token for p in drawn)
    return Workload(drawn, sizes, zipf_blocks(CHUNKS, blocks, queries, PER_QUERY, seed))


@dataclass(frozen=True, slots=True)
class Asked:
    """One query."""

    report: BlendReport
    ttft: float  # seconds
    after: float  # seconds of write-back, behind the answer
    others: dict[str, float]  # TTFT of other methods on the same prompt, where sampled
    booked: int  # bytes in the store after it, by its books
    held: int  # ... by its records


@dataclass(frozen=True, slots=True)
class Spread:
    """Of noisy measurements."""

    median: float
    least: float
    most: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        median, least, most = (round(v, 3) for v in (statistics.median(values), min(values), max(values)))
        return cls(median, least, most, len(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f}-{self.most:.2f})"


@dataclass(frozen=True, slots=True)
class Block:
    """The figures of a block of queries."""

    warm_up: bool
    hit_rate: float  # of chunks looked for
    gain: float  # row-layers of full prefill / row-layers run
    reused: float  # share of the prompts' tokens
    methods: dict[str, int]  # what was done, and how often
    ttft_ms: Spread
    ratios: dict[str, Spread]  # TTFT of full prefill / of this method, measured on the sampled prompts
    after_ms: float  # mean of write-back
    bytes_most: int  # in the store after any of the queries
    file_bytes: int  # of data.mdb
    chunks: int  # in the store
    evictions: int
    refused: int
    above_cap: int  # queries after which the store was above its cap
    below_cap: int  # queries after which there was room for the largest chunk
    wrong_books: int  # queries after which books and records differed


def sum_up(
    asked: Sequence[Asked],
    method: str,
    before: StoreStats,
    after: StoreStats,
    file_bytes: int,
    largest: int,
) -> Block:
    """A block's figures, from its queries, the store's counters at both ends, and the bytes of the largest chunk."""
    reports = [one.report for one in asked]
    tokens = sum(report.tokens_prompt for report in reports)
    sampled = [{**one.others, method: one.ttft} for one in asked if one.others]
    rivals = sorted({name for times in sampled for name in times} - {"full"})
    (evicted, refused), (evicted_now, refused_now) = map(_pressure, (before, after))
    return Block(
        warm_up=not evicted + refused,
        hit_rate=round(sum(r.chunks_hit for r in reports) / sum(r.chunks for r in reports), 4),
        gain=round(tokens / sum(r.cost * r.tokens_prompt for r in reports), 4),
        reused=round(sum(r.tokens_reused for r in reports) / tokens, 4),
        methods=dict(Counter(r.method for r in reports)),
        ttft_ms=Spread.of([1e3 * one.ttft for one in asked]),
        ratios={name: Spread.of([times["full"] / times[name] for times in sampled]) for name in rivals},
        after_ms=round(1e3 * statistics.mean(one.after for one in asked), 3),
        bytes_most=max(one.held for one in asked),
        file_bytes=file_bytes,
        chunks=after.chunks,
        evictions=evicted_now - evicted,
        refused=refused_now - refused,
        above_cap=sum(max(one.held, one.booked) > after.cap_bytes for one in asked),
        below_cap=sum(after.cap_bytes - one.held >= largest for one in asked),
        wrong_books=sum(one.held != one.booked for one in asked),
    )


def _pressure(stats: StoreStats) -> tuple[int, int]:
    return stats.evictions or 0, stats.admissions_refused or 0


class Asker:
    """An engine on a store that fills on demand, and a view of the same store that leaves no trace in it."""

    def __init__(self, work: Workload, config: Config, reader: Reader, folder: Path) -> None:
        self.work, self.file = work, folder / "data.mdb"
        self.method = config.blend.method
        self.rivals = {"full", "blend"} - {self.method}
        self.engine = Engine(config, reader, open_store(config.store, folder))
        self.engine.precompute([])  # the prefix alone
        self.view = Engine(config, reader, open_store(config.store, folder, read_only=True))
        if self.method == "auto":
            self.engine.blender.calibrate(console.say)

    def block(self, queries: Sequence[Query], first: int, update: Callable[[int], None]) -> Block:
        """Ask these queries, which are numbered from `first`; `update(queries asked so far)`."""
        before, asked = self.engine.store.stats(), list[Asked]()
        for n, query in enumerate(queries, start=first):
            asked.append(self.ask(n, query))
            update(n + 1)
        after, file_bytes = self.engine.store.stats(), self.file.stat().st_size
        return sum_up(asked, self.method, before, after, file_bytes, max(self.work.sizes))

    def ask(self, n: int, query: Query) -> Asked:
        """One query, behind its rivals where it is sampled."""
        question = f"Which rules do these passages state, and for what? (Query {n})"
        given = [self.work.passages[chunk] for chunk in query]
        rivals = self.rivals if n % SAMPLE == SAMPLE // 2 else set[str]()
        others = {m: self.view.stream(question, given, method=m, max_new_tokens=1).ttft for m in rivals}
        began = time.perf_counter()
        answer = self.engine.answer(question, given, max_new_tokens=1)
        after = time.perf_counter() - began - answer.timings.ttft - answer.timings.decode
        booked = self.engine.store.stats().bytes
        return Asked(answer.report, answer.timings.ttft, after, others, booked, self._held())

    def _held(self) -> int:
        """Bytes in the store, counted from the chunks themselves."""
        keys = list(self.view.store.keys())
        with self.view.store.reading() as snapshot:
            return sum(view.n_bytes for key in keys if (view := snapshot.get(key)))

    def close(self) -> None:
        self.view.close()
        self.engine.close()


@dataclass(frozen=True, slots=True)
class Run:
    """All queries on one store."""

    admission: str
    method: str
    blocks: tuple[Block, ...]
    damaged: int  # chunks that do not verify at the end

    @property
    def judged(self) -> tuple[Block, ...]:
        """The blocks after warm-up."""
        return tuple(block for block in self.blocks if not block.warm_up)

    def fall(self, figure: str) -> float:
        """How far a block fell below the best so far, at worst."""
        values = [getattr(block, figure) for block in self.judged]
        bests = accumulate(values, max)
        return max((1 - value / best for value, best in zip(values, bests, strict=True) if best), default=0.0)

    def broken(self) -> list[str]:
        """The promises that were not kept."""
        above = sum(block.above_cap for block in self.blocks)
        below = sum(block.below_cap for block in self.judged)
        books = sum(block.wrong_books for block in self.blocks)
        wrong = [f"the store was above its cap after {above} queries"] if above else []
        wrong += [f"the store had room to spare after {below} queries"] if below else []
        wrong += [f"its books and its records differed after {books} queries"] if books else []
        wrong += [f"{self.damaged} chunks do not verify at the end"] if self.damaged else []
        wrong += self._decay() if self.admission == "tinylfu" else []
        return [f"admission {self.admission}: {what}" for what in wrong]

    def _decay(self) -> list[str]:
        idle = sum(not block.reused for block in self.judged)
        wrong = [f"{name} fell by {self.fall(name):.1%}" for name in FIGURES if self.fall(name) > FALL]
        wrong += [f"{idle} blocks reused nothing"] if idle else []
        return wrong + (["fewer than two blocks after warm-up"] if len(self.judged) < 2 else [])

    def to_dict(self) -> dict[str, Any]:
        falls = {f"worst_fall_of_{name}": round(self.fall(name), 4) for name in FIGURES}
        return {**falls, "warm_up_blocks": len(self.blocks) - len(self.judged), **asdict(self)}


def run(work: Workload, reader: Reader, method: str, admission: str, codec: str = CODECS.default) -> Run:
    """Ask all queries of a fresh store, whose cap is as many chunks in any codec."""
    store = StoreConfig(**{"eviction": "lru", "admission": admission, "codec": codec})
    config = Config(store=store, blend=BlendConfig(**{"method": method}))
    total, made = sum(map(len, work.blocks)), list[Block]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "kv"
        cap = codec_of(config, reader, folder).expected_bytes(work.cap_bytes)
        config = changed(config, store=changed(store, cap_gb=cap / 1e9))
        asker = stack.enter_context(closing(Asker(work, config, reader, folder)))
        update = stack.enter_context(console.progress(f"Admission {admission}", "queries"))
        for block in work.blocks:
            made.append(asker.block(block, len(made) * len(block), lambda done: update(done, total)))
            figures = ", ".join(f"{name} {value}" for name, value in row(made[-1]).items())
            console.say(f"Admission {admission}, block {len(made)}: {figures}")
        return Run(admission, method, tuple(made), len(asker.engine.store.verify().bad))


def codec_of(config: Config, reader: Reader, folder: Path) -> Codec:
    """What the store in this folder writes with; tables that it needs are fitted, and kept there."""
    name, level = parse_codec(config.store.codec)
    made: type[Codec] = CODECS.load(name)
    if not made.needs_tables:
        return made.with_tables(level)
    prompts = PromptBuilder(reader.tokenizer, config.prompt)
    with open_store(config.store, folder) as store:
        hash = fit(name, own_words(reader, FIT_TOKENS), reader, prompts, store)
        return made.with_tables(level, store.tables(hash) or b"")


def row(block: Block) -> dict[str, str]:
    """A block as a line of the table."""
    return {
        "hit rate": f"{block.hit_rate:.1%}",
        "gain": f"{block.gain:.2f}",
        "reused": f"{block.reused:.1%}",
        "TTFT ms": f"{block.ttft_ms.median:.0f}",
        **{f"full / {name}": str(spread) for name, spread in block.ratios.items()},
        "evicted": str(block.evictions),
        "refused": str(block.refused),
        "MB": f"{block.bytes_most / 1e6:.1f}",
    }


def show(one: Run) -> None:
    """A run as a table."""
    falls = ", ".join(f"{name} {one.fall(name):.1%}" for name in FIGURES)
    names = [f"{n}{' (warm-up)' if block.warm_up else ''}" for n, block in enumerate(one.blocks, start=1)]
    rows = [(name, *row(block).values()) for name, block in zip(names, one.blocks, strict=True)]
    columns = ("block", *row(one.blocks[0]))
    console.table(f"Admission {one.admission}; worst fall: {falls}", columns, rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default=ReaderConfig().model, help="`tiny`, a bundled name, a folder or a hub id"
    )
    parser.add_argument("--method", help="default: auto; for `tiny`, blend")
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--block", type=int, default=50, help="queries a block")
    parser.add_argument("--seed", type=int, default=0)
    here = [name for name in CODECS.names if known_codec(name)]
    parser.add_argument("--codec", choices=here, default=CODECS.default, help="how the store is coded")
    parser.add_argument("--json", action="store_true", help="the JSON line alone, without the tables")
    asked = parser.parse_args()
    if asked.queries < asked.block or asked.queries % asked.block:
        parser.error(f"--queries {asked.queries} is not a number of blocks of --block {asked.block}")
    asked.method = asked.method or ("blend" if asked.model == "tiny" else "auto")
    return asked


def main() -> int:
    asked, began = arguments(), time.perf_counter()
    try:
        reader = toy_reader() if asked.model == "tiny" else load_reader(ReaderConfig(model=asked.model))
        work = workload(reader, asked.queries // asked.block, asked.block, asked.seed)
        console.say(json.dumps(work.to_dict()))
        runs = [
            run(work, reader, asked.method, admission, asked.codec) for admission in ("tinylfu", "always")
        ]
    except BlendserveError as error:
        console.say(f"Error: {error}")
        return 2
    if not asked.json:
        for one in runs:
            show(one)
    broken = [what for one in runs for what in one.broken()]
    results = {"runs": [one.to_dict() for one in runs], "broken": broken}
    seconds = round(time.perf_counter() - began, 1)
    settings = {name: value for name, value in vars(asked).items() if name != "json"}
    console.print_json({**settings, "seconds": seconds, **work.to_dict(), **results})
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
