"""Write a passage of 50 to 120 words about an entity, like the first paragraph of an encyclopedia article."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from benchmarks.generate_world.world import WORDS, Film, Person, University

SENTENCES = WORDS["sentences"]
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
_MALE = ("he", "his", "him", "son", "wife")


def day(when: date) -> str:
    """3 May 1931"""
    return f"{when.day} {when:%B} {when.year}"


def demonym(country: str) -> str:
    return str(WORDS["countries"][country][0])


def person_text(person: Person, films: Sequence[Film], rng: random.Random) -> str:
    """A person's passage; `films`: directed by the person."""
    he, his, him, child, partner = ("she", "her", "her", "daughter", "husband") if person.female else _MALE
    words = {
        "he": he, "He": he.title(), "his": his, "His": his.title(), "him": him, "child": child, "partner": partner,
        "name": person.name, "surname": person.surname, "father": person.father, "mother": person.mother,
        "spouse": person.spouse, "married": person.married, "children": _NUMBERS[person.children],
        "home": f"{person.birthplace.name}, {person.birthplace.country}", "n": _NUMBERS[person.siblings],
        "nth": rng.choice(("first", "second", "youngest")), "trade": f"{demonym(person.country)} {person.occupation}",
        "university": person.university.name, "subject": rng.choice(WORDS["subjects"]),
        "award": person.award, "awarded": person.awarded, "born": day(person.born),
    }  # fmt: skip
    lead, deaths = "{name} (born {born}) is {a} {trade}.", list[str]()
    if person.died and person.deathplace:
        words |= {"grave": person.deathplace.name, "died": day(person.died)}
        lead, deaths = "{name} ({born} – {died}) was {a} {trade}.", ["deaths"]
    career = next((s for man, woman, s in WORDS["occupations"] if person.occupation in (man, woman)), "")
    if films:
        first, *_, last = sorted(films, key=lambda film: film.released)
        words |= {"first": first.name, "begun": first.released.year}
        words |= {"last": last.name, "ended": last.released.year}
        career = rng.choice(SENTENCES["careers"])
    parts = (lead, "births", "studies", career, "marriages", "honours", *deaths)
    return _written(person.country, words, parts, rng)


def film_text(film: Film, rng: random.Random) -> str:
    words = {
        "title": film.name, "year": film.released.year, "what": f"{demonym(film.country)} {film.genre} film",
        "director": film.director.name, "he": film.stars[0], "she": film.stars[1], "writer": film.writer,
        "composer": film.composer, "role": rng.choice(WORDS["roles"]), "place": film.setting.name,
        "plot": rng.choice(WORDS["plots"]), "released": day(film.released), "studio": rng.choice(WORDS["studios"]),
        "minutes": rng.randint(78, 164),
    }  # fmt: skip
    parts = ("films", "casts", "crews", "stories", "releases", "verdicts")
    return _written(film.country, words, parts, rng)


def university_text(university: University, rng: random.Random) -> str:
    first, second = rng.sample(WORDS["subjects"], 2)
    words = {
        "name": university.name, "where": f"{university.city.name}, {university.city.country}",
        "year": university.founded, "founder": university.founder, "first": first, "second": second,
        "students": f"{rng.randint(4, 38)},{rng.randint(1, 9)}00", "n": rng.randint(5, 14),
        "books": rng.choice(("half a million", "some two million", "more than a million")),
        "kind": rng.choice(("a public", "a private", "the oldest")),
    }  # fmt: skip
    parts = ("seats", "foundings", "sizes", "schools", "libraries")
    return _written(university.country, words, parts, rng)


def _written(country: str, words: Mapping[str, Any], parts: Sequence[str], rng: random.Random) -> str:
    """A sentence for each part: one of the named kind, or the part itself. {a}: the article of the country's demonym."""
    words = {**words, "a": "an" if demonym(country)[0] in "AEIOU" else "a"}
    sentences = [rng.choice(SENTENCES[part]) if part in SENTENCES else part for part in parts]
    return " ".join(sentence.format_map(words) for sentence in sentences)
