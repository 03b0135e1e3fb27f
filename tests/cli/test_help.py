"""What --help, --version and the generated pages of docs/reference say, and the options made of settings."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

import blendserve
from blendserve.cli.app import COMMANDS, app, run
from blendserve.cli.options import Options, make_app, with_options
from blendserve.cli.reference import MARKER, pages
from blendserve.config import BlendConfig, Config, DecodeConfig
from tests.support.commands import cli
from tests.support.pages import walk

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
FRESH = """
import json, sys
from blendserve.cli import main
codes = main(["--help"]), main(["--version"])
heavy = {"torch", "transformers", "numpy", "faiss", "lmdb", "fastapi"} & set(sys.modules)
print(json.dumps({"codes": codes, "heavy": sorted(heavy)}))
"""


@pytest.mark.parametrize(("name", "text"), pages().items(), ids=pages())
def test_generated_pages_are_current(name: str, text: str) -> None:
    written = (REFERENCE / name).read_text().partition(f"{MARKER}\n\n")[2]
    assert written == text, "run scripts/make_reference.py"


def test_every_command_and_option_has_help() -> None:
    found = dict(walk(typer.main.get_command(app)))
    assert {words[0] for words in found if words} == set(COMMANDS.names)
    for words, command in found.items():
        assert command.help, words
        assert [p.name for p in command.params if not p.help] == [], words
        whole = any(getattr(p, "hidden", False) for p in command.params)
        done = cli(*words, "--help-all" if whole else "--help")
        assert (done.code, done.err) == (0, "")
        assert all(option in done.out for p in command.params for option in p.opts if option.startswith("--"))


def test_help_and_version_import_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    *_, line, told = done.stdout.splitlines()
    assert json.loads(told) == {"codes": [0, 0], "heavy": []}
    assert {blendserve.__version__, version("torch"), platform.python_version()} <= set(
        re.split("[ ,]", line)
    )


def called(options: Options, *words: str) -> Any:
    """The settings that a command with these options gets."""
    got: list[Any] = []
    toy = make_app()

    @toy.command()
    @with_options(settings=options)
    def command(what: Annotated[str, typer.Argument()], settings: Any) -> None:
        got.append(settings)

    assert run(toy, ["this", *words]) == 0
    return got[0]


def test_options_set_the_fields_they_are_named_after() -> None:
    base = Config(blend=BlendConfig(ratio=0.3))
    assert called(Options(base, "blend.ratio", "decode.stop")) == base
    fields = ("blend.ratio", "blend.check_layers", "store.location", "store.memory_bytes", "store.write_back")
    options = Options(Config(), *fields, load=Config.load)
    words = "--ratio auto --check-layers 1,3 --check-layers 5 --store here --memory-bytes 8 --no-write-back"
    got = called(options, *words.split())
    assert (got.blend.ratio, got.blend.check_layers) == ("auto", (1, 3, 5))
    assert (got.store.path, got.store.memory_bytes, got.store.write_back) == (Path("here"), 8, False)
    options = Options(Config(), "decode.seed", "decode.stop")
    got = called(options, "--seed", "3", "--stop", "a, b", "--stop", "c")
    assert (got.decode.seed, got.decode.stop) == (3, ("a, b", "c"))


def test_an_option_overrides_the_file_and_the_file_the_default(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("decode: {max_new_tokens: 5, top_p: 0.5}")
    fields = ("decode.max_new_tokens", "decode.top_p", "decode.temperature")
    got = called(Options(Config(), *fields, load=Config.load), "-c", str(file), "--max-new-tokens", "7")
    assert got.decode == DecodeConfig(max_new_tokens=7, top_p=0.5)
