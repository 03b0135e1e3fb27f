"""Messages that ask for an extra name its packages."""

from __future__ import annotations

from importlib import metadata

import pytest

from blendserve.extras import install_hint

REQUIRES = [
    "torch>=2.6",
    'valkey>=6.0; extra == "valkey"',
    'libvalkey>=4.0; extra == "valkey"',
    'nowhere; sys_platform == "nowhere" and extra == "valkey"',
    'ray[serve]<2.64,>=2.60; extra == "ray"',
    'anywhere; python_version >= "3"',
]


@pytest.fixture
def requires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", {"blendserve": REQUIRES}.get)


@pytest.mark.usefixtures("requires")
@pytest.mark.parametrize(
    ("extra", "hint"),
    [
        ("valkey", "pip install 'valkey>=6.0' 'libvalkey>=4.0'"),
        ("ray", "pip install 'ray[serve]<2.64,>=2.60'"),
        ("unknown", "install the extra 'unknown' of blendserve"),
    ],
)
def test_the_hint_names_the_packages_of_this_platform(extra: str, hint: str) -> None:
    assert install_hint(extra) == hint


def test_without_metadata_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert install_hint("moq") == "install the extra 'moq' of blendserve"


@pytest.mark.parametrize("extra", ["evaluate", "codecs", "valkey", "moq", "ray"])
def test_every_extra_that_messages_name_is_declared(extra: str) -> None:
    assert install_hint(extra).startswith("pip install '")
