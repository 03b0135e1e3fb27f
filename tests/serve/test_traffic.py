"""What plain prompts leave behind for later ones over HTTP: learnt chunks and kept turns, by scope and by header."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.http import MODEL, Server, asked, serving
from tests.support.plain import PARAGRAPHS
from tests.support.waiting import eventually

A, B, C, D = PARAGRAPHS


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Without collections and without keys."""
    with serving(tmp_path_factory.mktemp("traffic"), has_index=False) as made:
        yield made


def body(*texts: str, **fields: Any) -> dict[str, Any]:
    system = {"role": "system", "content": "Read this.\n" + "\n\n".join(texts)}
    return {
        "model": MODEL,
        "messages": [system, *asked("What is kept?")],
        "max_tokens": 4,
        "x_blendserve": {"method": "blend"},
        **fields,
    }


def sent(server: Server, what: dict[str, Any], **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    response = server.http.post("/v1/chat/completions", json=what, headers=names)
    assert response.status_code == 200, response.text
    return response


def teach(server: Server, *orders: tuple[str, ...], **headers: str) -> None:
    """Send prompts of these texts, and wait for what is learnt from each."""
    for texts in orders:
        sent(server, body(*texts), **headers)
        eventually(lambda: server.is_idle and not server.backend.scheduler.has_work)


def spans(response: httpx.Response) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = response.json()["x_blendserve"]["report"]["spans"]
    return found


ORDERS = ((A, B, C), (B, A, D))


def test_passages_are_learnt_and_named_and_the_next_turn_is_kept(server: Server) -> None:
    teach(server, *ORDERS)
    assert server.sample("learnt_bytes") > 0
    done = sent(server, body(C, B, A))
    found, told = spans(done), done.json()
    assert [span["learnt"] for span in found] == [True] * 2
    n_tokens = sum(span["stop"] - span["start"] for span in found)
    assert done.headers["X-Blendserve-Matched"] == f"spans=2; tokens={n_tokens}"
    details = told["usage"]["prompt_tokens_details"]
    assert 0 < details["blended_tokens"] <= details["cached_tokens"] < told["usage"]["prompt_tokens"]
    assert server.sample("spans_total", kind="learnt") == 2
    assert server.sample("match_seconds_count") == 3
    turn = body(C, B, A)
    answer = {"role": "assistant", "content": told["choices"][0]["message"]["content"]}
    turn["messages"] += [answer, *asked("And where?")]
    following = sent(server, turn).json()
    report = following["x_blendserve"]["report"]
    assert report["tokens_kept"] > n_tokens
    cached = following["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= told["usage"]["prompt_tokens"] - 1
    exact = sent(server, {**turn, "model": f"{MODEL}:exact"}).json()
    full = sent(server, {**turn, "x_blendserve": {"method": "full"}}).json()
    assert exact["x_blendserve"]["report"]["tokens_kept"] == 0
    assert exact["usage"]["prompt_tokens_details"]["blended_tokens"] == 0
    assert exact["choices"] == full["choices"]


def test_a_stream_says_before_its_prefill_what_was_found(server: Server) -> None:
    teach(server, *ORDERS)
    streamed = sent(server, body(C, B, A, stream=True))
    assert streamed.headers["X-Blendserve-Matched"].startswith("spans=2; tokens=")
    assert "X-Blendserve-Matched" not in sent(server, body(D)).headers


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"cache_salt": "kim"}, {}),
        ({"user": "kim"}, {}),
        ({}, {"X_OpenWebUI_User_Id": "kim"}),
        ({}, {"X_Blendserve_Scope": "kim"}),
    ],
)
def test_scopes_reuse_nothing_of_each_other(
    server: Server, fields: dict[str, Any], headers: dict[str, str]
) -> None:
    teach(server, *ORDERS)
    apart = sent(server, body(B, A, **fields), **headers).json()
    cached = apart["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert apart["x_blendserve"]["report"]["spans"] == []
    assert cached < 20  # what all prompts begin with
    assert spans(sent(server, body(C, A)))


def test_headers_say_what_a_client_cannot(server: Server) -> None:
    for texts in ORDERS:
        teach(server, texts, Cache_Control="no-store")
    assert spans(sent(server, body(C, B, A))) == []
    teach(server, *ORDERS)
    plain = {**body(B, A), "x_blendserve": {}}
    exact = sent(server, plain, X_Blendserve_Method="prefix")
    assert exact.json()["x_blendserve"]["report"]["method"] == "prefix"
    wrong = server.http.post("/v1/chat/completions", json=plain, headers={"X-Blendserve-Method": "fastest"})
    assert wrong.status_code == 400
    assert "X-Blendserve-Method" in wrong.json()["error"]["message"]
    body_wins = sent(server, body(B, A), X_Blendserve_Method="full")
    assert body_wins.json()["x_blendserve"]["report"]["method"] == "blend"


def test_the_pages_route_explains_a_plain_prompt(server: Server) -> None:
    server.warm([{"text": B}, {"text": D}])
    done = server.ask(f"Read this.\n\n{D}\n\n{B}\n\nWhat?", plain=True, explain=True, method="blend")
    kinds = [part["kind"] for part in done["explanation"]["parts"]]
    assert kinds == ["prefix", "passage", "text", "passage", "suffix"] or kinds == [
        *("prefix", "passage", "passage", "suffix")
    ]
    assert done["passages"] == []
    assert len(done["report"]["spans"]) == 2


LINES = "\n".join(sentence for text in PARAGRAPHS for sentence in text.split(". "))
CUT = "\n".join(LINES.split("\n")[5:30])  # as an agent reads it from another line on
SENT: dict[str, str] = {
    "plain": CUT,
    "json": json.dumps({"path": "notes", "content": CUT}),
    "crlf": CUT.replace("\n", "\r\n"),
    "quoted": "".join(f"> {line}\n" for line in CUT.split("\n")),
    "numbered": "".join(f"{n:6d}\t{line}\n" for n, line in enumerate(CUT.split("\n"), 6)),
}


@pytest.mark.parametrize("form", SENT)
def test_a_part_of_a_text_is_found_as_clients_write_it(server: Server, form: str) -> None:
    passages = [{"text": LINES}]
    job = server.job("/v1/cache/warm", {"passages": passages, "as": ["plain", form, form]})
    assert job["computed"] == (1 if form == "plain" else 2)
    done = sent(server, body(f"Read:\n{SENT[form]}"))
    n_tokens = done.json()["usage"]["prompt_tokens"]
    assert sum(span["stop"] - span["start"] for span in spans(done)) > 0.7 * n_tokens
    deleted = server.http.post("/v1/cache/delete", json={"passages": passages, "as": [form]}).json()
    assert deleted["deleted"] == 1
    wrong = server.http.post("/v1/cache/warm", json={"passages": passages, "as": ["yaml"]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "as.0")
