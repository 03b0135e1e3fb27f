"""Questions of 2WikiMultihopQA's four types over the world, each with its golds, evidence and ten passages.

comparison          two entities of a kind, one property of each
inference           a relation that no passage states, out of two that are stated (father's father)
compositional       a property of an entity that is only described (the director of a film)
bridge_comparison   two films, a property of the director of each
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import combinations, product
from typing import NamedTuple

from benchmarks.generate_world.prose import day, demonym
from benchmarks.generate_world.world import Film, Person, University, World

PER_TYPE = 60
CONTEXTS = 10
DATES = {
    "born": "date of birth",
    "died": "date of death",
    "released": "publication date",
    "founded": "inception",
}
RELATIVES = ("father", "mother", "spouse")

Triple = tuple[str, str, str]  # subject, relation, object
Entity = Film | Person | University


class Question(NamedTuple):
    """`needed` are the entities whose passages answer it; `form` tells templates apart, to take them in equal shares."""

    type: str
    form: str
    text: str
    answers: tuple[str, ...]
    evidence: tuple[Triple, ...]
    needed: tuple[Entity, ...]


def ask(world: World, rng: random.Random) -> list[Question]:
    """PER_TYPE questions of each type, its forms in equal shares as far as they go, yes and no in equal shares."""
    makers = (_comparisons, _inferences, _compositions, _bridges)
    return [question for make in makers for question in _balanced(list(make(world)), PER_TYPE, rng)]


def contexts(question: Question, world: World, rng: random.Random) -> list[str]:
    """Titles of the needed passages among distractors of the same kinds, half of them look-alikes; shuffled."""
    every = (*world.films, *world.people.values(), *world.universities)
    chosen = list(question.needed)
    while len(chosen) < CONTEXTS:
        kind = type(rng.choice(question.needed))
        others = [entity for entity in every if type(entity) is kind and entity not in chosen]
        sample = rng.sample(others, rng.choice((1, min(10, len(others)))))
        chosen.append(max(sample, key=lambda entity: _likeness(entity, question.needed)))
    titles = [entity.name for entity in chosen]
    rng.shuffle(titles)
    return titles


def _likeness(entity: Entity, needed: Sequence[Entity]) -> int:
    """Words of the name and countries in common with the entities that the question needs."""
    names = {word for other in needed for word in other.name.split()} - {"The", "University", "of"}
    return len(names & set(entity.name.split())) + (entity.country in {other.country for other in needed})


def _balanced(pool: list[Question], n: int, rng: random.Random) -> list[Question]:
    """Round-robin over forms; within a form of yes-or-no questions, over the two answers."""
    rng.shuffle(pool)
    queues: dict[tuple[str, str], list[Question]] = {}
    for question in pool:
        answer = question.answers[0] if question.answers[0] in ("yes", "no") else ""
        queues.setdefault((question.form, answer), []).append(question)
    chosen: list[Question] = []
    n = min(n, len(pool))
    while len(chosen) < n:
        for key in sorted(queues):
            if queues[key] and len(chosen) < n:
                chosen.append(queues[key].pop())
    return chosen


def _comparisons(world: World) -> Iterator[Question]:
    for a, b in combinations(world.people.values(), 2):
        yield from _ordered("born first", "Who was born first, {} or {}?", a, b, "born")
        yield from _ordered("died first", "Who died first, {} or {}?", a, b, "died")
        yield _same("nationality", "Are {} and {} of the same nationality?", a, b, a, b)
    for f, g in combinations(world.films, 2):
        yield from _ordered("came first", "Which film came out first, {} or {}?", f, g, "released")
        text = "Which film was released more recently, {} or {}?"
        yield from _ordered("came later", text, f, g, "released")
    for u, v in combinations(world.universities, 2):
        text = "Which was founded first, the {} or the {}?"
        yield from _ordered("founded first", text, u, v, "founded")


def _inferences(world: World) -> Iterator[Question]:
    kin = {"father": "paternal grand{}", "mother": "maternal grand{}", "spouse": "{}-in-law"}
    for person, (step, name), then in product(world.people.values(), kin.items(), ("father", "mother")):
        if between := world.people.get(getattr(person, step)):
            relation, answer = name.format(then), str(getattr(between, then))
            evidence = (person.name, step, between.name), (between.name, then, answer)
            text = f"Who is the {relation} of {person.name}?"
            yield Question("inference", relation, text, (answer,), evidence, (person, between))


def _compositions(world: World) -> Iterator[Question]:
    """Of a film's director, and of a person's relative."""
    films: list[tuple[str, str, Entity, Person]] = [
        ("director", f"the director of film {f.name}", f, f.director) for f in world.films
    ]
    people: list[tuple[str, str, Entity, Person]] = [
        (step, f"{person.name}'s {step}", person, relative)
        for person in world.people.values()
        for step in RELATIVES
        if (relative := world.people.get(getattr(person, step)))
    ]
    for step, who, entity, person in (*films, *people):
        kind = step if step == "director" else "relative"
        for form, text, relation, answers in asked_of(person):
            if kind == "director" or relation not in RELATIVES:  # those would be inferences
                evidence = (entity.name, step, person.name), (person.name, relation, answers[0])
                asked, needed = text.format(who), (entity, person)
                yield Question("compositional", f"{kind} {form}", asked, answers, evidence, needed)


def asked_of(p: Person) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """What can be asked of someone who is described: form, text, relation, golds."""
    yield "birthplace", "Where was {} born?", "place of birth", (p.birthplace.name,)
    yield (
        "birth",
        "When was {} born?",
        "date of birth",
        (day(p.born), f"{p.born:%B} {p.born.day}, {p.born.year}"),
    )
    country = p.country, demonym(p.country)
    yield "country", "What is the nationality of {}?", "country of citizenship", country
    yield "university", "Where did {} study?", "educated at", (p.university.name,)
    yield "award", "Which award did {} receive?", "award received", (p.award,)
    for relative in RELATIVES:
        yield relative, f"Who is the {relative} of {{}}?", relative, (getattr(p, relative),)
    if p.died and p.deathplace:
        yield "deathplace", "Where did {} die?", "place of death", (p.deathplace.name,)
        dates = day(p.died), f"{p.died:%B} {p.died.day}, {p.died.year}"
        yield "death", "When did {} die?", "date of death", dates


def _bridges(world: World) -> Iterator[Question]:
    for f, g in combinations(world.films, 2):
        a, b = f.director, g.director
        if a == b:
            continue
        led = (f.name, "director", a.name), (g.name, "director", b.name)
        text = "Do the directors of both films {} and {} have the same nationality?"
        asked = [_same("country", text, f, g, a, b)]
        for order in ("first", "later"):
            for field, verb in (("born", "was born"), ("died", "died")):
                text = f"Which film has the director who {verb} {order}, {{}} or {{}}?"
                asked += _ordered(f"{field} {order}", text, f, g, field, a, b)
        for q in asked:
            yield q._replace(type="bridge_comparison", evidence=(*led, *q.evidence), needed=(f, g, a, b))


def _ordered(form: str, text: str, a: Entity, b: Entity, field: str, *ends: Person) -> Iterator[Question]:
    """Which of two comes first (or later, by the form's last word), unless a date is unknown or within two years.

    ends: the people that a and b lead to, whose dates count.
    """
    dated = ends or (a, b)
    dates = [getattr(end, field) for end in dated]
    years = [when.year if isinstance(when, date) else when for when in dates]
    if all(dates) and abs(years[0] - years[1]) > 2:
        first, last = (a, b) if years[0] < years[1] else (b, a)
        answer = (first if form.endswith("first") else last).name
        said = (day(when) if isinstance(when, date) else str(when) for when in dates)
        evidence = tuple((end.name, DATES[field], when) for end, when in zip(dated, said, strict=True))
        yield Question("comparison", form, text.format(a.name, b.name), (answer,), evidence, (a, b))


def _same(form: str, text: str, a: Entity, b: Entity, one: Person, other: Person) -> Question:
    """Whether two people, asked after by way of a and b, are of one nationality."""
    evidence = tuple((p.name, "country of citizenship", p.country) for p in (one, other))
    answer = "yes" if one.country == other.country else "no"
    return Question("comparison", form, text.format(a.name, b.name), (answer,), evidence, (a, b))
