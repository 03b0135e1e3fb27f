"""Settings: defaults survive a file, and a wrong value is refused by its dotted name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from blendserve.config import Config, DecodeConfig, changed
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
