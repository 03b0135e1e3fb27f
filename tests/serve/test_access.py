"""Keys, rights and limits; tenants that must not learn of each other; model names and CORS."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from blendserve.errors import Busy, ConfigError, NotAuthenticated
from blendserve.serve.asking import served_names
from blendserve.serve.config import Config, ServeConfig, check_binding, effective, with_environment_key
from blendserve.serve.keys import ApiKeys, KeyFile, Tenant
from blendserve.serve.limits import Limits
from tests.support.http import KEY, MODEL, ORIGIN, OWN, QUESTIONS, Server, TenantClient

ASK: dict[str, Any] = {"question": QUESTIONS[0], "passages": OWN, "max_tokens": 2}
CHAT = "/v1/chat/completions"


def test_without_a_valid_key_nothing_is_answered(server: Server, client: TenantClient) -> None:
    for key in ("", "bsk-guess", client.key + "x", "a b", KEY[:-1], KEY + "x", KEY.upper()):
        for answer in (server.post("/v1/rag/query", ASK, key), server.get("/metrics", key)):
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
    with pytest.raises(openai.AuthenticationError):
        server.client("none").models.list()
    assert server.get("/health").status_code == 200
    assert [server.get("/metrics", key).status_code for key in (KEY, client.key)] == [200, 200]


def test_one_tenant_sees_nothing_of_another(server: Server) -> None:
    """The same documents under two namespaces: the second tenant hits, counts and finds none of the first one's."""
    ann, bob = server.tenant(collections=("a",)), server.tenant(collections=("b",))
    assert ann.ask(passages=OWN)["report"]["chunks_missing"] == len(OWN)
    assert ann.warm()["computed"] == len(OWN)
    assert ann.ask(passages=OWN)["report"]["chunks_hit"] == len(OWN)

    before = bob.get("/v1/cache/stats").json()
    assert [before[name] for name in ("chunks", "bytes", "hits", "misses")] == [0] * 4
    assert bob.post("/v1/cache/lookup", {"passages": OWN}).json()["found"] == 0
    other = bob.ask(passages=OWN, max_tokens=1)
    assert (other["report"]["chunks_hit"], other["report"]["bytes_loaded"], other["cached_tokens"]) == (
        0,
        0,
        0,
    )
    assert ann.get("/v1/cache/stats").json()["chunks"] == len(OWN) + 1  # and the prefix

    names = [t.get("/v1/models").json()["data"][0]["x_blendserve"]["collections"] for t in (ann, bob)]
    assert names == [["a"], ["b"]]
    refused, missing = (
        ann.post("/v1/rag/query", {"question": "What?", "collections": [name]}) for name in "bc"
    )
    assert refused.status_code == missing.status_code == 404
    assert refused.json()["error"]["message"].replace("'b'", "'c'") == missing.json()["error"]["message"]
    assert ann.get("/v1/documents?collection=b").status_code == 404
    job = ann.post("/v1/cache/warm", {"passages": OWN[:1]}).json()["id"]
    assert (ann.get(f"/v1/jobs/{job}").status_code, bob.get(f"/v1/jobs/{job}").status_code) == (200, 404)


def test_rights(server: Server) -> None:
    reading = server.tenant(read_only=True, collections=("a",))
    assert reading.post("/v1/documents", {"documents": [{"text": "New."}]}).status_code == 403
    assert reading.delete("/v1/documents/cats").status_code == 403
    assert reading.get("/metrics").status_code == 403


def test_a_key_has_a_limit_of_concurrent_requests(server: Server, client: TenantClient) -> None:
    limited = server.tenant(max_concurrent=2)
    with server.busy() as release, ThreadPoolExecutor(2) as pool:
        held = [pool.submit(limited.post, "/v1/rag/query", ASK) for _ in range(2)]
        server.wait_for_load(2)
        refused, other = limited.post("/v1/rag/query", ASK), client.get("/v1/models")
        release.set()
        assert [h.result().status_code for h in held] == [200, 200]
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert other.status_code == 200


def test_limits_count_requests_and_forget_failed_ones() -> None:
    limits, tenant = Limits(1, 60), Tenant("t", max_per_minute=3)
    for _ in range(3):
        limits.pay(tenant)
    with pytest.raises(Busy) as error:
        limits.pay(tenant)
    assert error.value.retry_after == 20
    limits.pay(Tenant("other"))
    for _ in range(3):
        with pytest.raises(KeyError), limits.one(tenant):
            raise KeyError
    with limits.one(tenant), pytest.raises(Busy), limits.one(tenant):
        pass


