"""Keys, rights and limits; tenants that must not learn of each other; hostile bodies; the page's files and CORS."""

from __future__ import annotations

import hmac
import json
import select
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import yaml

from blendserve.config import Config, ServeConfig, check_binding
from blendserve.errors import ConfigError, InputError, NotAuthenticated, RateLimited
from blendserve.serve.app import PAGE
from blendserve.serve.engine_client import served_names
from blendserve.serve.keys import (
    BURST_BYTES,
    BYTES_PER_S,
    MAX_TENANTS,
    ApiKeys,
    KeyFile,
    Limits,
    Tenant,
    TokenBucket,
)
from blendserve.serve.middleware import MAX_JSON_DEPTH, MAX_JSON_TOKENS, check_json_complexity
from tests.support.engines import QUESTIONS
from tests.support.http import KEY, MODEL, ORIGIN, OWN, Client, Server, serving
from tests.support.waiting import ManualClock

ASK: dict[str, Any] = {"question": QUESTIONS[0], "passages": [], "max_tokens": 1}
PATH = "/v1/rag/query"
LENGTH, CHUNKED = "Content-Length: 9999", "Transfer-Encoding: chunked"


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
    assert {other["report"][name] for name in ("chunks_hit", "bytes_loaded", "tokens_reused")} == {0}
    assert other["cached_tokens"] == other["report"]["tokens_exact"]  # the prefix, which all tenants have
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


def test_too_many_requests_are_429_and_none_that_waits_is_lost(server: Server) -> None:
    limited, other, most = server.tenant(), server.tenant(), server.serve.max_concurrent
    with server.busy() as release, ThreadPoolExecutor(most) as pool:
        held = [pool.submit(limited.post, PATH, ASK) for _ in range(most)]
        server.wait_for_load(most)
        refused = limited.post(PATH, ASK)
        assert other.get("/v1/models").status_code == 200
        release.set()
        assert {h.result().status_code for h in held} == {200}
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["Retry-After"]) <= 60


def test_limits_count_requests_and_forget_failed_ones() -> None:
    clock = ManualClock()
    limits, tenant = Limits(1, 60, clock.monotonic), Tenant("t", max_per_minute=3)
    slot = limits.concurrency_slot
    for _ in range(3):
        limits.take_request(tenant)
    with pytest.raises(RateLimited) as error:
        limits.take_request(tenant)
    assert error.value.retry_after == 20
    limits.take_request(Tenant("other"))
    clock.advance(20)
    limits.take_request(tenant)
    for _ in range(3):
        with pytest.raises(KeyError), slot(tenant):
            raise KeyError
    with slot(tenant), pytest.raises(RateLimited) as error, slot(tenant):
        pass
    assert error.value.retry_after == 1


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
    running = ApiKeys(ServeConfig(keys=file.path, api_key=KEY), "default")
    assert [running.tenant(k) for k in (key, KEY)] == [ann, Tenant("api-key", "default", admin=True)]
    assert running.namespaces() == {"space", "default"}
    with pytest.raises(ConfigError):
        file.create(Tenant("ann"))
    file.path.write_text((whole := file.path.read_text())[:-9])
    for damaged in (file.read, lambda: ApiKeys(ServeConfig(keys=file.path), "")):
        with pytest.raises(ConfigError) as error:
            damaged()
        assert error.value.path == str(file.path)
    file.path.write_text(whole)
    assert running.tenant(key) == ann
    file.revoke("ann")
    with pytest.raises(NotAuthenticated):
        running.tenant(key)  # a running server sees it at once
    with pytest.raises(ConfigError):
        file.revoke("ann")


