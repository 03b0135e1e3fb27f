"""Settings: defaults survive a file, and a wrong value is refused by its dotted name."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from blendserve.config import BASIC, BlendConfig, Config, DecodeConfig
from blendserve.errors import ConfigError
from scripts.make_reference import pages


def written(folder: Path, text: str | bytes) -> Path:
    """A configuration file with this text."""
    path = folder / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refused(make: Callable[..., object], *args: Any, **values: Any) -> tuple[str | None, str | None]:
    """The setting and the file that the error names."""
    with pytest.raises(ConfigError) as error:
        make(*args, **values)
    return error.value.setting, error.value.path


def test_a_file_names_only_what_it_changes(tmp_path: Path) -> None:
    for text in (Config().to_yaml(), ""):
        assert Config.load(written(tmp_path, text)) == Config()
    text = "blend: {ratio: 0.3, near: true}\nstore: {location: here/kv}\n"
    config = Config.load(written(tmp_path, text))
    assert config.blend == Config().blend.with_values(ratio=0.3, near=True)
    assert config.store == Config().store.with_values(location="here/kv")
    assert Config(**yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize(
    ("values", "setting"),
    [
        ({"blend": {"ratio": 1.7}}, "blend.ratio"),
        ({"blend": {"rato": 0.5}}, "blend.rato"),
        ({"blend": {"policy": "deviation[1,0]"}}, "blend.policy"),
        ({"bland": {}}, "bland"),
        ({"blend": 3}, "blend"),
        ({"store": {"remote": {"locaton": "x"}}}, "store.remote.locaton"),
        ({"store": {"kind": "lmbd"}}, "store.kind"),
        ({"store": {"location": "ftp://host/docs"}}, "store.location"),
        ({"store": {"location": "https://host"}}, "store.location"),
        ({"retrieve": {"top_k": "six"}}, "retrieve.top_k"),
        ({"retrieve": {"min_score": -2}}, "retrieve.min_score"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values: dict[str, Any], setting: str, tmp_path: Path) -> None:
    words = [f"{section}={json.dumps(value)}" for section, value in values.items()]
    assert refused(Config, **values) == refused(Config.load, None, words) == (setting, None)
    path = written(tmp_path, yaml.safe_dump(values))
    assert refused(Config.load, path) == (setting, str(path))


@pytest.mark.parametrize("content", [b"a: [", b"- 1\n- 2\n", b"\xff\xfe\x00", None])
def test_a_file_that_is_no_configuration(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "none.yaml" if content is None else written(tmp_path, content)
    assert refused(Config.load, path) == (None, str(path))


def test_changed_replaces_the_given_values_and_checks_again() -> None:
    base = DecodeConfig(seed=3)
    assert base.with_values(max_new_tokens=5, temperature=None) == DecodeConfig(seed=3, max_new_tokens=5)
    assert base.with_values() is base
    with pytest.raises(ValidationError):
        base.seed = 4  # type: ignore[misc]
    for wrong in ({"temperature": -1.0}, {"sed": 1}):
        assert refused(base.with_values, **wrong) == (f"decode.{next(iter(wrong))}", None)


@pytest.mark.parametrize(
    ("location", "kind", "folder"),
    [
        *(("", "lmdb", None), ("here/kv", "lmdb", Path("here/kv")), ("memory", "memory", None)),
        *(("./memory", "lmdb", Path("memory")), ("unix:///tmp/socket", "valkey", None)),
        *(("rediss://host", "valkey", None), ("kdn:https://host/kv/docs/", "kdn", None)),
    ],
)
def test_a_location_names_its_kind_of_store(location: str, kind: str, folder: Path | None) -> None:
    store = Config(store={"location": location}).store
    assert (store.kind, store.path) == (kind, folder)


def test_settings_are_few() -> None:
    """60 names to learn, 15 of them basic; `deliver` and `store.remote` take names of `serve` and `store`."""
    assert len(BASIC) <= 15
    assert sum(line.startswith("| `") for line in pages()["settings.md"].splitlines()) <= 60


def test_words_and_variables_are_written_as_in_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other settings stay. tests/cli/test_commands.py has which of them wins."""
    path = written(tmp_path, "store: {cap_gb: 1, codec: int8}\n")
    monkeypatch.setenv("BLENDSERVE__SERVE__HOSTS", "[one, two]")
    config = Config.load(path, ["store.memory_bytes=4GB", "blend.near=true", "model.threads=null"])
    assert (config.store.cap_gb, config.store.codec, config.store.memory_bytes) == (1, "int8", 4_000_000_000)
    assert (config.blend.near, config.serve.hosts) == (True, ("one", "two"))
    assert Config().blend == BlendConfig()  # only `load` reads the environment
    assert refused(Config.load, None, ["blend.ratio"]) == (None, None)


def test_names_in_a_file_may_be_dotted(tmp_path: Path) -> None:
    path = written(tmp_path, "store: {cap_gb: 1}\nstore.codec: int8\nblend.near: true\n")
    config = Config.load(path)
    assert (config.store.cap_gb, config.store.codec, config.blend.near) == (1, "int8", True)
    assert refused(Config.load, written(tmp_path, "store.codex: int8\n")) == ("store.codex", str(path))


NAMES = [line.split("`")[1] for line in pages()["settings.md"].splitlines() if line.startswith("| `")]
TEXTS = st.sampled_from(
    [
        *("[SEP]", "{Read} the passages", "[a", "{a: ", "null", "[1, 2]"),
        *("- a", "a: b", "*x", "!!python/none", "%"),
    ]
)
LOOSE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4) | st.integers(), inner),
    max_leaves=4,
)


@given(st.sampled_from([*NAMES, "no.such", "store"]), TEXTS | st.text(max_size=6), LOOSE)
def test_any_text_and_any_file_is_settings_or_refused_as_such(name: str, text: str, value: Any) -> None:
    with suppress(ConfigError):
        Config.load(None, [f"{name}={text}"])
    for part in reversed(name.split(".")):
        value = {part: value}
    with TemporaryDirectory() as folder, suppress(ConfigError):
        Config.load(written(Path(folder), yaml.safe_dump(value, allow_unicode=False)))


@pytest.mark.parametrize("text", ["{Read} the passages", "[SEP]", "{a: 1}", "# [x"])
def test_a_text_is_taken_as_it_is(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Config.load(None, [f"prompt.instruction={text}"]).prompt.instruction == text
    monkeypatch.setenv("BLENDSERVE__PROMPT__SYSTEM", text)
    assert Config.load().prompt.system == text
    assert refused(Config.load, None, ["decode.stop=[a"]) == ("decode.stop", None)


def test_replace_changes_one_setting_and_checks_again() -> None:
    config = Config().replace("store.remote.location", "valkey://host:1")
    assert config.store.remote is not None
    assert config.store.remote.valkey.where == "host:1"
    assert config.replace("store.remote", None) == Config()
    assert refused(config.replace, "store.remote.cap_gb", -1) == ("store.remote.cap_gb", None)
    for name in BASIC:  # settings that exist
        section, _, field = name.partition(".")
        assert field in type(getattr(config, section)).model_fields


@pytest.mark.parametrize(
    ("setting", "word", "shortest"),
    [
        ("policy", "deviation[1]", "deviation"),
        ("policy", "deviation[layers=1, 4]", "deviation[1,4]"),
        ("correction", "ridge[zero_shrinkage=3,penalty=2.50]", "ridge[2.5,zero_shrinkage=3]"),
        ("correction", "prior[last_key_scale=0.5]", "prior"),
    ],
)
def test_equal_parts_have_equal_words(setting: str, word: str, shortest: str) -> None:
    """A word of the defaults is the name alone, and the shortest word is its own shortest word."""
    for text in (word, shortest):
        assert getattr(BlendConfig(**{setting: text}), setting) == shortest


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        *(
            ("policy", word)
            for word in ("deviation[", "deviation[]", "deviation[1", "deviation[n=1]", "query[1]")
        ),
        *(
            ("correction", word)
            for word in ("ridge[-1]", "ridge[inf]", "ridge[0]", "none[1]", "shift[rotary=1]")
        ),
    ],
)
def test_a_word_that_names_no_part_is_refused(setting: str, word: str) -> None:
    assert refused(BlendConfig, **{setting: word}) == (f"blend.{setting}", None)
