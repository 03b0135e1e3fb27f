"""Missing optional packages: the extra that an error names is declared."""

from __future__ import annotations

from importlib import metadata
from typing import get_args
from unittest.mock import Mock

import pytest

from blendserve.cli.app import run
from blendserve.extras import Extra, extra_with


def test_a_module_belongs_to_the_extra_that_installs_it() -> None:
    found = [extra_with(name) for name in ("scipy", "ray", "torch", "nowhere", "val")]
    assert found == ["evaluate", "ray", None, None, None]


def test_a_missing_module_of_an_extra_is_an_error_line_and_any_other_a_bug() -> None:
    assert run(Mock(side_effect=ModuleNotFoundError(name="scipy")), []) == 2
    with pytest.raises(ModuleNotFoundError):
        run(Mock(side_effect=ModuleNotFoundError(name="nowhere")), [])


def test_every_extra_that_an_error_may_name_is_declared() -> None:
    assert set(get_args(Extra)) <= set(metadata.metadata("blendserve").get_all("Provides-Extra") or ())
