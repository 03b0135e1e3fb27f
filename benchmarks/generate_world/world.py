"""A small invented world: families of film directors, their films, and universities. Facts only, no words around them."""

from __future__ import annotations

import random
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import yaml

WORDS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text("utf-8"))
FAMILIES = 48
FILMS_PER_DIRECTOR = (2, 2, 3)  # drawn from
UNIVERSITIES = 16


class City(NamedTuple):
    name: str
    country: str


class University(NamedTuple):
    name: str
    city: City
    founded: int
    founder: str

    @property
    def country(self) -> str:
        return self.city.country


class Person(NamedTuple):
    """Someone with a passage; relatives are names, who may have none."""

    name: str
    female: bool
    occupation: str
    country: str  # of citizenship
    born: date
    birthplace: City
    died: date | None
    deathplace: City | None
    father: str
    mother: str
    siblings: int  # and the person
    spouse: str
    married: int  # year
    children: int
    university: University
    award: str
    awarded: int

    @property
    def surname(self) -> str:
        return self.name.split()[-1]


class Film(NamedTuple):
    name: str
    released: date
    country: str
    genre: str
    director: Person
    stars: tuple[str, str]
    writer: str
    composer: str
    setting: City


class World(NamedTuple):
    """Everything that has a passage."""

    films: list[Film]
    people: dict[str, Person]  # by name
    universities: list[University]


def build(rng: random.Random) -> World:
    """A world without two of the same name; the same for the same state of `rng`."""
    maker = _Maker(rng)
    people: dict[str, Person] = {}
    films: list[Film] = []
    for number in range(FAMILIES):
        director, relatives = maker.family(number)
        people |= {person.name: person for person in (director, *relatives)}
        films += [maker.film(director) for _ in range(rng.choice(FILMS_PER_DIRECTOR))]
    return World(films, people, maker.universities)


class _Maker:
    """Draws entities, and sees to it that no name comes twice."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._used: set[str] = set()
        adjectives, nouns = WORDS["title_adjectives"], WORDS["title_nouns"]
        self._titles = [f"The {adjective} {noun}" for adjective in adjectives for noun in nouns]
        rng.shuffle(self._titles)
        countries = WORDS["countries"].items()
        self.cities = [City(city, country) for country, (_, cities) in countries for city in cities]
        self.universities = [
            University(
                f"University of {city.name}", city, rng.randint(1640, 1935), self.name(rng.random() < 0.2)
            )
            for city in rng.sample(self.cities, UNIVERSITIES)
        ]

    def name(self, female: bool, surname: str = "") -> str:
        while True:
            given = self.rng.choice(WORDS["women" if female else "men"])
            name = f"{given} {surname or self.rng.choice(WORDS['surnames'])}"
            if name not in self._used:
                self._used.add(name)
                return name

    def family(self, number: int) -> tuple[Person, list[Person]]:
        """A director, and two of father, mother and spouse, by turns: so each kind of grandparent is known in some."""
        rng, surname = self.rng, WORDS["surnames"][number]
        female, year = rng.random() < 0.4, rng.randint(1905, 1968)
        partner_year = year + rng.randint(-6, 6)
        director, partner = self.name(female, surname), self.name(not female)
        father, mother = self.name(False, surname), self.name(True)
        country = rng.choice(list(WORDS["countries"]))
        parents = year - rng.randint(1, 3), rng.randint(3, 6)  # married, children
        couple = max(year, partner_year) + rng.randint(24, 30), rng.randint(2, 5)
        relatives = [
            self.person(father, False, year - rng.randint(25, 38), country, mother, *parents),
            self.person(mother, True, year - rng.randint(22, 34), country, father, *parents),
            self.person(partner, not female, partner_year, country, director, *couple),
        ]
        del relatives[number % 3]
        child = self.person(director, female, year, country, partner, *couple)
        child = child._replace(father=father, mother=mother, siblings=parents[1])
        return child._replace(occupation="film director"), relatives

    def person(
        self, name: str, female: bool, year: int, country: str, spouse: str, married: int, children: int
    ) -> Person:
        """Someone born in `year`, mostly a citizen of the family's country, with parents who are only names."""
        rng = self.rng
        at_home = [city for city in self.cities if city.country == country]
        died = year < 1930 or rng.random() < 0.5
        return Person(
            name=name, female=female, occupation=rng.choice(WORDS["occupations"])[female],
            country=country if rng.random() < 0.8 else rng.choice(list(WORDS["countries"])),
            born=self.day(year), birthplace=rng.choice(at_home if rng.random() < 0.8 else self.cities),
            died=self.day(min(year + rng.randint(52, 93), 2019)) if died else None,
            deathplace=rng.choice(self.cities) if died else None,
            father=self.name(False, name.split()[-1]), mother=self.name(True), siblings=rng.randint(3, 6),
            spouse=spouse, married=married, children=children, university=rng.choice(self.universities),
            award=rng.choice(WORDS["awards"]), awarded=year + rng.randint(36, 50),
        )  # fmt: skip

    def film(self, director: Person) -> Film:
        rng, born = self.rng, director.born.year
        last = director.died.year - 1 if director.died else 2015
        return Film(
            name=self._titles.pop(), released=self.day(rng.randint(born + 26, min(last, born + 50))),
            country=director.country if rng.random() < 0.7 else rng.choice(list(WORDS["countries"])),
            genre=rng.choice(WORDS["genres"]), director=director, stars=(self.name(False), self.name(True)),
            writer=self.name(rng.random() < 0.3), composer=self.name(rng.random() < 0.3),
            setting=rng.choice(self.cities),
        )  # fmt: skip

    def day(self, year: int) -> date:
        return date(year, self.rng.randint(1, 12), self.rng.randint(1, 28))
