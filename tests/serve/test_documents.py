"""Passages inside a request: `documents` in every route that answers, and the separator in a message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from blendserve.serve.config import ServeConfig
from tests.engine.helpers import CONFIG, PASSAGES, QUESTIONS
from tests.serve.helpers import Server

SEPARATOR = " # # "
DOCUMENTS = [{"title": p.title, "text": p.text, "id": p.title.lower()} for p in PASSAGES[:4]]
MODEL = "tiny"
FULL = {"method": "full"}  # its answers do not depend on what is in the cache


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    prompt = {**CONFIG.prompt.model_dump(), "separator": SEPARATOR}
    made = Server(tmp_path_factory.mktemp("documents"), ServeConfig(), prompt=prompt)
    yield made
    made.close()


def chat(server: Server, message: str = QUESTIONS[0], **extra: Any) -> Any:
    return server.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": message}],
        extra_body={"x_blendserve": FULL, **extra},
    )


def test_documents_are_the_passages_in_their_order(server: Server) -> None:
    done = chat(server, documents=DOCUMENTS)
    answer = server.engine.answer(QUESTIONS[0], list(PASSAGES[:4]), **FULL)
    assert done.choices[0].message.content == answer.text
    assert done.usage.prompt_tokens == answer.report.tokens_prompt
    shown = [{k: p[k] for k in ("title", "text", "id")} for p in done.x_blendserve["passages"]]
    assert shown == DOCUMENTS
    back = chat(server, documents=DOCUMENTS[::-1])
    assert [p["id"] for p in back.x_blendserve["passages"]] == [d["id"] for d in DOCUMENTS[::-1]]


def test_a_streamed_chat_with_documents(server: Server) -> None:
    chunks = list(
        server.client().chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": QUESTIONS[0]}],
            stream=True,
            extra_body={"documents": DOCUMENTS, "x_blendserve": FULL},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == (
        chat(server, documents=DOCUMENTS).choices[0].message.content
    )


@pytest.mark.parametrize("name", ["text", "contents", "content"])
def test_names_of_a_documents_text(server: Server, name: str) -> None:
    done = chat(server, documents=[{name: PASSAGES[0].text}])
    assert [p["text"] for p in done.x_blendserve["passages"]] == [PASSAGES[0].text]


def test_other_routes_take_documents(server: Server) -> None:
    expected = chat(server, documents=DOCUMENTS).choices[0].message.content
    done = server.client().completions.create(
        model=MODEL, prompt=QUESTIONS[0], extra_body={"documents": DOCUMENTS, "x_blendserve": FULL}
    )
    assert done.choices[0].text == expected
    body = {"question": QUESTIONS[0], "documents": DOCUMENTS, **FULL}
    assert server.post("/v1/rag/query", body).json()["text"] == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"x_blendserve": {"passages": []}}),
        ("/v1/completions", {"prompt": "What?", "x_blendserve": {"passages": []}}),
        ("/v1/rag/query", {"question": "What?", "passages": []}),
    ],
)
def test_documents_and_passages_together_are_refused(server: Server, path: str, body: dict[str, Any]) -> None:
    common: dict[str, Any] = {"documents": DOCUMENTS}
    if "question" not in body:
        common |= {"model": MODEL}
    if "chat" in path:
        common |= {"messages": [{"role": "user", "content": "What?"}]}
    answer = server.post(path, {**common, **body})
    assert answer.status_code == 400
    assert "documents and passages" in answer.json()["error"]["message"]


def test_a_document_without_text_is_named(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match=r"documents\.1\.text") as error:
        chat(server, documents=[DOCUMENTS[0], {"title": "Only a title"}])
    assert error.value.param == "documents.1.text"


def test_a_message_is_cut_at_the_separator(server: Server) -> None:
    texts = [p.text for p in PASSAGES[:3]]
    cut = chat(server, SEPARATOR.join([*texts, QUESTIONS[0]]))
    assert [p["text"] for p in cut.x_blendserve["passages"]] == texts
    same = chat(server, documents=[{"text": text} for text in texts])
    assert cut.choices[0].message.content == same.choices[0].message.content
    assert cut.usage.prompt_tokens == same.usage.prompt_tokens


def test_parts_of_a_message_follow_the_documents(server: Server) -> None:
    done = chat(server, SEPARATOR.join([PASSAGES[1].text, QUESTIONS[0]]), documents=DOCUMENTS[:1])
    assert [p["text"] for p in done.x_blendserve["passages"]] == [PASSAGES[0].text, PASSAGES[1].text]


def test_a_cut_message_needs_a_question(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="question is empty"):
        chat(server, f"{PASSAGES[0].text}{SEPARATOR}")
