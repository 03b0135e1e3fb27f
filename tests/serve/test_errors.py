"""What is wrong with a body is said in clear words, with its place."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import APIRouter
from pydantic import BaseModel, model_validator
from starlette.testclient import TestClient

from blendserve.config import HttpConfig
from blendserve.errors import NotFound
from blendserve.serve.app import create_app
from blendserve.serve.auth import ServiceBackend
from blendserve.serve.jobs import MAX_JOBS, Job, Jobs
from blendserve.serve.metrics import HttpMetrics

WHY = "the first must come before the last"


class Inner(BaseModel):
    text: str = ""


class Toy(BaseModel):
    first: int = 0
    last: int = 1
    parts: list[Inner | int] = []

    @model_validator(mode="after")
    def _in_order(self) -> Toy:
        if self.first > self.last:
            raise ValueError(WHY)
        return self


class Outer(BaseModel):
    toys: list[Toy] = []


@pytest.fixture(scope="module")
def client() -> TestClient:
    router = APIRouter()

    @router.post("/toy")
    async def toy(body: Toy) -> None: ...

    @router.post("/outer")
    async def outer(body: Outer) -> None: ...

    backend = ServiceBackend(HttpConfig(), HttpMetrics())
    return TestClient(create_app(backend, [router]), "http://127.0.0.1")


JSON = "application/json"
WRONG: list[
    tuple[str, bytes, str, str | None, tuple[str, ...]]
] = [  # path, body, type; field, words of the message
    ("toy", b'{"first": 2}', JSON, None, (WHY,)),
    ("outer", b'{"toys": [{}, {"first": 2}]}', JSON, "toys.1", ("toys.1", WHY)),
    ("toy", b'{"first": "x"}', JSON, "first", ("first",)),
    ("toy", b'{"parts": [1, {"text": 5}]}', JSON, "parts.1.Inner.text", ("parts.1",)),
    ("toy", b'{"first": 1,}', JSON, None, ("not JSON", "position 12")),
    ("toy", b"", JSON, None, ("not a JSON object",)),
    ("toy", b"[1]", JSON, None, ("not a JSON object",)),
    ("toy", b'{"first": 1}', "text/plain", None, ("not a JSON object", JSON)),
    ("toy", b'{"note": "caf\xe9"}', JSON, None, ("not UTF-8", "0xe9", "position 13")),
    ("toy", '{"note": "x"}'.encode("utf-16"), JSON, None, ("UTF-8",)),
]


@pytest.mark.parametrize(("path", "body", "kind", "field", "words"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_body_is_told_its_place(
    client: TestClient, path: str, body: bytes, kind: str, field: str | None, words: tuple[str, ...]
) -> None:
    response = client.post(f"/{path}", content=body, headers={"Content-Type": kind})
    error: dict[str, Any] = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    for word in words:
        assert word in error["message"]


def test_jobs_of_one_tenant_push_out_none_of_another() -> None:
    """Nor a running one; and in all there are not more than are remembered."""

    async def run() -> None:
        jobs, release = Jobs(), asyncio.Event()

        async def nothing(job: Job) -> None: ...

        async def long(job: Job) -> None:
            await release.wait()

        running, ended = jobs.start("a", "long", long), jobs.start("b", "short", nothing)
        for n in range(MAX_JOBS + 100):
            jobs.start("a" if n % 10 else f"c{n}", "short", nothing)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert jobs.get("b", ended.id).state == "done"
        assert jobs.get("a", running.id).state == "running"
        assert len(jobs.of("a")) < MAX_JOBS
        with pytest.raises(NotFound):
            jobs.get("a", ended.id)
        release.set()

    asyncio.run(run())
