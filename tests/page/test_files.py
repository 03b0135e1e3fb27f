"""The page's files: all that lie in its folder and no other, sent without a key, closed to everything from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from blendserve.serve.app import PAGE
from tests.support.http import serving

FILES = sorted(PAGE.iterdir())
NAMESPACE = "http://www.w3.org/2000/svg"


def test_every_file_is_sent_without_a_key_and_no_other_one(tmp_path: Path) -> None:
    with serving(tmp_path, api_key="secret") as closed:
        policy = closed.get("/").headers[name := "Content-Security-Policy"]
        for file in FILES:
            sent = closed.http.get(f"/page/{file.name}", headers={"If-None-Match": '"another"'})
            assert (sent.content, sent.headers[name]) == (file.read_bytes(), policy)
        assert closed.get("/v1/rag/settings").status_code == 401
        for other in ("nothing.js", "..%2fapp.py", "%2e%2e/app.py", "..%5capp.py", "%2e"):
            assert httpx.get(f"{closed.url}/page/{other}").status_code == 404, other


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_file_loads_from_elsewhere_or_makes_markup_of_text(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace(NAMESPACE, "")
    assert not re.findall(r"https?:|//[a-z]+\.|@import|url\(", text)
    markup = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|\son\w+="
    assert not re.findall(markup, text)
