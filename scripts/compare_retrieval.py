"""Compare search by vectors, by words and by both on questions whose passages are known.

    python -m scripts.compare_retrieval [DATA ...] [--corpus FILE] [--limit N] [--names N] [--json]

DATA: question files of `blendserve evaluate` that name the passages which an answer needs: HotpotQA, 2WikiMultihopQA,
MuSiQue, SQuAD. CORPUS: of files that name titles only. --limit: most questions of each, spread over the file. --names N:
also N questions about names of the pages in docs/, such as settings and classes, which one or two passages have.

For each set: hit, recall and nDCG of the first six passages, and the differences to search by vectors, each with the
interval that holds 95% of its bootstrap distribution, and the number of questions that lose.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from blendserve.core import Document, Passage
from blendserve.errors import BlendserveError, CorpusError
from blendserve.evaluate import stats
from blendserve.evaluate.datasets import load
from blendserve.retrieve import Embedder, TokenCounter, VectorIndex, read_documents
from blendserve.retrieve.index import Candidates, fuse

K = 6  # passages
CHUNK_TOKENS = 512
METRICS = ("hit", "recall", "nDCG")
NAME = re.compile(r"\b[a-z]+(?:[._][a-z_]+)+\b|--[a-z]+(?:-[a-z]+)+|\b(?:[A-Z][a-z]+){2,}\b")
FORMS = ("What does {} do?", "Where is {} described?", "How is {} used?")
DOCS = Path(__file__).parents[1] / "docs"
# A passage's tokens are estimated: no language model is loaded.
TOKENS = TokenCounter("estimate", "4-characters", lambda passage: len(passage.title + passage.text) // 4)
Ranks = Mapping[str, Sequence[Passage]]


class Question(NamedTuple):
    """A question, and the ids of the passages that answer it."""

    text: str
    relevant: frozenset[str]


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("data", nargs="*")
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--names", type=int, default=0)
    parser.add_argument("--limit", type=int, default=150)
    parser.add_argument("--json", action="store_true", help="print one JSON object a set")
    options = parser.parse_args()
    if not options.data and not options.names:
        parser.error("give question files, or --names 80")
    embedder = Embedder.load()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.data:
            data = load(name, corpus=options.corpus)
            numbers = {(p.title, p.text): str(i) for i, p in enumerate(data.corpus)}
            documents = [Document(text, title, id) for (title, text), id in numbers.items()]
            index = VectorIndex.build(folder, embedder, TOKENS, documents, chunk_tokens=CHUNK_TOKENS)
            asked = [
                (e.question, {numbers[p.title, p.text] for p in e.contexts if p.title in e.supporting})
                for e in data.examples
            ]
            step = -(-len(asked) // options.limit)
            show(data.name, index, by_document(index, asked[::step]), options.json)
        if options.names:
            documents = [*read_documents(str(DOCS))]
            index = VectorIndex.build(folder, embedder, TOKENS, documents, chunk_tokens=CHUNK_TOKENS)
            show("names in docs/", index, about_names(index, options.names), options.json)
    return 0


def by_document(index: VectorIndex, asked: Sequence[tuple[str, set[str]]]) -> list[Question]:
    """Questions by the ids of the documents that they need; those without any are left out."""
    passages = index.passages
    found = [Question(text, frozenset(p.id for p in passages if p.doc_id in ids)) for text, ids in asked]
    return [question for question in found if question.relevant]


def about_names(index: VectorIndex, n: int) -> list[Question]:
    """Questions about names that one or two passages have, drawn by a fixed seed."""
    places: dict[str, set[str]] = {}
    for passage in index.passages:
        for name in NAME.findall(passage.text):
            places.setdefault(name, set()).add(passage.id)
    names = sorted(name for name, ids in places.items() if len(ids) <= 2)
    rng = random.Random(0)
    drawn = rng.sample(names, min(n, len(names)))
    return [Question(rng.choice(FORMS).format(name), frozenset(places[name])) for name in drawn]


def rankings(found: Candidates) -> Ranks:
    """The passages by vectors alone, by words alone, and by both as `search` has them."""
    by_words = sorted(found.by_words, key=lambda each: (-each[0], each[1].id))
    return {
        "vectors": found.near[:K],
        "words": [passage for _, passage in by_words[:K]],
        "both": fuse([found], K),
    }


def scores(found: Sequence[Passage], relevant: frozenset[str]) -> tuple[float, ...]:
    """The METRICS of the first K passages."""
    right = [passage.id in relevant for passage in found[:K]]
    gain = sum(1 / math.log2(rank + 2) for rank, is_right in enumerate(right) if is_right)
    ideal = sum(1 / math.log2(rank + 2) for rank in range(min(K, len(relevant))))
    return float(any(right)), sum(right) / len(relevant), gain / ideal


def measured(index: VectorIndex, questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
    """The mean of each metric by each method; of differences to search by vectors also how many questions lose."""
    values: dict[str, list[tuple[float, ...]]] = {}
    for question in questions:
        for method, found in rankings(index.candidates(question.text, K)).items():
            values.setdefault(method, []).append(scores(found, question.relevant))
    for at, metric in enumerate(METRICS):
        columns = {method: [each[at] for each in rows] for method, rows in values.items()}
        for method, column in columns.items():
            yield {"method": method, "metric": metric, **stats.mean(column)}
        for method in ("words", "both"):
            gains = [a - b for a, b in zip(columns[method], columns["vectors"], strict=True)]
            named = {"method": f"{method} - vectors", "metric": metric}
            yield {**named, **stats.mean(gains), "worse": sum(gain < 0 for gain in gains)}


def show(name: str, index: VectorIndex, questions: Sequence[Question], as_json: bool) -> None:
    """Print the results of a set. Raises CorpusError for one without a passage that is known to be needed."""
    if not questions:
        raise CorpusError(f"{name} names no passages that its answers need: give another data set", path=name)
    rows = [*measured(index, questions)]
    sizes = {"set": name, "passages": len(index), "questions": len(questions)}
    if as_json:
        print(json.dumps({**sizes, "results": rows}))
        return
    print(f"{name}: {sizes['passages']} passages, {sizes['questions']} questions")
    for row in rows:
        worse = f"  worse for {row['worse']}" if "worse" in row else ""
        interval = f"[{row['low']:+.3f}, {row['high']:+.3f}]"
        print(f"  {row['method']:<16} {row['metric']:>6}@{K} {row['mean']:+.3f} {interval}{worse}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BlendserveError as error:
        sys.exit(f"error: {error}")
