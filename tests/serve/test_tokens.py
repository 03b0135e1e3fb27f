"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engines import toy_model
from tests.support.http import MODEL, Client, asked

TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("text", ["Who sat on the mat?", "<|im_start|>user\n", "ünï 😀"])
def test_tokens_have_the_text_that_they_were_made_of(client: Client, text: str) -> None:
    found = client.post("/tokenize", {"prompt": text}).json()
    assert found["tokens"] == toy_model().tokenizer(text)["input_ids"]
    assert found["count"] == len(found["tokens"])
    assert client.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}], ids=["plain", "tools"])
def test_a_chat_has_the_tokens_of_its_prompt(client: Client, fields: dict[str, Any]) -> None:
    found = client.post("/tokenize", {"messages": asked(), **fields}).json()
    body = {"model": f"{MODEL}:chat", "messages": asked(), "max_tokens": 1, **fields}
    done = client.post("/v1/chat/completions", body).json()
    assert found["count"] == done["usage"]["prompt_tokens"]
    limit = client.get("/v1/models").json()["data"][0]["max_model_len"]
    assert found["max_model_len"] == limit


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": asked()}, 400),
        ("/tokenize", {"prompt": ""}, 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404),
        ("/tokenize", {"messages": asked("word " * 9000)}, 400),
        ("/detokenize", {"tokens": []}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [10**9]}, 400),
    ],
    ids=str,
)
def test_what_has_no_tokens_is_refused(client: Client, path: str, body: dict[str, Any], status: int) -> None:
    assert client.post(path, body).status_code == status
