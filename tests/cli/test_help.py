"""What --help, --version and the generated pages of docs/reference say, and how soon."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

import blendserve
from blendserve.cli.app import COMMANDS, app
from blendserve.cli.options import Options, choices_of, make_app, shown, with_options
from blendserve.cli.reference import pages
from blendserve.config import BlendConfig, Config, DecodeConfig, Section, changed

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "numpy", "faiss", "lmdb", "fastapi")


def commands(name: str = "blendserve", command: Any = None) -> Iterator[tuple[str, Any]]:
    command = command or typer.main.get_command(app)
    yield name, command
    for part in command.list_commands(None) if hasattr(command, "list_commands") else ():
        yield from commands(f"{name} {part}", command.get_command(None, part))


ALL = dict(commands())


@pytest.mark.parametrize(("name", "text"), pages().items(), ids=pages())
def test_generated_pages_are_current(name: str, text: str) -> None:
    assert (ROOT / "docs" / "reference" / name).read_text() == text, "run scripts/make_reference.py"


def test_every_command_has_a_page() -> None:
    told = pages()["cli-user.md"] + pages()["cli-research.md"]
    assert [name for name in COMMANDS.names if f"## `blendserve {name}" not in told] == []


@pytest.mark.parametrize("name", ALL)
def test_every_help_text_is_a_sentence(name: str) -> None:
    command = ALL[name]
    texts = {name: command.help, **{f"{name} {p.name}": p.help for p in command.params if p.name != "help"}}
    for where, text in texts.items():
        words = text.split(" [default:")[0]
        assert words[0].isupper(), where
        assert words.rstrip("\n").endswith((".", "docs kv-0 kv-1", "wait")) or "\b" in words, where
        assert " " in words, where


@pytest.mark.parametrize("name", [name for name in ALL if name.count(" ")])
def test_the_first_sentence_fits_into_the_list_of_commands(name: str) -> None:
    first = ALL[name].help.split("\n\n")[0].split(". ")[0]
    assert len(first) <= 65, first


def settings(section: type[Section]) -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from settings(field.annotation)
        else:
            yield f"{section.__name__}.{name}", field


def sections() -> Iterator[type[Section]]:
    from blendserve.bench import config as bench
    from blendserve.evaluate.config import EvaluateConfig
    from blendserve.serve.config import Config as ServerConfig

    yield from (ServerConfig, EvaluateConfig)
    yield from (each for each in vars(bench).values() if isinstance(each, type) and issubclass(each, Section))


def test_every_setting_says_what_it_does() -> None:
    found = dict(item for section in sections() for item in settings(section))
    assert len(found) > 60
    silent = [name for name, field in found.items() if not (field.description or "").endswith(".")]
    assert silent == []


def test_help_imports_nothing_heavy() -> None:
    look = f"""if True:
        import sys, blendserve, blendserve.cli
        sys.argv = ["blendserve", "--help"]
        try:
            blendserve.cli.main()
        except SystemExit:
            sys.exit(str([name for name in {HEAVY} if name in sys.modules] or ""))
    """
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
    assert all(f"  {name} " in done.stdout for name in COMMANDS.names)


def test_version_names_what_matters() -> None:
    command = [sys.executable, "-m", "blendserve", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    torch = done.stdout.partition("torch ")[2].partition(",")[0]
    assert torch[0].isdigit()
    assert (
        done.stdout
        == f"blendserve {blendserve.__version__}, torch {torch}, Python {platform.python_version()}\n"
    )


# --- options that are settings ---------------------------------------------------------------------------------------


def called(options: Options, *words: str) -> Any:
    """What a command gets for its settings."""
    got: list[Any] = []
    toy = make_app()

    @toy.command()
    @with_options(settings=options)
    def command(what: Annotated[str, typer.Argument()], settings: Any) -> None:
        assert what == "this"
        got.append(settings)

    with pytest.raises(SystemExit) as end:
        toy(["this", *words])
    assert end.value.code == 0
    return got[0]


def test_without_options_the_settings_are_the_base() -> None:
    base = Config(blend=BlendConfig(ratio=0.3))
    assert called(Options(base, "blend.ratio", "decode.stop")) == base


def test_options_set_what_they_are_named_after() -> None:
    options = Options(
        Config(), "blend.ratio", "blend.check_layers", "store.path", "store.tiers.host_bytes", "store.write_back",
        names={"store.path": "folder"},
        load=Config.load,
    )  # fmt: skip
    got = called(
        options, "--ratio", "auto", "--check-layers", "1,3", "--check-layers", "5", "--folder", "here",
        "--host-bytes", "8", "--no-write-back",
    )  # fmt: skip
    assert (got.blend.ratio, got.blend.check_layers, got.store.path) == ("auto", (1, 3, 5), Path("here"))
    assert (got.store.tiers.host_bytes, got.store.write_back) == (8, False)


def test_an_option_goes_before_the_file_and_the_file_before_the_default(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("decode: {max_new_tokens: 5, top_p: 0.5}")
    options = Options(
        Config(), "decode.max_new_tokens", "decode.top_p", "decode.temperature", load=Config.load
    )
    got = called(options, "-c", str(file), "--max-new-tokens", "7").decode
    assert got == DecodeConfig(max_new_tokens=7, top_p=0.5)


def test_one_option_may_set_two_fields_and_texts_keep_their_commas() -> None:
    options = Options(Config(), "decode.seed", "blend.seed", "decode.stop", verbatim=("stop",))
    got = called(options, "--seed", "3", "--stop", "a, b", "--stop", "c")
    assert (got.decode.seed, got.blend.seed, got.decode.stop) == (3, 3, ("a, b", "c"))


def test_choices_and_defaults_are_the_fields_own() -> None:
    fields = BlendConfig.model_fields
    assert "prefix" in choices_of(fields["method"])
    assert "query" in choices_of(fields["policy"])
    assert choices_of(fields["seed"]) == ()
    helps = {
        p.name: p.annotation.__metadata__[0].help
        for p in Options(Config(), "blend.policy", "blend.seed").parameters()
    }
    assert "One of query, " in helps["policy"]
    assert helps["seed"].endswith("[default: 0]")
    base = changed(Config(), blend=BlendConfig(seed=9).model_dump())
    assert (
        Options(base, "blend.seed").parameters()[0].annotation.__metadata__[0].help.endswith("[default: 9]")
    )
    assert [shown(x) for x in (None, (), True, 0.5, (1, 2.0), "a")] == ["", "", "yes", "0.5", "1,2", "a"]
