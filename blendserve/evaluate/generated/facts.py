"""Single facts of the generated world, each with another value that it could have had: a passage that was edited there
must never be answered by what it said before.

    Who is the father of Corvin Abendroth?     now: Norvin Abendroth     before: Lazlo Abendroth

Short prompts: the person's passage among four others. Every kind of fact comes equally often.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, zip_longest

from blendserve.core import Passage
from blendserve.evaluate.formats import Example
from blendserve.evaluate.generated import prose, questions, world
from blendserve.evaluate.generated.world import Person, World

FACTS = 360
PASSAGES = 5
FORMS = ("birthplace", "birth", "university", "award", "father", "mother", "spouse", "deathplace", "death")


def make(seed: int = 0) -> list[Example]:
    """The same for the same seed."""
    rng = random.Random(f"facts:{seed}")
    made = world.build(rng)
    texts = {
        name: prose.person_text(person, _films(made, person), rng) for name, person in made.people.items()
    }
    people = list(made.people.values())
    rng.shuffle(people)
    by_form = [list(_of_form(form, people, texts, rng)) for form in FORMS]
    rounds = chain.from_iterable(zip_longest(*by_form))
    chosen = [example for example in rounds if example is not None][:FACTS]
    return [replace(example, id=f"facts-{n:03}") for n, example in enumerate(chosen, 1)]


def _of_form(form: str, people: list[Person], texts: dict[str, str], rng: random.Random) -> Iterator[Example]:
    """A question of this form about each who has such a fact."""
    asked = {p.name: {f: (q, a) for f, q, _, a in questions.asked_of(p)} for p in people}
    for person in people:
        if form not in asked[person.name]:
            continue
        question, answers = asked[person.name][form]
        others = [p for p in people if p.surname != person.surname]
        around = [person, *rng.sample(others, PASSAGES - 1)]
        rng.shuffle(around)
        said = " ".join(texts[p.name] for p in around)
        values = {asked[p.name][form][1][0] for p in others if form in asked[p.name]}
        rivals = sorted(value for value in values if value not in said)
        if rivals and texts[person.name].count(answers[0]) == 1:
            yield Example(
                id="",
                question=question.format(person.name),
                answers=answers,
                contexts=tuple(Passage(texts[p.name], p.name) for p in around),
                type=form,
                supporting=(person.name,),
                rival=rng.choice(rivals),
            )


def _films(made: World, person: Person) -> list[world.Film]:
    return [film for film in made.films if film.director == person]
