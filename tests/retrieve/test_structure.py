"""Passages follow the structure of their document: sections, tables and functions."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import Document, Passage
from blendserve.retrieve import split
from blendserve.retrieve.structure import parse
from tests.retrieve.conftest import words

DOCS = Path(__file__).parents[2] / "docs"
TABLE = "| part | price |\n| --- | --: |\n"
HEADING = re.compile(r"#{1,6} .+")


def cut(text: str, limit: int = 40, id: str = "d.md", title: str = "T") -> list[Passage]:
    passages = list(split(Document(text, title=title, id=id), limit, words))
    assert all(words(passage) <= limit for passage in passages)
    return passages


sentences = st.integers(1, 12).map(lambda n: " ".join(["word"] * n) + ".")
paragraphs = st.lists(sentences, min_size=1, max_size=6).map(" ".join)
headings = st.builds("{} Part {}".format, st.integers(1, 4).map("#".__mul__), st.integers(1, 99))
sections = st.builds(
    "{}\n\n{}".format, st.lists(headings, min_size=1, max_size=3).map("\n\n".join), paragraphs
)
rows = st.lists(st.integers(0, 99).map("| seal | {} |\n".format), min_size=1, max_size=30).map("".join)
tables = rows.map(TABLE.__add__)
blocks = st.lists(sections | paragraphs | tables | st.just("```\n# no heading\n```"), min_size=1, max_size=12)
texts = blocks.map("\n\n".join)


@given(texts)
def test_nothing_is_lost_and_only_headers_of_tables_are_repeated(text: str) -> None:
    rest = text
    for passage in cut(text):
        rest = rest.lstrip()
        own = passage.text
        if not rest.startswith(own):
            assert own.startswith(TABLE)
            own = own.removeprefix(TABLE)
        assert rest.startswith(own)
        rest = rest.removeprefix(own)
    assert not rest.strip()


@given(texts)
def test_a_passage_never_ends_with_a_heading_or_a_header(text: str) -> None:
    for passage in cut(text):
        last = passage.text.splitlines()[-1]
        assert not re.fullmatch(r"#{1,6} Part \d+", last)
        assert last not in TABLE.splitlines()


@given(texts)
def test_the_title_of_a_passage_is_the_path_of_its_section(text: str) -> None:
    at = 0
    for passage in cut(text, 60):
        own = passage.text.removeprefix(TABLE) if passage.text not in text[at:] else passage.text
        at = text.index(own, at)
        above = dict[int, str]()
        before = text[:at].replace("# no heading", "")
        for line in before.splitlines() + own.splitlines()[:1]:
            if HEADING.fullmatch(line):
                level = line.index(" ")
                above = {n: name for n, name in above.items() if n < level}
                above |= (
                    {}
                    if line in own.splitlines()[:1] and line not in before.splitlines()
                    else {level: line[level + 1 :]}
                )
        if not HEADING.fullmatch(own.splitlines()[0]):
            assert passage.title == " > ".join(dict.fromkeys(["T", *above.values()]))
        at += len(own)


def test_sections_are_named_in_all_their_forms() -> None:
    forms = {
        "markdown.md": "# Manual\n\nIntro.\n\n## Oil ##\n\n{}\n\n## Water\n\nCold.",
        "setext.txt": "Manual\n======\n\nIntro.\n\nOil\n---\n\n{}\n\nWater\n-----\n\nCold.",
        "over.rst": "======\nManual\n======\n\nIntro.\n\nOil\n---\n\n{}\n\nWater\n-----\n\nCold.",
        "front.md": "---\ntitle: x\n---\n\n# Manual\n\nIntro.\n\n## Oil\n\n{}\n\n## Water\n\nCold.",
    }
    for id, form in forms.items():
        passages = cut(form.format("A word and more of them. " * 30), id=id, title="Manual")
        assert {"Manual", "Manual > Oil"} <= {passage.title for passage in passages}, id
        assert passages[-1].title in ("Manual", "Manual > Oil")
        assert passages[-1].text.endswith("Cold.")
        assert not any(re.search(r"(Oil|Water)\W*$", passage.text) for passage in passages), id


@given(rows)
def test_each_passage_of_a_table_has_its_header(rows: str) -> None:
    passages = cut(TABLE + rows, id="parts.csv")
    assert all(passage.text.startswith(TABLE) for passage in passages)
    assert "".join(passage.text.removeprefix(TABLE) + "\n" for passage in passages) == rows


def test_a_section_or_header_that_is_too_long_is_left_out() -> None:
    name, wide = "long " * 12, "|" + " x |" * 30 + "\n|" + " - |" * 30 + "\n"
    assert {p.title for p in cut(f"# {name}\n\n{'word ' * 200}")} == {"T"}
    assert all(words(p) <= 40 for p in cut(wide + "| 1 | 2 |\n" * 50))


@given(st.lists(st.integers(1, 6), min_size=2, max_size=20), st.sampled_from(["def f{}():", "func f{}() {{"]))
def test_functions_are_not_cut(sizes: list[int], head: str) -> None:
    """A top-level one of at most half a passage, whatever stands around it."""
    functions = []
    for n, size in enumerate(sizes):
        lines = [head.format(n), *(f"    x = {m}\n" if m % 3 == 0 else f"    x = {m}" for m in range(size))]
        functions.append("\n".join(lines).rstrip() + ("\n}" if "{" in lines[0] else ""))
    passages = cut("\n\n\n".join(functions), 45, id="a.py")
    for function in functions:
        assert any(function in passage.text for passage in passages)
    assert all("# x" not in passage.title for passage in passages)


@pytest.mark.parametrize("mark", ["؟", "۔", "।", "。", "！", "።"])
def test_sentences_of_other_scripts_end(mark: str) -> None:
    space = "" if mark in "。！" else " "
    text = space.join(f"{'ab ' * 4}cd{mark}" for _ in range(8))
    assert all(passage.text.endswith(mark) for passage in cut(text, 14))


def test_a_passage_ends_before_a_section_rather_than_in_it() -> None:
    """Of the sections that it could end before, before one of the highest level."""
    parts = [
        f"{'#' * level} Part {n}\n\n{'word ' * 8}".strip() for n, level in enumerate((1, 2, 3, 2, 1, 2, 1, 3))
    ]
    found = cut("\n\n".join(parts), 60)  # five would fit
    assert [passage.text for passage in found] == ["\n\n".join(parts[:4]), "\n\n".join(parts[4:])]


def test_most_passages_outlive_an_edit_elsewhere() -> None:
    """Of all pages in one document, an edit of a sentence changes its own passages and few others."""
    text = "\n\n".join(path.read_text("utf-8") for path in sorted(DOCS.glob("explanation/*.md")))
    old = {(passage.title, passage.text) for passage in cut(text, 200)}
    for at in (0.1, 0.4, 0.7):
        where = text.index("\n\n", int(at * len(text)))
        edited = f"{text[:where]} A new sentence that was not here before, of some length.{text[where:]}"
        new = {(passage.title, passage.text) for passage in cut(edited, 200)}
        assert len(new - old) <= 8


@given(texts)
def test_parts_are_in_order_and_do_not_overlap(text: str) -> None:
    found = parse(Document(text, id="d.md"), text)
    for parts in (found.headings, found.tables):
        assert all(a.end <= b.start for a, b in pairwise(parts))  # type: ignore[attr-defined]
    assert all(a[1] < b[0] for a, b in pairwise(found.whole))
    assert all(list(ends) == sorted(ends) for ends, _ in found.ends)
