"""The single API key, model names and CORS: what a client of another program needs to reach the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from blendserve.cli import main
from blendserve.errors import ConfigError
from blendserve.serve.asking import served_names
from blendserve.serve.config import Config, ServeConfig, effective, with_environment_key
from blendserve.serve.keys import KeyFile, Tenant
from tests.engine.helpers import PASSAGES, QUESTIONS
from tests.serve.helpers import Server, bearer

KEY = "sk-one-key"
ORIGIN = "http://localhost:3000"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": QUESTIONS[0]}],
    "documents": [{"text": PASSAGES[0].text}],
    "max_tokens": 2,
}
CHAT = "/v1/chat/completions"


class Shop:
    """A server with a key file, a single key, a public model name and an allowed origin."""

    def __init__(self, folder: Path) -> None:
        file = KeyFile(folder / "keys.json")
        self.bob = file.create(Tenant("bob", "space-b", ("b",)))
        self.server = Server(
            folder,
            ServeConfig(
                keys=file.path,
                api_key=KEY,
                served_model_name="public",
                cors_origins=(ORIGIN,),
                max_body_kb=16,
            ),
        )


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    made = Shop(tmp_path_factory.mktemp("access"))
    yield made
    made.server.close()


def ask(client: openai.OpenAI, model: str = "public") -> Any:
    extra = {"documents": BODY["documents"]}
    return client.chat.completions.create(
        model=model, messages=BODY["messages"], max_tokens=2, extra_body=extra
    )


def test_the_single_key_and_those_of_the_file(shop: Shop) -> None:
    assert ask(shop.server.client(KEY)).choices
    assert ask(shop.server.client(shop.bob)).choices
    for wrong in (KEY[:-1], KEY + "x", KEY.upper(), "none"):
        with pytest.raises(openai.AuthenticationError):
            ask(shop.server.client(wrong))
    assert shop.server.get("/v1/models").status_code == 401
    collections = [
        shop.server.get("/v1/models", key).json()["data"][0]["x_blendserve"]["collections"]
        for key in (KEY, shop.bob)
    ]
    assert collections == [["a", "b"], ["b"]]
    assert [shop.server.get("/metrics", key).status_code for key in (KEY, shop.bob)] == [200, 403]


def test_the_single_key_alone(tmp_path: Path) -> None:
    server = Server(tmp_path, ServeConfig(api_key=KEY))
    try:
        assert ask(server.client(KEY), "tiny").choices
        assert server.get("/v1/models", "other").status_code == server.get("/v1/models").status_code == 401
        added = server.post("/v1/documents", {"documents": [{"text": "New."}], "collection": "a"}, KEY)
        assert server.job(added, KEY)["state"] == "done"
    finally:
        server.close()


def test_the_key_is_in_no_printed_settings() -> None:
    settings = Config(serve=ServeConfig(api_key=KEY).model_dump())
    shown = effective(settings, ["indexes/demo"])
    assert KEY not in shown + repr(settings) + settings.to_yaml()
    assert "api_key" not in yaml.safe_load(shown)["serve"]
    assert settings.serve.api_key is not None
    assert settings.serve.api_key.get_secret_value() == KEY


@pytest.mark.parametrize("key", ["", "two words", "k\u00e9y", "line\n", 123])
def test_a_key_that_no_header_could_hold_is_refused(key: Any) -> None:
    with pytest.raises(ConfigError, match=r"'serve\.api_key' must be") as error:
        ServeConfig(api_key=key)
    assert not key or str(key) not in str(error.value)


def test_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLENDSERVE_API_KEY", raising=False)
    assert with_environment_key(Config()) == Config()
    monkeypatch.setenv("BLENDSERVE_API_KEY", KEY)
    own = Config(serve=ServeConfig(api_key="own").model_dump())
    assert with_environment_key(own) == own
    made = with_environment_key(Config()).serve.api_key
    assert made is not None
    assert made.get_secret_value() == KEY
    monkeypatch.setenv("BLENDSERVE_API_KEY", "")
    with pytest.raises(ConfigError, match="api_key"):
        with_environment_key(Config())


@pytest.mark.parametrize("by", ["option", "environment"])
def test_the_command_line_takes_a_key_and_prints_none(
    by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLENDSERVE_API_KEY", KEY if by == "environment" else "other")
    option = ["--api-key", KEY] if by == "option" else []
    code = main(["serve", "--host", "0.0.0.0", "--index", str(tmp_path / "missing"), *option])
    out, err = capsys.readouterr()
    assert code == 2
    assert "0.0.0.0" in out + err  # the settings are printed
    assert "API keys" not in err  # it is the index that is missing
    assert KEY not in out + err


def test_the_served_model_name(shop: Shop) -> None:
    client = shop.server.client(KEY)
    assert [m.id for m in client.models.list()] == ["public"]
    for name in ("public", "tiny"):
        assert ask(client, name).model == client.models.retrieve(name).id == "public"
    with pytest.raises(openai.NotFoundError, match="'public'"):
        ask(client, "gpt-9")
    settings = shop.server.get("/v1/rag/settings", KEY).json()
    assert settings["model"] == "public"


def test_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models" / "llama-1b"
    folder.mkdir(parents=True)
    assert served_names(str(folder), None) == ("llama-1b", str(folder))
    assert served_names(f"{folder}/", None) == ("llama-1b", f"{folder}/")
    assert served_names(str(folder), "mine") == ("mine", str(folder))
    assert served_names("Qwen/Qwen2.5-0.5B-Instruct", None) == ("Qwen/Qwen2.5-0.5B-Instruct",)
    monkeypatch.chdir(folder)
    assert served_names(".", None) == ("llama-1b", ".")


def test_a_preflight_request_needs_no_key(shop: Shop) -> None:
    asking = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
    }
    answer = shop.server.http.options(CHAT, headers=asking)
    assert answer.status_code == 200
    assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
    allowed = answer.headers["Access-Control-Allow-Headers"].lower()
    assert {"authorization", "content-type", "x-stainless-os"} <= set(allowed.replace(" ", "").split(","))
    assert "Access-Control-Allow-Credentials" not in answer.headers
    other = shop.server.http.options(CHAT, headers={**asking, "Origin": "http://evil.example"})
    assert "Access-Control-Allow-Origin" not in other.headers


@pytest.mark.parametrize(
    ("key", "body", "status"),
    [
        (KEY, {**BODY, "model": "public"}, 200),
        (KEY, {**BODY, "model": "public", "stream": True}, 200),
        (KEY, {**BODY, "model": "public", "n": 2}, 400),
        ("wrong", BODY, 401),
        (KEY, {**BODY, "model": "gpt-9"}, 404),
        (KEY, {**BODY, "user": "x" * 20_000}, 413),
    ],
)
def test_a_browser_may_read_answers_and_errors(
    shop: Shop, key: str, body: dict[str, Any], status: int
) -> None:
    answer = shop.server.http.post(CHAT, json=body, headers={**bearer(key), "Origin": ORIGIN})
    assert answer.status_code == status
    assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]


def test_any_origin(tmp_path: Path) -> None:
    server = Server(tmp_path, ServeConfig(cors_origins=("*",)))
    try:
        answer = server.http.get("/v1/models", headers={"Origin": "http://any.example"})
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
        assert "Access-Control-Allow-Credentials" not in answer.headers
    finally:
        server.close()


def test_without_the_setting_no_origin_is_allowed(tmp_path: Path) -> None:
    server = Server(tmp_path, ServeConfig())
    try:
        answer = server.http.get("/v1/models", headers={"Origin": ORIGIN})
        assert answer.status_code == 200
        assert "Access-Control-Allow-Origin" not in answer.headers
    finally:
        server.close()


@pytest.mark.parametrize(
    "origin", ["localhost:3000", "http://localhost:3000/app", "http://a.b/", "", "http://"]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="an origin looks like"):
        ServeConfig(cors_origins=(origin,))
