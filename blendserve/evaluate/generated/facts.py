"""Single facts of the generated world, each with another value that it could have had: a passage that was edited there
must never be gone on with by what it said before.

    ... the son of Norvin Abendroth and his wife     now: Elfrida Kovarik     before: Ludmila Drozdan

Short prompts: the person's passage among three others, then words of it, up to the fact. The small bundled reader goes on
with what stands there, where it gets few questions about it right. Every kind of fact comes equally often.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest

from blendserve.core import Passage
from blendserve.evaluate.formats import Example
from blendserve.evaluate.generated import prose, questions, world
from blendserve.evaluate.generated.world import Person
from blendserve.evaluate.tasks import CONTINUATION

FACTS = 320
PASSAGES = 4
WORDS = 10  # in front of the fact
FORMS = ("birthplace", "birth", "university", "award", "father", "mother", "spouse", "deathplace")


def make(seed: int = 0) -> list[Example]:
    """The same for the same seed."""
    rng = random.Random(f"facts:{seed}")
    made = world.build(rng)
    people = list(made.people.values())
    texts = {}
    for person in people:
        films = [film for film in made.films if film.director == person]
        texts[person.name] = f"{person.name}\n{prose.person_text(person, films, rng)}\n\n"
    rng.shuffle(people)
    by_form = [list(_of_form(form, people, texts, rng)) for form in FORMS]
    rounds = chain.from_iterable(zip_longest(*by_form))
    chosen = [example for example in rounds if example is not None][:FACTS]
    return [replace(example, id=f"facts-{n:03}") for n, example in enumerate(chosen, 1)]


def _of_form(
    form: str, people: Sequence[Person], texts: Mapping[str, str], rng: random.Random
) -> Iterator[Example]:
    """One for each who has such a fact that stands in one place."""
    values = {p.name: gold for p in people if (gold := _value(p, form))}
    for person in people:
        gold, text = values.get(person.name), texts[person.name]
        others = [p for p in people if p.surname != person.surname]
        around = [person, *rng.sample(others, PASSAGES - 1)]
        rng.shuffle(around)
        said = "".join(texts[p.name] for p in around)
        rivals = sorted({values[p.name] for p in others if p.name in values and values[p.name] not in said})
        if gold and rivals and text.count(f" {gold}") == 1:
            yield Example(
                id="",
                question=" ".join(text[: text.index(f" {gold}")].split(" ")[-WORDS:]),
                answers=(f" {gold}",),
                contexts=tuple(Passage(texts[p.name], p.name) for p in around),
                type=form,
                task=CONTINUATION.name,
                supporting=(person.name,),
                rival=rng.choice(rivals),
            )


def _value(person: Person, form: str) -> str | None:
    return next((golds[0] for name, _, _, golds in questions.asked_of(person) if name == form), None)
