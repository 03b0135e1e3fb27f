"""Settings: every default round-trips, every wrong value is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from blendserve.config import BlendConfig, Config, DecodeConfig, changed
from blendserve.errors import ConfigError
from blendserve.registry import nearest


def test_defaults_survive_being_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(Config().to_yaml())
    assert Config.load(path) == Config()
    path.write_text("")
    assert Config.load(path) == Config()


def test_a_file_names_only_what_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("blend: {ratio: 0.3, check_layers: [1, 4]}\nstore: {path: here/kv}\n")
    config = Config.load(path)
    assert (config.blend.ratio, config.blend.check_layers, config.store.path) == (
        0.3,
        (1, 4),
        Path("here/kv"),
    )
    assert config.blend.policy == Config().blend.policy
    assert Config(**yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"blend": {"ratio": 1.7}}, r"'blend.ratio' cannot be 1.7: .*less than or equal to 1"),
        ({"blend": {"ratio": -0.1}}, r"'blend.ratio' cannot be -0.1"),
        ({"blend": {"ratio": "most"}}, r"'blend.ratio' cannot be 'most': .*number"),
        ({"blend": {"rato": 0.5}}, r"unknown setting 'blend.rato': did you mean 'ratio'"),
        ({"blend": {"method": "mix"}}, r"'blend.method' cannot be 'mix': .*'blend', 'full'"),
        ({"blend": {"check_layers": [1, 0]}}, r"'blend.check_layers.1' cannot be 0"),
        ({"bland": {}}, r"unknown setting 'bland': did you mean 'blend'"),
        ({"zzz": 1}, r"unknown setting 'zzz': known are reader, retrieve"),
        ({"blend": 3}, r"'blend' cannot be 3: it has settings of its own: method, policy"),
        (
            {"store": {"tiers": {"remote": {"ulr": "x"}}}},
            r"unknown setting 'store\.tiers\.remote\.ulr': did you mean 'store\.tiers\.remote\.valkey\.url'",
        ),
        ({"store": {"remote": {}}}, r"unknown setting 'store\.remote': did you mean 'store\.tiers\.remote'"),
        (
            {"store": {"tiers": {"remote": {"valkey": {"ulr": "x"}}}}},
            r"unknown setting 'store\.tiers\.remote\.valkey\.ulr': did you mean 'url'",
        ),
        ({"store": {"url": "x"}}, r"unknown setting 'store\.url': did you mean 'store\.valkey\.url'"),
        ({"store": {"tiers": {"remote": {"cap_gb": -1}}}}, r"'store\.tiers\.remote\.cap_gb' cannot be -1"),
        ({"decode": {"max_new_tokens": 0}}, r"'decode.max_new_tokens' cannot be 0"),
        ({"decode": {"top_p": 0}}, r"'decode.top_p' cannot be 0"),
        ({"store": {"cap_gb": 0}}, r"'store.cap_gb' cannot be 0"),
        ({"store": {"kind": "lmbd"}}, r"'store.kind' cannot be 'lmbd': there is no store kind .*mean 'lmdb'"),
        ({"store": {"eviction": "fifo"}}, r"'store.eviction' cannot be 'fifo': .* known are lru, refuse"),
        ({"store": {"admission": 1}}, r"'store.admission' cannot be 1: .*string"),
        ({"retrieve": {"top_k": "six"}}, r"'retrieve.top_k' cannot be 'six'"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**values)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"config\.yaml: .*" + message):
        Config.load(path)


def test_a_section_alone_names_itself() -> None:
    with pytest.raises(ConfigError, match=r"'blend\.ratio' cannot be 2"):
        BlendConfig(ratio=2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [", "is not YAML"),
        (b"- 1\n- 2\n", r"must hold sections \(reader, retrieve"),
        (b"\xff\xfe\x00", "is not YAML"),
    ],
)
def test_a_file_that_is_no_configuration(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Config.load(path)
    with pytest.raises(ConfigError, match=r"missing\.yaml cannot be read: No such file"):
        Config.load(tmp_path / "missing.yaml")


def test_changed_replaces_what_is_given_and_checks_again() -> None:
    base = DecodeConfig(seed=3)
    assert changed(base, max_new_tokens=5, temperature=None) == DecodeConfig(seed=3, max_new_tokens=5)
    assert changed(base) is base
    with pytest.raises(ConfigError, match=r"decode\.temperature"):
        changed(base, temperature=-1.0)
    with pytest.raises(ConfigError, match=r"unknown setting 'decode\.sed': did you mean 'seed'"):
        changed(base, sed=1)


def test_settings_cannot_be_changed_in_place() -> None:
    with pytest.raises(Exception, match="frozen"):
        Config().blend.ratio = 0.5  # type: ignore[misc]


def test_nearest_names_a_neighbour_or_all() -> None:
    assert nearest("rati", ["ratio", "seed"]) == "did you mean 'ratio'?"
    assert nearest("xyz", ["ratio", "seed"]) == "known are ratio, seed"
