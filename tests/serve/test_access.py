"""Keys, rights and limits; tenants that must not learn of each other; model names and CORS."""

from __future__ import annotations

import hmac
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from blendserve.config import Config, ServeConfig, check_binding
from blendserve.errors import ConfigError, NotAuthenticated, RateLimited
from blendserve.serve.engine_client import served_names
from blendserve.serve.keys import ApiKeys, KeyFile, Tenant
from blendserve.serve.limits import BURST_BYTES, BYTES_PER_S, MAX_TENANTS, Limits, TokenBucket
from tests.support.engines import QUESTIONS
from tests.support.http import KEY, MODEL, ORIGIN, OWN, Client, Server
from tests.support.waiting import ManualClock

ASK: dict[str, Any] = {"question": QUESTIONS[0], "passages": OWN, "max_tokens": 2}


def test_without_a_valid_key_nothing_is_answered(server: Server, client: Client) -> None:
    for key in ("", "bsk-guess", client.key + "x", "a b", KEY[:-1], KEY + "x", KEY.upper()):
        other = server.with_key(key)
        assert [other.post("/v1/rag/query", ASK).status_code, other.get("/metrics").status_code] == [401, 401]
    assert [c.get("/metrics").status_code for c in (server.with_key(KEY), client)] == [200, 200]


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
    report = other["report"]
    assert [report["chunks_hit"], report["bytes_loaded"], report["tokens_reused"]] == [0, 0, 0]
    assert other["cached_tokens"] == report["tokens_exact"]  # the prefix, which all tenants have
    assert ann.get("/v1/cache/stats").json()["chunks"] == len(OWN)

    names = [t.get("/v1/models").json()["data"][0]["x_blendserve"]["collections"] for t in (ann, bob)]
    assert names == [["a"], ["b"]]
    refused, missing = (
        ann.post("/v1/rag/query", {"question": "What?", "collections": [name]}) for name in "bc"
    )
    assert refused.status_code == missing.status_code == 404
    assert refused.json()["error"]["message"].replace("'b'", "'c'") == missing.json()["error"]["message"]
    assert ann.get("/v1/documents?collection=b").status_code == 404
    job = ann.post("/v1/cache/warm", {"passages": OWN[:1]}).json()["id"]
    assert [t.get(f"/v1/jobs/{job}").status_code for t in (ann, bob)] == [200, 404]


@pytest.mark.parametrize(("rights", "most"), [({"max_concurrent": 2}, 2), ({}, 12)], ids=["key", "queue"])
def test_too_many_requests_are_429_and_none_that_waits_is_lost(
    server: Server, rights: dict[str, int], most: int
) -> None:
    limited, other = server.tenant(**rights), server.tenant()
    with server.busy() as release, ThreadPoolExecutor(most) as pool:
        held = [pool.submit(limited.post, "/v1/rag/query", ASK) for _ in range(most)]
        server.wait_for_load(most)
        refused = limited.post("/v1/rag/query", ASK)
        assert other.get("/v1/models").status_code == 200
        release.set()
        assert {h.result().status_code for h in held} == {200}
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["Retry-After"]) <= (1 if rights else 60)


def test_limits_count_requests_and_forget_failed_ones() -> None:
    clock = ManualClock()
    limits, tenant = Limits(1, 60, clock.monotonic), Tenant("t", max_per_minute=3)
    for _ in range(3):
        limits.take_request(tenant)
    with pytest.raises(RateLimited) as error:
        limits.take_request(tenant)
    assert error.value.retry_after == 20
    limits.take_request(Tenant("other"))
    clock.advance(20)
    limits.take_request(tenant)
    for _ in range(3):
        with pytest.raises(KeyError), limits.concurrency_slot(tenant):
            raise KeyError
    with limits.concurrency_slot(tenant), pytest.raises(RateLimited), limits.concurrency_slot(tenant):
        pass


def test_bytes_beyond_a_burst_wait_for_their_rate() -> None:
    clock = ManualClock()
    limits, tenant = Limits(1, 60, clock.monotonic), Tenant("t")
    assert limits.throttle(tenant, BURST_BYTES) == 0
    assert limits.throttle(tenant, BYTES_PER_S) == 1
    assert limits.throttle(Tenant("other"), 1) == 0
    clock.advance(0.5)
    assert limits.throttle(tenant, 0) == 0.5


def test_a_bucket_forgets_only_the_tenant_that_is_idle_for_longest() -> None:
    bucket = TokenBucket(ManualClock().monotonic)
    names = [str(n) for n in range(MAX_TENANTS + 1)]
    for name in [*names[:-1], names[0], names[-1]]:
        bucket.use(name, 1, 1)
    assert [bucket.wait_s(name, 0, 1) for name in (names[0], names[1], names[-1])] == [2, 0, 1]


