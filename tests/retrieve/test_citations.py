"""Citations: what is said in a passage is cited, what is not said there is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import Passage
from blendserve.retrieve.citations import Citer
from blendserve.retrieve.structure import sentences

BEES = Passage(
    "Bees live in hives. A bee that has found flowers dances, and the others learn where they are.", "Bees"
)
WINE = Passage("Wine is made of grapes. Yeast turns their sugar into alcohol.", "Wine")
TIDES = Passage("The moon pulls at the sea. So the water rises twice a day.", "Tides")
PASSAGES = (BEES, WINE, TIDES)
QUESTION = "What turns the sugar of grapes into alcohol?"


def test_an_answer_is_cited_for_the_passage_that_has_it_and_the_question() -> None:
    (found,) = Citer(PASSAGES, QUESTION).cite("It is yeast.")
    assert (found.start, found.end, found.passage) == (0, 12, 1)
    assert WINE.text[found.quote_start : found.quote_end] == found.quote == WINE.text.split(". ")[1]


def test_each_sentence_has_its_own() -> None:
    text = "Yeast turns sugar into alcohol. Elephants are grey!\nA bee that found flowers dances where others learn."
    found = [*Citer(PASSAGES, QUESTION).cite(text)]
    assert [(text[each.start : each.end], each.passage) for each in found] == [
        ("Yeast turns sugar into alcohol.", 1),
        ("A bee that found flowers dances where others learn.", 0),
    ]


def test_what_a_passage_does_not_say_is_not_cited() -> None:
    citer = Citer(PASSAGES, QUESTION)
    for text in ("Wine is blue.", "Yes.", "the moon", "Penicillium turns milk into cheese.", "", "?"):
        assert [*citer.cite(text)] == [], text
    assert [*Citer((), QUESTION).cite("Yeast.")] == []


@given(st.text(), st.lists(st.text(), max_size=3), st.text())
def test_places_are_in_the_texts(text: str, passages: list[str], question: str) -> None:
    own = [Passage(passage) for passage in (*passages, text)]
    for each in Citer(own, question).cite(text):
        assert text[each.start : each.end].strip()
        assert own[each.passage].text[each.quote_start : each.quote_end] == each.quote


@given(st.text(alphabet="aB.!? \n。」"))
def test_sentences_have_all_that_is_no_space(text: str) -> None:
    spans = sentences(text)
    assert "".join("".join(text[slice(*span)] for span in spans).split()) == "".join(text.split())
    assert spans == sorted(spans)
