"""A server without API keys answers its own machine, and no web site that the machine's browser has open."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from blendserve.config import ServeConfig
from blendserve.errors import ConfigError
from blendserve.serve.server import listen
from tests.support.http import ORIGIN, Server, serving
from tests.support.peers import Service

NAME = "rag.example.org"
DOCUMENTS = '{"documents": [{"text": "Forged."}], "collection": "a"}'


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("open"), hosts=(NAME,), cors_origins=(ORIGIN,)) as made:
        yield made


@pytest.fixture(scope="module")
def delivery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("published"), hosts=(NAME,)) as made:
        yield made


@pytest.fixture(params=["opened", "delivery"])
def url(request: pytest.FixtureRequest) -> str:
    """Of every kind of server."""
    made: Any = request.getfixturevalue(request.param)
    return str(made.url)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/openapi.json", "/nothing"])
def test_a_rebound_name_reaches_no_route(url: str, path: str) -> None:
    port = url.rpartition(":")[2]
    foreign = [
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "[::1",
        "127.0.0.1@evil.example",
    ]
    own = [f"127.0.0.1:{port}", "localhost", f"LOCALHOST:{port}", f"[::1]:{port}", NAME]
    for host in (*foreign, ""):
        assert httpx.get(url + path, headers={"Host": host}).status_code in (400, 403), host
    for host in own:
        assert httpx.get(url + path, headers={"Host": host}).status_code not in (400, 403), host


def test_a_plain_form_changes_nothing(opened: Server) -> None:
    """Whatever its type of content, and without a body, too. Pages of the server and of allowed origins may."""
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", f"{ORIGIN}.evil.example"):
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json"):
            headers = {"Content-Type": kind, "Origin": origin}
            for path in ("/v1/documents", "/v1/cache/pin"):
                sent = opened.http.post(path, content=DOCUMENTS, headers=headers)
                assert sent.status_code == 403, (origin, kind)
            assert opened.http.post("/v1/cache/pin", headers={"Origin": origin}).status_code == 403
    for origin in (opened.url, ORIGIN):
        sent = opened.http.post("/v1/cache/lookup", json={"passages": []}, headers={"Origin": origin})
        assert sent.status_code == 200


def test_a_body_without_a_type_is_not_read(opened: Server) -> None:
    for headers in ({}, {"Content-Type": "text/plain"}):
        assert opened.http.post("/v1/documents", content=DOCUMENTS, headers=headers).status_code == 400


def test_no_script_comes_from_elsewhere(opened: Server) -> None:
    """FastAPI's pages of documentation would load theirs from a foreign host."""
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        assert opened.get(path).status_code == 404
    assert opened.get("/openapi.json").status_code == 200


def test_a_clients_address_is_its_own_unless_a_named_proxy_says_another(tmp_path_factory: Any) -> None:
    """Without keys, limits hold for each address."""
    forged = [{"X-Forwarded-For": f"10.0.0.{n}"} for n in range(4)]
    for proxies, last in (((), 429), (("127.0.0.0/8",), 200)):
        with serving(tmp_path_factory.mktemp("proxy"), max_per_minute=2, proxies=proxies) as made:
            codes = [made.http.get("/v1/models", headers=headers).status_code for headers in forged]
        assert codes[-1] == last
    with pytest.raises(ConfigError):
        ServeConfig(proxies=("my.proxy",))


def test_every_listener_refuses_an_address_without_keys() -> None:
    backend: Any = SimpleNamespace(http=ServeConfig(host="0.0.0.0"))
    with pytest.raises(ConfigError):
        listen(FastAPI(), backend)
