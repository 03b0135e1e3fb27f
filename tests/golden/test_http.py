"""The server sends what tests/golden/http.json has: see tests/golden/http.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.golden.http import FILE, transcript

GOLDEN: dict[str, Any] = json.loads(FILE.read_text("utf-8"))


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    return transcript()


def test_there_are_no_other_exchanges(now: dict[str, Any]) -> None:
    assert now.keys() == GOLDEN.keys()


@pytest.mark.parametrize("name", GOLDEN)
def test_what_the_server_sends_is_as_recorded(now: dict[str, Any], name: str) -> None:
    assert now[name] == GOLDEN[name]