def test_the_key_file_holds_no_key_and_is_its_owners_alone(tmp_path: Path) -> None:
    file, ann = KeyFile(tmp_path / "keys.json"), Tenant("ann", "space", ("a", "b"), max_per_minute=5)
    key = file.create(ann)
    assert key.removeprefix("bsk-") not in file.path.read_text()
    assert file.path.stat().st_mode & 0o077 == 0
    running = ApiKeys(ServeConfig(keys=file.path), "")
    assert running.tenant(key) == ann
    with pytest.raises(ConfigError):
        file.create(Tenant("ann"))
    file.path.write_text((whole := file.path.read_text())[:-9])
    assert running.tenant(key) == ann  # a damaged file leaves the keys in force
    for damaged in (file.read, lambda: ApiKeys(ServeConfig(keys=file.path), "")):
        with pytest.raises(ConfigError) as error:
            damaged()
        assert error.value.path == str(file.path)
    file.path.write_text(whole)
    file.revoke("ann")
    with pytest.raises(NotAuthenticated):
        running.tenant(key)  # a running server sees it at once
    with pytest.raises(ConfigError):
        file.revoke("ann")


def test_a_key_is_compared_with_every_entry_in_constant_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the time of a comparison nor the number of comparisons tells what was similar, or where."""
    file, compared = KeyFile(tmp_path / "keys.json"), list[tuple[str, str]]()
    created = [file.create(Tenant(name)) for name in "abc"]
    keys = ApiKeys(ServeConfig(keys=file.path, api_key=KEY), "")

    def compare(known: str, digest: str) -> bool:
        compared.append((known, digest))
        return known == digest

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key in (*created, KEY, "wrong", ""):
        compared.clear()
        if key in ("wrong", ""):
            with pytest.raises(NotAuthenticated):
                keys.tenant(key)
        else:
            keys.tenant(key)
        assert len({known for known, _ in compared}) == len(compared) == len(created) + 1


def test_the_single_key_may_do_everything_in_the_default_namespace() -> None:
    keys = ApiKeys(ServeConfig(api_key=KEY), "space")
    found = keys.tenant(KEY)
    assert (found.namespace, found.admin, found.read_only, found.collections) == ("space", True, False, None)
    assert keys.namespaces() == {"space"}


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


def test_an_address_that_others_reach_needs_keys(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ConfigError):
            check_binding(ServeConfig(host=host))
        check_binding(ServeConfig(host=host, keys=tmp_path / "keys.json"))
        check_binding(ServeConfig(host=host, api_key="secret"))
    check_binding(ServeConfig(cors_origins=("*", "https://app.example.org")))


def test_the_key_of_the_environment_and_of_no_printed_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLENDSERVE_API_KEY", KEY)
    own = Config(serve=ServeConfig(api_key="own").model_dump())
    assert own.with_environment_key() == own
    made = Config().with_environment_key()
    assert made.serve.api_key is not None
    assert made.serve.api_key.get_secret_value() == KEY
    assert KEY not in repr(made) + made.to_yaml()
    assert Config(**yaml.safe_load(made.to_yaml())) == Config() == made.without_keys()
    monkeypatch.setenv("BLENDSERVE_API_KEY", "")
    with pytest.raises(ConfigError):
        Config().with_environment_key()


def test_names_of_the_model(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [m.id for m in client.openai.models.list()] == ["public"]
    assert [client.openai.models.retrieve(name).id for name in ("public", MODEL)] == ["public"] * 2
    assert client.chat(documents=OWN, max_tokens=2).model == "public"
    folder = tmp_path / "models" / "llama-1b"
    folder.mkdir(parents=True)
    assert served_names(f"{folder}/", None) == ("llama-1b", f"{folder}/")
    assert served_names(str(folder), "mine") == ("mine", str(folder))
    assert served_names("Qwen/Qwen2.5-0.5B-Instruct", None) == ("Qwen/Qwen2.5-0.5B-Instruct",)
    monkeypatch.chdir(folder)
    assert served_names(".", None) == ("llama-1b", ".")


def test_a_preflight_request_needs_no_key(server: Server) -> None:
    wanted = {"authorization", "content-type", "x-stainless-os"}
    asking = {"Request-Method": "POST", "Request-Headers": ", ".join(sorted(wanted))}
    headers = {f"Access-Control-{name}": value for name, value in asking.items()}
    answer, other = (
        server.http.options("/v1/chat/completions", headers={**headers, "Origin": origin})
        for origin in (ORIGIN, "http://evil.example")
    )
    assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (200, ORIGIN)
    assert wanted <= set(answer.headers["Access-Control-Allow-Headers"].lower().replace(" ", "").split(","))
    assert "Access-Control-Allow-Credentials" not in answer.headers
    assert "Access-Control-Allow-Origin" not in other.headers
