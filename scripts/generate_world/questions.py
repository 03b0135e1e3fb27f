"""Questions of 2WikiMultihopQA's four types over the world, each with its golds, evidence and ten passages.

comparison          two entities of a kind, one property of each
inference           a relation that no passage states, out of two that are stated (father's father)
compositional       a property of an entity that is only described (the director of a film)
bridge_comparison   two films, a property of the director of each
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import combinations
from typing import Any

from scripts.generate_world.prose import MONTHS, day, demonym
from scripts.generate_world.world import Film, Person, University, World

PER_TYPE = 60
CONTEXTS = 10

Triple = tuple[str, str, str]  # subject, relation, object
Entity = Film | Person | University


@dataclass(frozen=True, slots=True)
class Question:
    """`needed` are the entities whose passages answer it; `form` tells templates apart, to take them in equal shares."""

    type: str
    form: str
    text: str
    answers: tuple[str, ...]
    evidence: tuple[Triple, ...]
    needed: tuple[Entity, ...]


def ask(world: World, rng: random.Random) -> list[Question]:
    """PER_TYPE questions of each type, its forms in equal shares as far as they go, yes and no in equal shares."""
    chosen: list[Question] = []
    for make in (_comparisons, _inferences, _compositions, _bridges):
        chosen += _balanced(list(make(world)), PER_TYPE, rng)
    return chosen


def title_of(entity: Entity) -> str:
    return entity.title if isinstance(entity, Film) else entity.name


def contexts(question: Question, world: World, rng: random.Random) -> list[str]:
    """Titles of the needed passages among distractors of the same kinds, half of them look-alikes; shuffled."""
    pools: dict[type, list[Entity]] = {
        Film: list(world.films), Person: list(world.people.values()), University: list(world.universities),
    }  # fmt: skip
    chosen = list(question.needed)
    while len(chosen) < CONTEXTS:
        kind = type(rng.choice(question.needed))
        others = [entity for entity in pools[kind] if entity not in chosen]
        sample = rng.sample(others, rng.choice((1, min(10, len(others)))))
        chosen.append(max(sample, key=lambda entity: _likeness(entity, question.needed)))
    titles = [title_of(entity) for entity in chosen]
    rng.shuffle(titles)
    return titles


def _likeness(entity: Entity, needed: Sequence[Entity]) -> int:
    """Words of the name and countries in common with the entities that the question needs."""
    names = {word for other in needed for word in title_of(other).split()} - {"The", "University", "of"}
    lands = {_country(other) for other in needed}
    return len(names & set(title_of(entity).split())) + (_country(entity) in lands)


def _country(entity: Entity) -> str:
    return entity.city.country if isinstance(entity, University) else entity.country


def _balanced(pool: list[Question], n: int, rng: random.Random) -> list[Question]:
    """Round-robin over forms; within a form of yes-or-no questions, over the two answers."""
    rng.shuffle(pool)
    queues: dict[tuple[str, str], list[Question]] = {}
    for question in pool:
        answer = question.answers[0] if question.answers[0] in ("yes", "no") else ""
        queues.setdefault((question.form, answer), []).append(question)
    chosen: list[Question] = []
    while len(chosen) < n:
        for key in sorted(queues):
            if queues[key] and len(chosen) < n:
                chosen.append(queues[key].pop())
    return chosen


def _comparisons(world: World) -> Iterator[Question]:
    for a, b in combinations(world.people.values(), 2):
        born = _evidence("date of birth", a, b, lambda p: day(p.born))
        yield from _ordered("born first", "Who was born first, {} or {}?", a, b, a.born, b.born, born)
        if a.died and b.died:
            died = _evidence("date of death", a, b, lambda p: day(p.died))
            yield from _ordered("died first", "Who died first, {} or {}?", a, b, a.died, b.died, died)
        text = "Are {} and {} of the same nationality?"
        yield _same("nationality", text, a, b, a, b)
    for f, g in combinations(world.films, 2):
        out = _evidence("publication date", f, g, lambda x: day(x.released))
        yield from _ordered(
            "came first", "Which film came out first, {} or {}?", f, g, f.released, g.released, out
        )
        text = "Which film was released more recently, {} or {}?"
        yield from _ordered("came later", text, f, g, f.released, g.released, out)
    for u, v in combinations(world.universities, 2):
        begun = _evidence("inception", u, v, lambda x: str(x.founded))
        text = "Which was founded first, the {} or the {}?"
        yield from _ordered("founded first", text, u, v, date(u.founded, 1, 1), date(v.founded, 1, 1), begun)


def _inferences(world: World) -> Iterator[Question]:
    relations = (
        ("father", "father", "paternal grandfather"), ("father", "mother", "paternal grandmother"),
        ("mother", "father", "maternal grandfather"), ("mother", "mother", "maternal grandmother"),
        ("spouse", "father", "father-in-law"), ("spouse", "mother", "mother-in-law"),
    )  # fmt: skip
    for person in world.people.values():
        for step, then, relation in relations:
            between = world.people.get(getattr(person, step))
            if between:
                answer = str(getattr(between, then))
                evidence = (person.name, step, between.name), (between.name, then, answer)
                text = f"Who is the {relation} of {person.name}?"
                yield Question("inference", relation, text, (answer,), evidence, (person, between))


def _compositions(world: World) -> Iterator[Question]:
    for film in world.films:
        for form, text, relation, answers in asked_of(film.director):
            evidence = (
                (film.title, "director", film.director.name),
                (film.director.name, relation, answers[0]),
            )
            asked = text.format(f"the director of film {film.title}")
            yield Question(
                "compositional", f"director {form}", asked, answers, evidence, (film, film.director)
            )
    for person in world.people.values():
        for step in ("father", "mother", "spouse"):
            relative = world.people.get(getattr(person, step))
            if relative:
                for form, text, relation, answers in asked_of(relative):
                    if relation not in ("father", "mother", "spouse"):  # those would be inferences
                        evidence = (person.name, step, relative.name), (relative.name, relation, answers[0])
                        asked = text.format(f"{person.name}'s {step}")
                        yield Question(
                            "compositional", f"relative {form}", asked, answers, evidence, (person, relative)
                        )


def asked_of(p: Person) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """What can be asked of someone who is described: form, text, relation, golds."""
    yield "birthplace", "Where was {} born?", "place of birth", (p.birthplace.name,)
    yield "birth", "When was {} born?", "date of birth", _dates(p.born)
    yield (
        "country",
        "What is the nationality of {}?",
        "country of citizenship",
        (p.country, demonym(p.country)),
    )
    yield "university", "Where did {} study?", "educated at", (p.university.name,)
    yield "award", "Which award did {} receive?", "award received", (p.award,)
    yield "father", "Who is the father of {}?", "father", (p.father,)
    yield "mother", "Who is the mother of {}?", "mother", (p.mother,)
    yield "spouse", "Who is the spouse of {}?", "spouse", (p.spouse,)
    if p.died and p.deathplace:
        yield "deathplace", "Where did {} die?", "place of death", (p.deathplace.name,)
        yield "death", "When did {} die?", "date of death", _dates(p.died)


def _bridges(world: World) -> Iterator[Question]:
    for f, g in combinations(world.films, 2):
        a, b = f.director, g.director
        if a == b:
            continue
        led = (f.title, "director", a.name), (g.title, "director", b.name)
        asked = [
            _same(
                "country", "Do the directors of both films {} and {} have the same nationality?", f, g, a, b
            )
        ]
        for order in ("first", "later"):
            born = _evidence("date of birth", a, b, lambda p: day(p.born))
            text = f"Which film has the director who was born {order}, {{}} or {{}}?"
            asked += _ordered(f"born {order}", text, f, g, a.born, b.born, born)
            if a.died and b.died:
                died = _evidence("date of death", a, b, lambda p: day(p.died))
                text = f"Which film has the director who died {order}, {{}} or {{}}?"
                asked += _ordered(f"died {order}", text, f, g, a.died, b.died, died)
        for q in asked:
            yield replace(q, type="bridge_comparison", evidence=(*led, *q.evidence), needed=(f, g, a, b))


def _ordered(
    form: str, text: str, a: Entity, b: Entity, one: date, other: date, evidence: tuple[Triple, ...]
) -> Iterator[Question]:
    """Which of two comes first (or later, by the form's last word), unless they lie within two years."""
    if abs(one.year - other.year) > 2:
        first, last = (a, b) if one < other else (b, a)
        answer = title_of(first if form.endswith("first") else last)
        yield Question("comparison", form, text.format(title_of(a), title_of(b)), (answer,), evidence, (a, b))


def _same(form: str, text: str, a: Entity, b: Entity, one: Person, other: Person) -> Question:
    """Whether two people, asked after by way of a and b, are of one nationality."""
    evidence = _evidence("country of citizenship", one, other, lambda p: p.country)
    answer = "yes" if one.country == other.country else "no"
    return Question("comparison", form, text.format(title_of(a), title_of(b)), (answer,), evidence, (a, b))


def _evidence(relation: str, a: Entity, b: Entity, value: Callable[[Any], str]) -> tuple[Triple, Triple]:
    return (title_of(a), relation, value(a)), (title_of(b), relation, value(b))


def _dates(when: date) -> tuple[str, str]:
    return day(when), f"{MONTHS[when.month - 1]} {when.day}, {when.year}"
