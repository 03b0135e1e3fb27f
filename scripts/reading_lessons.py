"""Lessons that teach a model to read: a few passages, and questions with short answers that these passages hold.

squad       paragraphs of one article and their questions (SQuAD, CC BY-SA 4.0)
multi_hop   the passages that one question needs among others (HotpotQA, CC BY-SA 4.0; MuSiQue, CC BY 4.0)
generated   films, directors and relatives of a new invented world (benchmarks/generate_world), never that of its SEED
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.generate_world import prose, questions, world
from blendserve.core import Passage

FILES = ("squad_5_articles.json", "hotpot_70.json", "musique_train_70.json")
SHARES = {"squad": 0.5, "multi_hop": 0.22, "generated": 0.28}
QUESTIONS = 6  # in a lesson, at most
CHARACTERS = (1_200, 3_600)  # of a lesson's passages: the limit is drawn between these
DIRECTORS = 2


class Lesson(NamedTuple):
    """Passages in the order of the prompt, and questions with one answer each."""

    passages: list[Passage]
    asked: list[tuple[str, str]]


class Lessons:
    """The n-th lesson is the same in every run."""

    def __init__(self, folder: Path) -> None:
        """Read FILES in `folder`. Raises OSError."""
        squad, hotpot, musique = (json.loads((folder / name).read_text("utf-8")) for name in FILES)
        self._articles = [article for article in squad if article["paragraphs"]]
        self._multi_hop = [*map(_of_hotpot, hotpot), *map(_of_musique, musique)]

    def __call__(self, n: int) -> Lesson:
        rng = random.Random(f"reading:{n}")
        makers: dict[str, Callable[[random.Random], Lesson]] = {
            "squad": self._article,
            "multi_hop": self._hops,
            "generated": _invented,
        }
        (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
        lesson = makers[kind](rng)
        rng.shuffle(lesson.passages)
        return lesson._replace(asked=rng.sample(lesson.asked, min(QUESTIONS, len(lesson.asked))))

    def _article(self, rng: random.Random) -> Lesson:
        (article,) = rng.choices(self._articles, [len(a["paragraphs"]) for a in self._articles])
        title, paragraphs = article["title"].replace("_", " "), list(article["paragraphs"])
        rng.shuffle(paragraphs)
        passages = _cut([], [Passage(p["context"], title) for p in paragraphs], rng)
        asked = [
            (q["question"], min(q["answers"], key=len))
            for paragraph in paragraphs[: len(passages)]
            for q in paragraph["qas"]
            if q["answers"]
        ]
        return Lesson(passages, asked)

    def _hops(self, rng: random.Random) -> Lesson:
        needed, others, asked = rng.choice(self._multi_hop)
        return Lesson(_cut(needed, rng.sample(others, len(others)), rng), [asked])


def _cut(needed: Sequence[Passage], others: Sequence[Passage], rng: random.Random) -> list[Passage]:
    """The needed passages and as many of the others, in their order, as a drawn limit allows; at least one."""
    passages, limit = list(needed), rng.randint(*CHARACTERS)
    for other in others:
        if passages and sum(len(p.text) for p in (*passages, other)) > limit:
            break
        passages.append(other)
    return passages


def _of_hotpot(record: dict[str, Any]) -> tuple[list[Passage], list[Passage], tuple[str, str]]:
    """Needed passages, other passages, and the question with its answer."""
    titles = {title for title, _ in record["supporting_facts"]}
    passages = [Passage("".join(sentences), title) for title, sentences in record["context"]]
    needed, others = (
        [p for p in passages if (p.title in titles) == is_needed] for is_needed in (True, False)
    )
    return needed, others, (record["question"], record["answer"])


def _of_musique(record: dict[str, Any]) -> tuple[list[Passage], list[Passage], tuple[str, str]]:
    needed, others = (
        [Passage(p["text"], p["title"]) for p in record["ctxs"] if bool(p.get("supporting")) == is_needed]
        for is_needed in (True, False)
    )
    return needed, others, (record["question"], record["answers"][0])


def _invented(rng: random.Random) -> Lesson:
    """Two directors, a film and a relative of each; questions of each type that these passages answer."""
    whole = world.build(rng)
    directors = rng.sample(sorted({film.director for film in whole.films}), DIRECTORS)
    films = [rng.choice([f for f in whole.films if f.director == d]) for d in directors]
    kin = [[p for p in whole.people.values() if p.surname == d.surname and p != d] for d in directors]
    people = {p.name: p for p in (*directors, *(rng.choice(some) for some in kin if some))}
    texts = {f.name: prose.film_text(f, rng) for f in films}
    texts |= {
        p.name: prose.person_text(p, [f for f in whole.films if f.director == p], rng)
        for p in people.values()
    }
    by_type: dict[str, list[tuple[str, str]]] = {}
    for question in questions.ask(world.World(films, people, []), rng):
        by_type.setdefault(question.type, []).append((question.text, question.answers[0]))
    by_type["single"] = [
        (text.format(p.name), golds[0])
        for p in people.values()
        for _, text, _, golds in questions.asked_of(p)
    ]
    asked = [pair for pairs in by_type.values() for pair in rng.sample(pairs, min(2, len(pairs)))]
    return Lesson([Passage(text, title) for title, text in texts.items()], asked)
