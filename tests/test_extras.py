"""The hint of an error names the packages of a missing extra."""

from __future__ import annotations

from importlib import metadata
from unittest.mock import Mock

import pytest

from blendserve.cli.app import run
from blendserve.extras import extra_with, install_hint

REQUIRES = [
    "torch>=2.6",
    'valkey>=6.0; extra == "valkey"',
    'libvalkey>=4.0; extra == "valkey"',
    'nowhere; sys_platform == "nowhere" and extra == "valkey"',
    'ray[serve]<2.64,>=2.60; extra == "ray"',
    'anywhere; python_version >= "3"',
]


@pytest.mark.parametrize(
    ("extra", "hint"),
    [
        ("valkey", "pip install 'valkey>=6.0' 'libvalkey>=4.0'"),
        ("ray", "pip install 'ray[serve]<2.64,>=2.60'"),
        ("unknown", "install the extra 'unknown' of blendserve"),
    ],
)
def test_the_hint_names_the_packages_of_this_platform(
    extra: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "requires", {"blendserve": REQUIRES}.get)
    assert install_hint(extra) == hint


def test_a_module_belongs_to_the_extra_that_installs_it() -> None:
    assert [extra_with(name) for name in ("scipy", "ray", "torch", "nowhere")] == [
        "evaluate",
        "ray",
        None,
        None,
    ]


def test_a_missing_module_of_an_extra_is_an_error_line_and_any_other_a_bug() -> None:
    for module, code in (("scipy", 2), ("nowhere", None)):
        app = Mock(side_effect=ModuleNotFoundError(name=module))
        if code:
            assert run(app, []) == code
        else:
            with pytest.raises(ModuleNotFoundError):
                run(app, [])


@pytest.mark.parametrize("extra", ["evaluate", "codecs", "valkey", "moq", "ray"])
def test_every_extra_that_errors_name_is_declared(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert install_hint(extra).startswith("pip install '")
    monkeypatch.setattr(metadata, "requires", Mock(side_effect=metadata.PackageNotFoundError))
    assert install_hint(extra) == f"install the extra '{extra}' of blendserve"
