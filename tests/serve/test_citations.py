"""Citations in the forms of OpenAI's and Anthropic's APIs, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.http import MODEL, Client, Server, asked, serving
from tests.support.messages import URL, assembled, body, stream
from tests.support.scripted import scripted_model

SCRIPT = ("The water", " rises", " twice a day. ", "Elephants", " are grey.")
TEXT = "".join(SCRIPT)
CITED = "The water rises twice a day."
TIDES = "The moon pulls at the sea. So the water rises twice a day."
QUESTION = "How often does the water rise at the sea?"
DOCUMENTS = [
    {"text": "Bees live in hives.", "title": "Bees", "id": "bees"},
    {"text": TIDES, "title": "Tides", "id": "tides.md"},
]
ANNOTATION = {"start_index": 0, "end_index": len(CITED), "url": "tides.md", "title": "Tides"}


@pytest.fixture(scope="module")
def teller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its model always writes the same two sentences."""
    options: dict[str, Any] = {"engine": {"decode": {"max_new_tokens": None}}, "has_index": False}
    with serving(tmp_path_factory.mktemp("teller"), model=scripted_model(*SCRIPT), **options) as made:
        yield made


def test_chats_have_annotations(teller: Client) -> None:
    create: Any = teller.openai.chat.completions.create
    options: Any = {
        "model": MODEL,
        "messages": asked(QUESTION),
        "extra_body": {"documents": DOCUMENTS},
    }
    done = create(**options)
    assert done.choices[0].message.content == TEXT
    (found,) = done.choices[0].message.annotations
    assert found.model_dump() == {"type": "url_citation", "url_citation": ANNOTATION}
    last = [*create(**options, stream=True)][-1]
    assert last.choices[0].delta.annotations == [{"type": "url_citation", "url_citation": ANNOTATION}]
    (own,) = done.x_blendserve["citations"]
    assert (own["passage"], own["quote"]) == (1, "So the water rises twice a day.")
    assert create(**{**options, "messages": asked("Hello!")}).choices[0].message.annotations is None


def test_responses_have_annotations(teller: Client) -> None:
    options: Any = {"model": MODEL, "input": QUESTION, "extra_body": {"documents": DOCUMENTS}}
    create: Any = teller.openai.responses.create
    events = [*create(**options, stream=True)]
    (added,) = [event for event in events if event.type == "response.output_text.annotation.added"]
    assert added.annotation.model_dump() == {"type": "url_citation", **ANNOTATION}
    for done in (create(**options), events[-1].response):
        ((part,),) = (item.content for item in done.output)
        assert [each.model_dump() for each in part.annotations] == [{"type": "url_citation", **ANNOTATION}]


def document(source: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, "title": "Tides", **fields}


ENABLED: dict[str, Any] = {"citations": {"enabled": True}}
PARTS = [{"type": "text", "text": text} for text in ("Bees live in hives.", TIDES)]
OF_DOCUMENT = {"document_index": 0, "document_title": "Tides", "file_id": None}
QUOTE = {"cited_text": "So the water rises twice a day."}
BLOCKS = {"start_block_index": 1, "end_block_index": 2}


@pytest.mark.parametrize(
    ("block", "citation"),
    [
        (
            document({"type": "text", "media_type": "text/plain", "data": TIDES}, **ENABLED),
            {"type": "char_location", **OF_DOCUMENT, "start_char_index": 27, "end_char_index": 58},
        ),
        (
            document({"type": "content", "content": PARTS}, **ENABLED),
            {"type": "content_block_location", **OF_DOCUMENT, **BLOCKS},
        ),
        (
            {"type": "search_result", "source": "http://t", "title": "Tides", "content": PARTS, **ENABLED},
            {
                **{"type": "search_result_location", "source": "http://t", "title": "Tides"},
                **{"search_result_index": 0, **BLOCKS},
            },
        ),
        (document({"type": "text", "media_type": "text/plain", "data": TIDES}), None),
    ],
)
def test_messages_cite_what_asks_for_it(
    teller: Client, block: dict[str, Any], citation: dict[str, Any] | None
) -> None:
    """Each sentence is a block then."""
    request = body([block, {"type": "text", "text": QUESTION}])
    whole = teller.post(URL, request).json()["content"]
    if citation is None:
        assert whole == [{"type": "text", "text": TEXT}]
        return
    first, second = whole
    assert (first["text"] + second["text"], first["text"].strip()) == (TEXT, CITED)
    assert (first["citations"], second["citations"]) == ([{**citation, **QUOTE}], None)
    streamed = assembled(stream(teller, request))["content"]
    assert [part["text"] for part in streamed] == [first["text"], second["text"]]
    assert [part.get("citations") for part in streamed] == [first["citations"], None]
