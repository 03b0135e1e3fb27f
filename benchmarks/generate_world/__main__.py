"""Write the two data sets of an invented world that blendserve ships: python -m benchmarks.generate_world [--out FOLDER]

generated   questions in the style of 2WikiMultihopQA; no model can know the answers without the passages
facts       single facts, each with a counterfactual value: for passages that were edited

The reading model was trained on worlds of other seeds: `generate(seed)` makes one.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from benchmarks.generate_world import prose, questions, world
from benchmarks.generate_world.world import Person, World

Records = list[dict[str, Any]]

DATA = Path(__file__).parents[2] / "blendserve" / "evaluate" / "data"
SEED = 2024
FACTS = 320
FACT_PASSAGES = 4
LEAD_WORDS = 10  # words of the passage in front of the fact
FORMS = ("birthplace", "birth", "university", "award", "father", "mother", "spouse", "deathplace")


def generate(seed: int = SEED) -> tuple[Records, Records]:
    """Corpus and questions; deterministic in `seed`."""
    rng = random.Random(seed)
    made = world.build(rng)
    corpus = [{"title": film.name, "text": prose.film_text(film, rng)} for film in made.films]
    corpus += _people(made, rng)
    corpus += [{"title": u.name, "text": prose.university_text(u, rng)} for u in made.universities]
    asked = [
        {
            "id": f"generated-{n:03}",
            "type": question.type,
            "question": question.text,
            "answers": list(question.answers),
            "mentioned_titles": [entity.name for entity in question.needed],
            "contexts": questions.contexts(question, made, rng),
            "evidences": [list(triple) for triple in question.evidence],
        }
        for n, question in enumerate(questions.ask(made, rng))
    ]
    return corpus, asked


def facts(seed: int = 0) -> tuple[Records, Records]:
    """Corpus and facts, every kind of fact equally often: a person's passage among others, and words up to the fact."""
    rng = random.Random(f"facts:{seed}")
    made = world.build(rng)
    people = list(made.people.values())
    texts = {record["title"]: record["text"] for record in _people(made, rng)}
    rng.shuffle(people)
    by_form = [list(_facts_of(form, people, texts, rng)) for form in FORMS]
    found = [fact for fact in chain.from_iterable(zip_longest(*by_form)) if fact is not None][:FACTS]
    used = {title for fact in found for title in fact["contexts"]}
    corpus = [{"title": title, "text": texts[title]} for title in sorted(used)]
    return corpus, [{"id": f"facts-{n:03}", **fact} for n, fact in enumerate(found, 1)]


def _people(made: World, rng: random.Random) -> Records:
    directed = {name: [f for f in made.films if f.director == p] for name, p in made.people.items()}
    return [{"title": n, "text": prose.person_text(p, directed[n], rng)} for n, p in made.people.items()]


def _facts_of(
    form: str, people: Sequence[Person], texts: Mapping[str, str], rng: random.Random
) -> Iterator[dict[str, Any]]:
    """One for each person whose passage states such a fact once."""
    asked = {p.name: {name: golds[0] for name, _, _, golds in questions.asked_of(p)} for p in people}
    values = {name: known[form] for name, known in asked.items() if form in known}
    for person in people:
        gold, text = values.get(person.name), f"{person.name}\n{texts[person.name]}"
        others = [p for p in people if p.surname != person.surname]
        around = [person, *rng.sample(others, FACT_PASSAGES - 1)]
        rng.shuffle(around)
        said = "".join(f"{p.name}\n{texts[p.name]}" for p in around)
        rivals = sorted({values[p.name] for p in others if p.name in values and values[p.name] not in said})
        if gold and rivals and text.count(f" {gold}") == 1:
            yield {
                "type": form,
                "question": " ".join(text[: text.index(f" {gold}")].split(" ")[-LEAD_WORDS:]),
                "answers": [gold],
                "counterfactual": rng.choice(rivals),
                "mentioned_titles": [person.name],
                "contexts": [p.name for p in around],
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA, help="Folder of the files")
    folder: Path = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in (("generated", generate()), ("facts", facts())):
        for kind, records in zip(("corpus", "questions"), made, strict=True):
            lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            (folder / f"{name}_{kind}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
