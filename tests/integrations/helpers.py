"""What a framework's answers are compared with: the server's own API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blendserve.core import Passage
from tests.engine.helpers import PASSAGES
from tests.serve.helpers import Server

UNTITLED = [Passage(p.text) for p in PASSAGES]


def own_answer(server: Server, question: str, passages: Sequence[Passage], **options: Any) -> dict[str, Any]:
    """The response of POST /v1/rag/query to a question over these passages."""
    documents = [{"text": p.text, "title": p.title} for p in passages]
    response = server.post("/v1/rag/query", {"question": question, "documents": documents, **options})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer
