"""Settings: defaults survive a file, and a wrong value is refused by its dotted name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from blendserve.config import BASIC, BlendConfig, Config, DecodeConfig, changed
from blendserve.errors import ConfigError


def test_defaults_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for text in (Config().to_yaml(), ""):
        path.write_text(text)
        assert Config.load(path) == Config()


def test_a_file_names_only_what_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("blend: {ratio: 0.3, check_layers: [1, 4]}\nstore: {path: here/kv}\n")
    config = Config.load(path)
    blend, store = Config().blend, Config().store
    assert config.blend == changed(blend, ratio=0.3, check_layers=(1, 4))
    assert config.store == changed(store, path=Path("here/kv"))
    assert Config(**yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize(
    ("values", "setting"),
    [
        ({"blend": {"ratio": 1.7}}, "blend.ratio"),
        ({"blend": {"ratio": -0.1}}, "blend.ratio"),
        ({"blend": {"ratio": "most"}}, "blend.ratio"),
        ({"blend": {"rato": 0.5}}, "blend.rato"),
        ({"blend": {"method": "mix"}}, "blend.method"),
        ({"blend": {"check_layers": [1, 0]}}, "blend.check_layers.1"),
        ({"bland": {}}, "bland"),
        ({"blend": 3}, "blend"),
        ({"store": {"tiers": {"remote": {"valkey": {"ulr": "x"}}}}}, "store.tiers.remote.valkey.ulr"),
        ({"store": {"tiers": {"remote": {"cap_gb": -1}}}}, "store.tiers.remote.cap_gb"),
        ({"store": {"kind": "lmbd"}}, "store.kind"),
        ({"store": {"eviction": "fifo"}}, "store.eviction"),
        ({"store": {"admission": 1}}, "store.admission"),
        ({"decode": {"max_new_tokens": 0}}, "decode.max_new_tokens"),
        ({"retrieve": {"top_k": "six"}}, "retrieve.top_k"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values: dict[str, Any], setting: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        Config(**values)
    assert (error.value.setting, error.value.path) == (setting, None)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError) as error:
        Config.load(path)
    assert (error.value.setting, error.value.path) == (setting, str(path))


@pytest.mark.parametrize("content", [b"a: [", b"- 1\n- 2\n", b"\xff\xfe\x00", None])
def test_a_file_that_is_no_configuration(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        Config.load(path)
    assert (error.value.setting, error.value.path) == (None, str(path))


def test_changed_replaces_the_given_values_and_checks_again() -> None:
    base = DecodeConfig(seed=3)
    assert changed(base, max_new_tokens=5, temperature=None) == DecodeConfig(seed=3, max_new_tokens=5)
    assert changed(base) is base
    with pytest.raises(ValidationError):
        base.seed = 4  # type: ignore[misc]
    for wrong in ({"temperature": -1.0}, {"sed": 1}):
        with pytest.raises(ConfigError) as error:
            changed(base, **wrong)
        assert error.value.setting == f"decode.{next(iter(wrong))}"


OLD = Path(__file__).parent / "old_settings"  # configs/ of commit 974603a, and the values that it read there


@pytest.mark.parametrize(("name", "values"), json.loads((OLD / "values.json").read_text()).items())
def test_settings_of_an_older_release_keep_their_values(
    name: str, values: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump(values))  # every setting of then, by its name of then
    with caplog.at_level(logging.WARNING):
        assert Config.load(path) == Config.load(OLD / name)


def test_old_names_are_read_with_one_warning_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("blend: {ratio: auto, floor: 0.123}\nserve: {share_mb: 7, slots: 3}\n")
    for _ in range(2):
        config = Config.load(path)
    assert (config.blend.ratio, config.blend.min_ratio, config.serve.slots) == ("auto:0.123", 0.123, 3)
    assert len([r for r in caplog.records if "0.123" in r.message]) == 1
    assert Config(blend=BlendConfig(ratio="auto").model_dump()).blend.min_ratio == 0.05


def test_a_word_wins_over_the_environment_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("store: {cap_gb: 1, codec: int8}\nblend: {ratio: 0.2}\n")
    assert Config.load(path).store.cap_gb == 1
    monkeypatch.setenv("BLENDSERVE__STORE__CAP_GB", "2")
    monkeypatch.setenv("BLENDSERVE__BLEND__CHECK_LAYERS", "[1, 4]")
    config = Config.load(path)
    assert (config.store.cap_gb, config.store.codec, config.blend.ratio) == (2, "int8", 0.2)
    assert config.blend.check_layers == (1, 4)
    words = ["store.cap_gb=3", "store.tiers.memory_bytes=4GB", "blend.near=true", "reader.threads=null"]
    config = Config.load(path, words)
    assert (config.store.cap_gb, config.store.codec) == (3, "int8")
    assert (config.store.tiers.memory_bytes, config.blend.near) == (4_000_000_000, True)
    assert Config().store.cap_gb == 32  # only `load` reads the environment


@pytest.mark.parametrize(
    ("word", "setting"),
    [("blend.rato=1", "blend.rato"), ("store.cap_gb=-1", "store.cap_gb"), ("blend.ratio", None)],
)
def test_a_wrong_word_or_variable_is_refused_by_name(
    word: str, setting: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as error:
        Config.load(None, [word])
    assert error.value.setting == setting
    name, _, value = word.partition("=")
    monkeypatch.setenv(f"BLENDSERVE__{name.upper().replace('.', '__')}", value or "most")
    with pytest.raises(ConfigError) as error:
        Config.load()
    assert error.value.setting == name


def test_replace_changes_one_setting_and_checks_again() -> None:
    config = Config().replace("store.tiers.remote.valkey.url", "valkey://host:1")
    assert config.store.tiers.remote is not None
    assert config.store.tiers.remote.valkey.port == 1
    assert config.replace("store.tiers.remote", None) == Config()
    with pytest.raises(ConfigError) as error:
        config.replace("store.tiers.remote.cap_gb", -1)
    assert error.value.setting == "store.tiers.remote.cap_gb"
    for name in BASIC:  # settings that exist
        section, _, field = name.partition(".")
        assert field in type(getattr(config, section)).model_fields