@pytest.mark.parametrize("content", [None, "", '{"keys": [', '{"keys": 5}', '{"keys": [{}]}', '{"keys": []}'])
def test_a_key_file_that_cannot_be_read_has_no_valid_key(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Deleting the file must not leave its keys in force; the log says why, once."""
    file = KeyFile(tmp_path / "keys.json")
    key = file.create(Tenant("ann"))
    running = ApiKeys(ServeConfig(keys=file.path, api_key=KEY), "")
    whole = file.path.read_text()
    file.path.unlink()
    if content is not None:
        file.path.write_text(content)
    for _ in range(3):
        with pytest.raises(NotAuthenticated):
            running.tenant(key)
    assert running.tenant(KEY).admin
    assert len(caplog.records) <= 1
    file.path.write_text(whole)
    assert running.tenant(key).name == "ann"


def test_keys_that_are_created_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    """By threads here: each has a KeyFile of its own, as each process has."""
    path, names = tmp_path / "new" / "keys.json", [f"t{n}" for n in range(24)]
    with ThreadPoolExecutor(len(names)) as pool:
        created = [*pool.map(lambda name: KeyFile(path).create(Tenant(name)), names)]
        running = ApiKeys(ServeConfig(keys=path), "")
        assert [running.tenant(key).name for key in created] == names
        [*pool.map(lambda name: KeyFile(path).revoke(name), names[::2])]
    assert sorted(tenant.name for tenant in KeyFile(path).read().values()) == sorted(names[1::2])
    assert [file.name for file in path.parent.iterdir() if file.name.endswith("json")] == [path.name]


def test_a_key_is_compared_with_every_entry_in_constant_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the time of a comparison nor the number of comparisons tells what was similar, or where."""
    file, compare = KeyFile(tmp_path / "keys.json"), Mock(wraps=hmac.compare_digest)
    created = [file.create(Tenant(name)) for name in "abc"]
    keys = ApiKeys(ServeConfig(keys=file.path, api_key=KEY), "")
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key in (*created, KEY, "wrong", ""):
        compare.reset_mock()
        with suppress(NotAuthenticated):
            keys.tenant(key)
        assert len({known for (known, _), _ in compare.call_args_list}) == compare.call_count == 4


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


def test_the_key_of_the_environment_and_of_no_printed_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLENDSERVE_API_KEY", KEY)
    own = Config().replace("serve.api_key", "own")
    assert own.with_environment_key() == own
    made = Config().with_environment_key()
    assert made == Config().replace("serve.api_key", KEY) != Config()
    assert KEY not in repr(made) + made.to_yaml()
    assert Config(**yaml.safe_load(made.to_yaml())) == Config() == Config().without_keys()
    assert made.without_keys() == Config().replace("store.write_back", "missing")
    monkeypatch.setenv("BLENDSERVE_API_KEY", "")
    with pytest.raises(ConfigError):
        Config().with_environment_key()


def test_names_of_the_model(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [client.openai.models.retrieve(name).id for name in ("public", MODEL)] == ["public"] * 2
    assert client.chat(documents=OWN, max_tokens=2).model == "public"
    folder = tmp_path / "models" / "llama-1b"
    folder.mkdir(parents=True)
    assert served_names(f"{folder}/", ()) == ("llama-1b", f"{folder}/")
    assert served_names(str(folder), ("mine", "my")) == ("mine", "my", str(folder))
    assert served_names("Qwen/Qwen2.5-0.5B-Instruct", ()) == ("Qwen/Qwen2.5-0.5B-Instruct",)
    monkeypatch.chdir(folder)
    assert served_names(".", ()) == ("llama-1b", ".")


def test_the_files_of_the_page_and_no_others_are_sent_without_a_key(server: Server) -> None:
    """Under a policy by which the page loads nothing from elsewhere, and makes no markup of text."""
    policy = server.get("/").headers[name := "Content-Security-Policy"]
    for file in PAGE.iterdir():
        sent = server.get(f"/page/{file.name}")
        assert (sent.content, sent.headers[name]) == (file.read_bytes(), policy)
    for other in ("nothing.js", "..%2fapp.py", "%2e%2e/app.py", "..%5capp.py", "%2e"):
        assert httpx.get(f"{server.url}/page/{other}").status_code == 404, other


def test_a_page_of_an_allowed_origin_may_send_any_header(server: Server) -> None:
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-own"}
    own, other = (
        server.http.options("/v1/models", headers={**asking, "Origin": origin}).headers
        for origin in (ORIGIN, "http://evil.example")
    )
    assert own["Access-Control-Allow-Headers"] == asking["Access-Control-Request-Headers"]
    assert "Access-Control-Allow-Origin" not in other
    ServeConfig(cors_origins=("*", "https://app.example.org"))


# Bodies


def status(connection: socket.socket) -> int:
    return int(connection.recv(65536).split()[1])


@pytest.mark.parametrize(
    ("key", "length", "refused"),
    [
        *((key, length, {401}) for key in ("", "bsk-guess") for length in (LENGTH, CHUNKED)),
        *((None, f"Content-Length: {n}", {400, 413}) for n in (ServeConfig.max_body + 1, -1, "9" * 20)),
    ],
)
def test_key_and_length_are_checked_before_the_body_arrives(
    server: Server, client: Client, key: str | None, length: str, refused: set[int]
) -> None:
    sender = client if key is None else server.with_key(key)
    with sender.sent(PATH, length) as connection:
        assert status(connection) in refused


def test_limits_are_checked_before_the_body_arrives(server: Server) -> None:
    """A request above its rate, and one beside another whose body is still being read."""
    limited, single = server.tenant(max_per_minute=1), server.tenant(max_concurrent=1)
    assert limited.get("/v1/models").status_code == 200
    with limited.sent(PATH, LENGTH) as connection:
        assert status(connection) == 429
    with single.sent(PATH, LENGTH, body=b"{") as one, single.sent(PATH, LENGTH, body=b"{") as other:
        (refused, *_), *_ = select.select([one, other], [], [], 60)  # whichever came second
        assert status(refused) == 429


def test_a_body_of_unknown_length_is_cut_at_the_limit(client: Client) -> None:
    part = b"%x\r\n%b\r\n" % (ServeConfig.max_body, bytes(ServeConfig.max_body))
    with client.sent(PATH, CHUNKED, body=part + b"1\r\nx\r\n") as connection:
        assert status(connection) == 413


def test_a_body_that_is_slow_or_above_its_rate_ends_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServeConfig, "body_s", 0.1)
    with serving(tmp_path) as server:
        with server.sent(PATH, LENGTH, body=b"{") as slow:
            answer = slow.recv(65536).decode().lower()
            assert (answer.split()[1], "connection: close" in answer) == ("408", True)
            assert server.get("/v1/models").status_code == 200
        throttle = Mock(return_value=60.0)  # longer than the body may take
        monkeypatch.setattr(Limits, "throttle", throttle)
        assert server.post(PATH, ASK).status_code == 408
    assert 0 < sum(n_bytes for (_, n_bytes), _ in throttle.call_args_list) <= len(json.dumps(ASK))


@pytest.mark.parametrize(
    ("body", "allowed"),
    [
        (b"[" * MAX_JSON_DEPTH, True),
        (b"[" * (MAX_JSON_DEPTH + 1), False),
        (b'{"a":' * (MAX_JSON_DEPTH + 1), False),
        (b"[]" * 1000, True),
        (b"]" * (MAX_JSON_TOKENS + 1), True),  # the parser refuses it
        (b"," * MAX_JSON_TOKENS, True),
        (b"," * (MAX_JSON_TOKENS + 1), False),
        (b'"' + b"[,:{" * MAX_JSON_TOKENS + b'"', True),  # the contents of a string
        (rb'"\"' + b"[" * 100 + b'"', True),
        (rb'"\\"' + b"[" * 100, False),
        (b'""' * (2 * MAX_JSON_TOKENS + 1), False),
        (b"{}\0", False),
    ],
    ids=range(12),
)
def test_expensive_json_is_refused_before_it_is_parsed(body: bytes, allowed: bool) -> None:
    if allowed:
        check_json_complexity(body)
    else:
        with pytest.raises(InputError):
            check_json_complexity(body)


def test_a_body_of_many_small_parts_is_answered_and_one_of_many_elements_is_refused(client: Client) -> None:
    """The elements are of a field that would be ignored: nothing else refuses them."""
    body = json.dumps(ASK).encode()
    parts = b"".join(b"1\r\n" + body[n : n + 1] + b"\r\n" for n in range(len(body)))
    with client.sent(PATH, CHUNKED, body=parts + b"0\r\n\r\n") as connection:
        assert status(connection) == 200
    found = [client.post(PATH, {**ASK, "ignored": [0] * n}) for n in (1000, MAX_JSON_TOKENS + 1)]
    assert [answer.status_code for answer in found] == [200, 400]
