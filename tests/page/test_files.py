"""The page's files: closed to everything from elsewhere, cached by content, sent without a key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import blendserve.serve.page.routes as routes
from tests.support.http import Server, serving

FILES = sorted(routes.STATIC.iterdir())
NAMESPACE = "http://www.w3.org/2000/svg"


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that needs a key for everything else."""
    with serving(tmp_path_factory.mktemp("closed"), api_key="secret") as made:
        yield made


def test_every_file_is_sent_with_a_closed_policy(closed: Server) -> None:
    for path in ("/", *(f"/page/{file.name}" for file in FILES)):
        sent = closed.get(path)
        assert sent.status_code == 200, path
        parts = sent.headers["Content-Security-Policy"].split(";")
        policy = dict(part.strip().split(" ", 1) for part in parts)
        none = ("default-src", "base-uri", "form-action", "frame-ancestors")
        assert {policy[name] for name in none} == {"'none'"}
        assert {policy[f"{kind}-src"] for kind in ("script", "style", "connect", "img")} == {"'self'"}
        assert sent.headers["X-Content-Type-Options"] == "nosniff"
        assert sent.headers["Content-Type"].endswith("; charset=utf-8")
        for known, status in ((sent.headers["ETag"], 304), ('"another"', 200)):
            again = closed.http.get(path, headers={"If-None-Match": known})
            assert (again.status_code, bool(again.content)) == (status, status == 200)
    assert closed.get("/v1/rag/settings").status_code == 401


@pytest.mark.parametrize("name", ["nothing.js", "..%2f__init__.py", "%2e%2e/routes.py", "static"])
def test_no_other_file_is_sent(closed: Server, name: str) -> None:
    assert httpx.get(f"{closed.url}/page/{name}").status_code == 404


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_file_loads_from_elsewhere_or_makes_markup_of_text(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace(NAMESPACE, "")
    assert not re.findall(r"https?:|//[a-z]+\.|@import|url\(", text)
    markup = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|\son\w+="
    assert not re.findall(markup, text)
