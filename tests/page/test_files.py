"""The page's files: closed to everything from elsewhere, cached by their content, sent without asking anybody."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import blendserve.serve.page.routes as routes
from blendserve.serve.config import ServeConfig
from blendserve.serve.keys import KeyFile, Tenant
from tests.serve.helpers import Server

FILES = sorted(path for path in routes.STATIC.iterdir())
NAMESPACE = "http://www.w3.org/2000/svg"


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that wants keys for all but the page."""
    folder = tmp_path_factory.mktemp("closed")
    KeyFile(folder / "keys.json").create(Tenant("ann"))
    made = Server(folder, ServeConfig(keys=folder / "keys.json"))
    yield made
    made.close()


def test_every_file_is_sent_with_a_policy_that_lets_nothing_in(closed: Server) -> None:
    for path in ("/", *(f"/page/{file.name}" for file in FILES)):
        sent = closed.get(path)
        assert sent.status_code == 200, path
        policy = dict(
            part.strip().split(" ", 1) for part in sent.headers["Content-Security-Policy"].split(";")
        )
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["frame-ancestors"] == "'none'"
        assert {policy[f"{kind}-src"] for kind in ("script", "style", "connect", "img")} == {"'self'"}
        assert sent.headers["X-Content-Type-Options"] == "nosniff"
        assert sent.headers["Content-Type"].endswith("; charset=utf-8")
    assert closed.get("/v1/rag/settings").status_code == 401


def test_a_file_that_did_not_change_is_not_sent_again(closed: Server) -> None:
    etag = closed.get("/page/style.css").headers["ETag"]
    again = closed.http.get("/page/style.css", headers={"If-None-Match": etag})
    assert (again.status_code, again.content) == (304, b"")
    other = closed.http.get("/page/style.css", headers={"If-None-Match": '"another"'})
    assert other.status_code == 200


@pytest.mark.parametrize("name", ["nothing.js", "..%2f__init__.py", "%2e%2e/routes.py", "static"])
def test_nothing_else_is_sent(closed: Server, name: str) -> None:
    assert httpx.get(f"{closed.url}/page/{name}").status_code == 404


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_file_names_another_place_or_makes_markup_of_text(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace(NAMESPACE, "")
    assert not re.findall(r"https?:|//[a-z]+\.|@import|url\(", text)
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|\son\w+=", text
    )
    assert len(text.splitlines()) < 320, "one idea a file"
