"""Keys, limits, and two tenants who must not learn of each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from blendserve.errors import Busy, ConfigError, NotAuthenticated
from blendserve.serve.config import ServeConfig, check_binding
from blendserve.serve.keys import KeyFile, Tenant
from blendserve.serve.limits import Limits
from tests.engine.helpers import PASSAGES, QUESTIONS, wait_for
from tests.serve.helpers import Server, hold

OWN = [{"text": p.text, "title": p.title} for p in PASSAGES]
ASK: dict[str, Any] = {"question": QUESTIONS[0], "passages": OWN, "max_tokens": 2}


class Shop:
    """A server with three keys."""

    def __init__(self, folder: Path) -> None:
        file = KeyFile(folder / "keys.json")
        self.ann = file.create(Tenant("ann", "space-a", ("a",), max_concurrent=2))
        self.bob = file.create(Tenant("bob", "space-b", ("b",), read_only=True, max_per_minute=40))
        self.root = file.create(Tenant("root", admin=True))
        self.server = Server(folder, ServeConfig(keys=file.path))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    made = Shop(tmp_path_factory.mktemp("shop"))
    yield made
    made.server.close()


def test_without_a_valid_key_nothing_is_answered(shop: Shop) -> None:
    for key in ("", "bsk-guess", shop.ann + "x", "a b"):
        for answer in (shop.server.post("/v1/rag/query", ASK, key), shop.server.get("/metrics", key)):
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert shop.server.get("/health").status_code == 200


def test_the_same_document_under_two_namespaces(shop: Shop) -> None:
    """Nothing that the first one did is hit, counted or found by the second one."""
    first = shop.server.post("/v1/rag/query", ASK, shop.ann).json()
    assert first["report"]["chunks_missing"] == len(OWN)
    warmed = shop.server.job(shop.server.post("/v1/cache/warm", {"passages": OWN}, shop.ann), shop.ann)
    assert (warmed["state"], warmed["computed"]) == ("done", len(OWN))
    again = shop.server.post("/v1/rag/query", ASK, shop.ann).json()
    assert again["report"]["chunks_hit"] == len(OWN)

    before = shop.server.get("/v1/cache/stats", shop.bob).json()
    assert (before["chunks"], before["bytes"], before["hits"], before["misses"]) == (0, 0, 0, 0)
    looked = shop.server.post("/v1/cache/lookup", {"passages": OWN}, shop.bob).json()
    assert looked["found"] == 0
    other = shop.server.post("/v1/rag/query", {**ASK, "max_tokens": 1}, shop.bob).json()
    assert other["report"]["chunks_hit"] == 0
    assert other["report"]["bytes_loaded"] == 0
    assert other["cached_tokens"] == 0
    mine = shop.server.get("/v1/cache/stats", shop.ann).json()
    assert mine["chunks"] == len(OWN) + 1  # and the prefix
    assert "evictions" not in mine


def test_collections_and_jobs_are_their_owners(shop: Shop) -> None:
    assert shop.server.get("/v1/models", shop.ann).json()["data"][0]["x_blendserve"]["collections"] == ["a"]
    refused = shop.server.post("/v1/rag/query", {**ASK, "passages": None, "collections": ["b"]}, shop.ann)
    missing = shop.server.post("/v1/rag/query", {**ASK, "passages": None, "collections": ["c"]}, shop.ann)
    assert refused.status_code == missing.status_code == 404
    assert refused.json()["error"]["message"].replace("'b'", "'c'") == missing.json()["error"]["message"]
    job = shop.server.post("/v1/cache/warm", {"passages": OWN[:1]}, shop.ann)
    shop.server.job(job, shop.ann)
    assert shop.server.get(f"/v1/jobs/{job.json()['id']}", shop.bob).status_code == 404


def test_rights(shop: Shop) -> None:
    text = {"documents": [{"text": "New."}]}
    assert shop.server.post("/v1/documents", text, shop.bob).status_code == 403
    assert (
        shop.server.http.delete(
            "/v1/documents/dogs", headers={"Authorization": f"Bearer {shop.bob}"}
        ).status_code
        == 403
    )
    assert shop.server.get("/metrics", shop.ann).status_code == 403
    assert "blendserve_ttft_seconds" in shop.server.get("/metrics", shop.root).text


def test_one_key_may_have_so_many_requests_at_a_time(shop: Shop) -> None:
    busy, server = threading.Event(), shop.server
    hold(server.service.scheduler, busy)  # the model's thread, until it is let go
    with ThreadPoolExecutor(2) as pool:
        held = [pool.submit(server.post, "/v1/rag/query", ASK, shop.ann) for _ in range(2)]
        wait_for(lambda: server.service.scheduler.load[0] == 2)
        refused, other = server.post("/v1/rag/query", ASK, shop.ann), server.get("/v1/models", shop.bob)
        busy.set()
        assert [h.result().status_code for h in held] == [200, 200]
    assert refused.status_code == 429
    assert refused.headers["Retry-After"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert other.status_code == 200


def test_a_rate_is_kept() -> None:
    limits, tenant = Limits(10, 60), Tenant("t", max_per_minute=3)
    for _ in range(3):
        limits.pay(tenant)
    with pytest.raises(Busy, match="3 requests per minute: try again in 20 s") as error:
        limits.pay(tenant)
    assert error.value.retry_after == 20
    limits.pay(Tenant("other"))


def test_concurrency_is_counted_down_when_a_request_fails() -> None:
    limits, tenant = Limits(1, 60), Tenant("t")
    for _ in range(3):
        with pytest.raises(KeyError), limits.one(tenant):
            raise KeyError
    with limits.one(tenant), pytest.raises(Busy), limits.one(tenant):
        pass


def test_the_file_holds_no_key_and_is_its_owners_alone(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    key = file.create(Tenant("ann", "space", ("a", "b"), max_per_minute=5))
    assert key not in file.path.read_text()
    assert key.removeprefix("bsk-") not in file.path.read_text()
    assert file.path.stat().st_mode & 0o077 == 0
    other = KeyFile(file.path)
    assert other.tenant(key) == Tenant("ann", "space", ("a", "b"), max_per_minute=5)
    with pytest.raises(ConfigError, match="'ann' already has a key"):
        other.create(Tenant("ann"))
    file.revoke("ann")
    with pytest.raises(NotAuthenticated):
        other.tenant(key)  # the running server sees it at once
    with pytest.raises(ConfigError, match="no key for 'ann'"):
        file.revoke("ann")


def test_a_broken_file_leaves_the_keys_in_force(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    key = file.create(Tenant("ann"))
    assert file.tenant(key).name == "ann"
    file.path.write_text("{")
    assert file.tenant(key).name == "ann"
    with pytest.raises(ConfigError, match="damaged"):
        KeyFile(file.path).tenants()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_others_are_not_let_in_without_keys(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no API keys are set"):
        check_binding(ServeConfig(host=host))
    check_binding(ServeConfig(host=host, keys=tmp_path / "keys.json"))
    check_binding(ServeConfig(host=host, api_key="secret"))
    check_binding(ServeConfig())