def test_the_key_file_holds_no_key_and_is_its_owners_alone(tmp_path: Path) -> None:
    file, ann = KeyFile(tmp_path / "keys.json"), Tenant("ann", "space", ("a", "b"), max_per_minute=5)
    key = file.create(ann)
    assert key.removeprefix("bsk-") not in file.path.read_text()
    assert file.path.stat().st_mode & 0o077 == 0
    other = KeyFile(file.path)
    assert other.tenant(key) == ann
    with pytest.raises(ConfigError):
        other.create(Tenant("ann"))
    file.path.write_text((whole := file.path.read_text())[:-9])
    assert other.tenant(key) == ann  # a broken file leaves the keys in force
    with pytest.raises(ConfigError):
        KeyFile(file.path).tenants()
    file.path.write_text(whole)
    file.revoke("ann")
    with pytest.raises(NotAuthenticated):
        other.tenant(key)  # a running server sees it at once
    with pytest.raises(ConfigError):
        file.revoke("ann")


def test_the_single_key_may_do_everything_in_the_default_namespace() -> None:
    keys = ApiKeys(None, KEY, "space")
    assert (keys.tenant(KEY).namespace, keys.tenant(KEY).admin, keys.namespaces()) == (
        "space",
        True,
        {"space"},
    )
    assert (keys.tenant(KEY).read_only, keys.tenant(KEY).collections) == (False, None)
    with pytest.raises(NotAuthenticated):
        keys.tenant("other")


@pytest.mark.parametrize(
    "settings",
    [
        *({"api_key": key} for key in ("", "two words", "k\u00e9y", "line\n", 123)),
        *({"cors_origins": (o,)} for o in ("localhost:3000", "http://a.b/app", "http://a.b/", "", "http://")),
    ],
    ids=str,
)
def test_wrong_keys_and_origins_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        ServeConfig(**settings)
    if key := settings.get("api_key"):
        assert str(key) not in repr(error.value)
    ServeConfig(api_key="k", cors_origins=("*", "https://app.example.org"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_an_address_that_others_reach_needs_keys(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        check_binding(ServeConfig(host=host))
    check_binding(ServeConfig(host=host, keys=tmp_path / "keys.json"))
    check_binding(ServeConfig(host=host, api_key="secret"))
    check_binding(ServeConfig())


def test_the_key_of_the_environment_and_of_no_printed_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLENDSERVE_API_KEY", raising=False)
    assert with_environment_key(Config()) == Config()
    monkeypatch.setenv("BLENDSERVE_API_KEY", KEY)
    own = Config(serve=ServeConfig(api_key="own").model_dump())
    assert with_environment_key(own) == own
    made = with_environment_key(Config())
    assert made.serve.api_key is not None
    assert made.serve.api_key.get_secret_value() == KEY
    shown = effective(made, ["indexes/demo"])
    assert KEY not in shown + repr(made) + made.to_yaml()
    values = yaml.safe_load(shown)
    assert values.pop("indexes") == ["indexes/demo"]
    assert Config(**values) == Config()
    monkeypatch.setenv("BLENDSERVE_API_KEY", "")
    with pytest.raises(ConfigError):
        with_environment_key(Config())


def test_names_of_the_model(client: TenantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [m.id for m in client.openai.models.list()] == ["public"]
    for name in ("public", MODEL):
        assert client.openai.models.retrieve(name).id == "public"
    assert client.chat(documents=OWN, max_tokens=2).model == "public"
    for call in (
        client.openai.models.retrieve,
        lambda model: client.openai.completions.create(model=model, prompt="?"),
    ):
        with pytest.raises(openai.NotFoundError):
            call("gpt-9")
    folder = tmp_path / "models" / "llama-1b"
    folder.mkdir(parents=True)
    assert served_names(f"{folder}/", None) == ("llama-1b", f"{folder}/")
    assert served_names(str(folder), "mine") == ("mine", str(folder))
    assert served_names("Qwen/Qwen2.5-0.5B-Instruct", None) == ("Qwen/Qwen2.5-0.5B-Instruct",)
    monkeypatch.chdir(folder)
    assert served_names(".", None) == ("llama-1b", ".")


def test_a_preflight_request_needs_no_key(server: Server) -> None:
    asking = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
    }
    answer = server.http.options(CHAT, headers=asking)
    assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (200, ORIGIN)
    allowed = answer.headers["Access-Control-Allow-Headers"].lower()
    assert {"authorization", "content-type", "x-stainless-os"} <= set(allowed.replace(" ", "").split(","))
    assert "Access-Control-Allow-Credentials" not in answer.headers
    other = server.http.options(CHAT, headers={**asking, "Origin": "http://evil.example"})
    assert "Access-Control-Allow-Origin" not in other.headers
